"""Load tests of a cluster: users for locust, measurement, comparison of set-ups, and the report.

Entry point: `compare.py` (`make loadtest`); `bench/` has the benches on GPUs, `faults/` the fault
benchmark.
Read first: `compare.py` (which clusters are compared, at which rates), `locustfile.py` (when users
send, and when they leave), `report.py`. `workloads.py` makes the prompts, `shapes.py` the load over
time; `slo.py` decides which requests meet their objectives, and computes percentiles and goodput;
`results.py` decides at which rates the load generator was the bottleneck.
"""
