"""KV blocks: their layout and hashes, and the pool that owns them.

    block_pool.py   which blocks of a worker are free, cached or in use
    block_hash.py   hashes of full blocks, the same in routers and workers

Entry points: `BlockPool` in a worker's engine, `BlockHasher` there and in routers. How blocks move
between workers is in `shared/transfer`.
Read first: `block_pool.py`, `block_hash.py`.

May import: `control.protocol`, `model.model_config`, `base`, `kernels`. `block_hash.py` never
imports torch: routers use it.
"""
