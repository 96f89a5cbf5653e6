"""The prefill service: computes prompts, sends their KV blocks, samples the first token.

Entry point: `run` (main.py).
Read first: `service.py` (jobs), `decode_links.py` (KV links to decode workers).

May import: `shared`.
"""
