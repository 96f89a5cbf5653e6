"""The prefill service: computes prompts, sends their KV blocks, samples the first token.

Entry point: `run` (main.py).
Read first: `jobs.py` (takes, refuses and reports jobs), `decode_links.py` (KV links to decode
workers). `shared/transfer/endpoint/sender.py` sends the blocks.

May import: `shared`.
"""
