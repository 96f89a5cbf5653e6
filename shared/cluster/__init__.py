"""The cluster's directory: its workers and routers, kept in Redis as records with a lease.

Entry points: `RecordPublisher` renews a worker's record, `WorkerDirectory` reads those of the other
workers; both use a `Registry`. `RouterDirectory` (routers.py) does both for routers.
`connect_redis` opens the connection.
Read first: `worker_record.py` (what a worker publishes about itself), `registry.py` (leases: when a
record expires, and which ones others see), `worker_directory.py`, `record_seal.py`,
`redis_client.py`.

These records do not decide when a connection is lost: `shared/control/client.py` does, for a
router's workers and for a decode worker's prefill workers.

May import: `shared.control.protocol`, `costs`, `base`, `settings`, `request`. Never torch.
"""
