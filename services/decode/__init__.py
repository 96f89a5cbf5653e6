"""The decode service: answers requests, with prompts computed here or by prefill workers.

Entry point: `run` (main.py).
Read first: `service.py` (requests), `remote_jobs.py` (prompts that prefill workers compute),
`prefill_links.py` (KV links to them). The router ranks the prefill workers
(services/router/placement/policy.py); `remote_jobs.py` asks the first of them that has a working
link, then others if it fails, and has the prompt computed here if none is left. The scheduler
(shared/engine/scheduler.py) keeps short prompts here (`--local-prefill-tokens`).

May import: `shared`.
"""
