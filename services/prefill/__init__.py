"""The prefill service: a worker that prefers to compute prompts for other workers.

Entry point: `run` (main.py). `shared/worker` has the service, which is the same for all workers.
Read first: `shared/worker/prefill_jobs.py` (takes, refuses and reports jobs),
`shared/worker/decode_links.py` (KV links to the workers that ask for them).

May import: `shared`.
"""
