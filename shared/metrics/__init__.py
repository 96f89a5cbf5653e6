"""Prometheus metrics that several services have, and the server of `/metrics`.

Entry points: `MetricsServer` (server.py), `describe_process` (process.py), `load_families`
(load.py), `labelled` (faults.py), `PlainHistogram` (numbers.py); `pages.py` reads pages of others.
Each service has its own as well: `services/router/metrics`, `shared/worker/metrics.py`.

May import: `shared.cluster`, `shared.control`, `shared.http`, `base`, `settings`, `request`. Never
torch.
"""
