"""KV blocks: their layout and hashes, the pool that owns them, and how they move between workers.

    block_pool.py   which blocks of a worker are free, cached or in use
    block_hash.py   hashes of full blocks, the same in routers and workers
    endpoint/       moves blocks from a prefill worker's pool to a decode worker's
    carriers/       send the bytes: CUDA IPC, UCX or ZeroMQ

Entry points: `BlockPool` in a worker's engine, `BlockHasher` there and in routers, `KvSender` and
`KvReceiver` of the endpoint.
Read first: `block_pool.py`, `block_hash.py`, `endpoint/__init__.py`.

May import: `shared.control.protocol`, `shared.model.model_config`, `kernels`, small modules.
`block_hash.py` never imports torch: routers use it.
"""
