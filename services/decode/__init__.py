"""The decode service: answers requests, with prompts computed here or by prefill workers.

Entry point: `run` (main.py).
Read first: `service.py` (requests), `remote_jobs.py` (prompts that prefill workers compute),
`prefill_links.py` (KV links to them). `remote_jobs.py` chooses the prefill worker; the scheduler
(shared/engine/scheduler.py) keeps short prompts here (`--local-prefill-tokens`).

May import: `shared`.
"""
