"""What a router knows of its cluster: the workers, a control connection to each, other routers.

Entry point: `ClusterMembers` (members.py). Read first: `worker_links.py`, which also decides when
to connect to a lost worker again; `served_workers.py` (which workers have the model that is
served); `startup.py` (what a cluster that starts still lacks). `description.py` makes the answers
that operators get.

May import: `shared.control`, `shared.cluster`. No HTTP.
"""
