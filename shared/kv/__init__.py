"""KV blocks: their layout and hashes, and the pool that owns them.

    model_identity.py  whether two workers serve the same model
    kv_layout.py       what a block consists of, and which layers share blocks
    packing.py         sizes of packed blocks, by layer group
    device_memory.py   GPU memory that other processes may map
    block_pool.py      which blocks of a worker are free, cached or in use
    block_hash.py      hashes of full blocks, the same in routers and workers

Entry points: `BlockPool` in a worker's engine, `BlockHasher` there and in routers. How blocks move
between workers is in `shared/transfer`.
Read first: `kv_layout.py`, `block_pool.py`, `block_hash.py`.

May import: `base`, `kernels`. Only `packing.py`, `storage.py` and `device_memory.py` import torch:
routers use the others.
"""
