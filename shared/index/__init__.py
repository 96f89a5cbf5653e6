"""The prefix index: which worker has which KV blocks cached, by block hash, in Redis.

    worker: BlockPool --> IndexPublisher --> Redis <-- PrefixIndex.lookup <-- router

Lookups also return the load that other routers have reserved, since that is the same round trip.

Entry points: `PrefixIndex` (prefix_index.py), `IndexPublisher` (publisher.py).
Read first: `prefix_index.py`, `scripts.py` (what Redis runs: which entries count in a lookup, by
epoch and expiry, and which are swept), `optimistic.py` (what a router assumes before a worker has
published it).

May import: `shared.cluster.redis_client`, `shared.kv.block_hash`, small modules. Never torch.
"""
