"""The cluster's directory: which workers there are, kept in Redis as records with a lease.

Entry points: `Registry` publishes a worker's record and finds those of others; `connect_redis`
opens the connection.
Read first: `worker_record.py` (what a worker says about itself), `registry.py`, `redis_client.py`.

May import: `shared.control.protocol`, the small modules of `shared`. Never torch.
"""
