"""What a router shows to Prometheus: requests, its own state, and where everybody's metrics are.

Read first: `requests.py` (names that vLLM's dashboards know, and Pagewire's own; buckets),
`state.py`, `targets.py`. `shared/metrics/numbers.py` has counters and histograms that are quick to
count with.

May import: `placement` of the router, `shared.control.protocol`, `shared.cluster`, `shared.index`,
`shared.metrics`. No HTTP.
"""
