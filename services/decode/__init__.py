"""The decode service: answers requests, with prompts computed here or by prefill workers.

Entry point: `run` (main.py).
Read first: `service.py` (requests), `remote_jobs.py` (prompts that prefill workers compute),
`prefill_links.py` (KV links to them).

May import: `shared`.
"""
