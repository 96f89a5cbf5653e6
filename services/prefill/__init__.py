"""The prefill service: computes prompts, sends their KV blocks, samples the first token.

Entry point: `run` (main.py).
Read first: `service.py` (takes and refuses jobs), `decode_links.py` (KV links to decode workers).
`shared/kv/endpoint/sender.py` decides in which order jobs' blocks leave.

May import: `shared`.
"""
