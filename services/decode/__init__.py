"""The decode service: answers requests, with prompts computed here or by prefill workers.

Entry point: `run` (main.py).
Read first: `service.py` (requests of routers), `remote_jobs.py` (prompts that prefill workers
compute), `prefill_links.py` (KV links to prefill workers).

Who decides where a prompt is computed: the scheduler (shared/engine/scheduling/scheduler.py) keeps short
prompts here (`--local-prefill-tokens`). For the others, the router names prefill workers in order
of preference (services/router/placement/policy.py). `remote_jobs.py` asks the first one that has a
working link, then the next if that fails. If none is left, the prompt is computed here.

May import: `shared`.
"""
