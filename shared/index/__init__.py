"""The prefix index: which worker has which KV blocks cached, by block hash, in Redis.

    worker: BlockPool --> IndexPublisher --> Redis <-- PrefixIndex.lookup <-- router

Entry points: `PrefixIndex` and its publisher in prefix_index.py.
Read first: `prefix_index.py`, `scripts.py` (what Redis runs: which entries count in a lookup, by
epoch and expiry, and which are swept), `optimistic.py` (what a router assumes before a worker has
published it).

May import: `shared.cluster.redis_client`, `shared.kv.block_hash`, small modules. Never torch.
"""
