"""The decode service: answers requests whose prompts it or a prefill worker computes.

Entry point: `run` (main.py).
Read first: `service.py` (requests of routers), `remote_jobs.py` (prompts that prefill workers
compute), `prefill_links.py` (KV links to prefill workers).

Where a prompt is computed: the scheduler (shared/engine/scheduling/scheduler.py) keeps short
prompts on this worker (`--local-prefill-tokens`). For longer ones, the router names prefill workers
in order of preference (services/router/placement/policy.py). `remote_jobs.py` sends the job to the
first of them that has a working link, and to the next one if that fails. If none is left, this
worker computes the prompt.

May import: `shared`.
"""
