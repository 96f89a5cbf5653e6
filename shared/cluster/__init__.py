"""The cluster's directory: which workers there are, kept in Redis as records with a lease.

Entry points: `RecordPublisher` renews a worker's record, `WorkerDirectory` knows those of others;
both use a `Registry`. `connect_redis` opens the connection.
Read first: `worker_record.py` (what a worker says about itself), `registry.py` (leases: when a
record ends, and which ones others see), `redis_client.py`. A worker is lost to a router when its
control connection is: `shared/control/client.py`.

May import: `shared.control.protocol`, the small modules of `shared`. Never torch.
"""
