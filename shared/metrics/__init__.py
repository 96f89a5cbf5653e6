"""Prometheus metrics that more than one service shows.

Entry points: `load_families` (load.py), `FaultCollector` (faults.py). Each service has its own as
well: `services/router/metrics`, `shared/worker/metrics.py`.

May import: `shared.cluster`, small modules. Never torch.
"""
