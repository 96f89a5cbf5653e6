"""Prometheus metrics that more than one service shows, and the server that shows them.

Entry points: `MetricsServer` (server.py), `load_families` (load.py), `labelled` (faults.py). Each
service has its own as well: `services/router/metrics`, `shared/worker/metrics.py`.

May import: `shared.cluster`, small modules. Never torch.
"""
