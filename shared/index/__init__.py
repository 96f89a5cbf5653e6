"""The prefix index: which worker has which KV blocks cached, by block hash, in Redis.

    worker: BlockPool --> IndexPublisher --> Redis <-- PrefixIndex.lookup <-- router

A lookup also returns the load that other routers have reserved, so that both need one round trip.

Entry points: `PrefixIndex` (prefix_index.py), `IndexPublisher` (publisher.py).
Read first: `prefix_index.py`, `scripts.py` (Redis scripts: which entries count in a lookup, by
epoch and expiry, and which are deleted), `optimistic.py` (entries that a router writes before the
worker has the blocks).

May import: `shared.cluster.redis_client`, `shared.kv.block_hash`, `base`, `settings`, `request`.
Never torch.
"""
