"""What a router reports to Prometheus: requests, its own state, and the addresses of all metrics.

Read first: `requests.py` (metrics of requests: vLLM's names and Pagewire's own, and histogram
buckets), `by_key.py` (the same by API key), `state.py` (read when `/metrics` is read), `targets.py`
(the addresses).
`shared/metrics/numbers.py` has counters and histograms that are cheap to update.

May import: `cluster` and `placement` of the router, `shared.control.protocol`, `shared.cluster`,
`shared.index`, `shared.metrics`. No HTTP.
"""
