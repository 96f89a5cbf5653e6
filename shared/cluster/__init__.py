"""The cluster's directory: which workers there are, kept in Redis as records with a lease.

Entry points: `Registry` publishes a worker's record and finds those of others; `connect_redis`
opens the connection.
Read first: `worker_record.py` (what a worker says about itself), `registry.py` (leases: when a
record ends, and which ones others see), `redis_client.py`. A worker is lost to a router when its
control connection is: `shared/control/client.py`.

May import: `shared.control.protocol`, the small modules of `shared`. Never torch.
"""
