"""The cluster's directory: its workers and routers, kept in Redis as records with a lease.

Entry points: `RecordPublisher` renews a worker's record, `WorkerDirectory` knows those of others;
both use a `Registry`. `RouterDirectory` (routers.py) does both for routers. `connect_redis` opens
the connection.
Read first: `worker_record.py` (what a worker says about itself), `registry.py` (leases: when a
record ends, and which ones others see), `worker_directory.py`, `record_seal.py`,
`redis_client.py`. A worker is lost to a router, and a prefill worker to a decode worker, when the
control connection is (`shared/control/client.py`).

May import: `shared.control.protocol`, the small modules of `shared`. Never torch.
"""
