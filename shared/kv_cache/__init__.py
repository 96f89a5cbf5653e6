"""Paged KV cache: block hashes, block pool, storage."""
