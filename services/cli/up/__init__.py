"""`pagewire up`: a whole cluster on one machine, from its first process to its last.

Entry point: `up` (command.py).
Read first: `cluster_plan.py` (which processes: a pure function), `supervisor.py` (keeps them
running), `cluster.py`.

May import: `shared`. It starts services as processes and imports none.
"""
