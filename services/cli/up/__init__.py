"""`pagewire up`: a whole cluster on one machine, from its first process to its last.

Entry point: `up` (command.py: its options, and how long requests have to finish when it stops).
Read first: `cluster_plan.py` (decides which processes, GPUs and memory: a pure function),
`supervisor.py` (starts, restarts and stops them, and gives up), `cluster.py` (the order of a start,
and when a cluster is ready).

May import: `shared`, modules of `services.cli`. It starts services as processes and imports none.
"""
