"""The router: one OpenAI-compatible endpoint in front of all workers.

    http/ --> text/, dispatch/ --> placement/ --> workers/ --> decode workers

Entry point: `run` (main.py); `service.py` composes the parts.
Read first: `http/api.py`, `dispatch/dispatcher.py`, `placement/policy.py`.

May import: `shared`, except what needs torch.
"""
