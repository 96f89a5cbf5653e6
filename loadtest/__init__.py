"""Load tests of a cluster: users for locust, measurement, comparison of set-ups, and the report."""
