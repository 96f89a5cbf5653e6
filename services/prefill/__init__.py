"""The prefill service: computes prompts, sends their KV blocks, samples the first token.

Entry point: `run` (main.py).
Read first: `service.py` (accepts and refuses jobs), `decode_links.py` (KV links to decode workers).
The blocks themselves are sent by `shared/kv/endpoint/sender.py`.

May import: `shared`.
"""
