"""The router's connections to workers, one to each run of each worker.

Entry point: `WorkerLinks` (worker_links.py), which decides when a lost worker is tried again.

May import: `shared.control`, `shared.cluster`. No HTTP.
"""
