"""Transports: they send a segment's payload from one worker's staging slot to another's.

A transport moves bytes between staging slots and does not know jobs or blocks.
Read first: `base.py` (the interface), `zmq.py` (the simplest; works everywhere). docs/extending.md
says how to add one.

May import: `shared.kv`, `shared.engine.execution.block_mover` and `executor`, `base`, `settings`,
`request`.
"""
