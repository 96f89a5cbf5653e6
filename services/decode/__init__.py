"""The decode service: a worker that prefers to answer requests.

Entry point: `run` (main.py). `shared/worker` has the service, which is the same for all workers.
Read first: `shared/worker/router_requests.py` (requests of routers), `shared/worker/remote_jobs.py`
(prompts that other workers compute), `shared/worker/prefill_links.py` (KV links to them).

May import: `shared`.
"""
