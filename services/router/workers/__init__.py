"""The router's control connections: one to each running worker.

Entry point: `WorkerLinks` (worker_links.py), which also decides when to connect to a lost worker
again.

May import: `shared.control`, `shared.cluster`. No HTTP.
"""
