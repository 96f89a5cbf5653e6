"""KV blocks: their layout and hashes, the pool that owns them, and how they move between workers.

Entry points: `BlockPool` (block_pool.py) in a worker's engine, `BlockHasher` (block_hash.py) there
and in routers, the endpoint's `KvSender` and `KvReceiver`.
Read first: `block_pool.py`, `block_hash.py`, `endpoint/__init__.py`. `carriers/` sends
payloads by CUDA IPC, UCX or ZeroMQ.

May import: `shared.control.protocol`, `shared.model.config`, `kernels`. `block_hash.py` never
imports torch: routers use it.
"""
