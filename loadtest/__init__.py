"""Load tests of a cluster: users for locust, measurement, comparison of set-ups, and the report.

Entry point: `compare.py` (`make loadtest`); `bench/` has the benches on GPUs.
Read first: `compare.py`, `locustfile.py`, `report.py`.
"""
