"""A fault benchmark for any OpenAI endpoint: what clients see while parts of a system fail.

Entry point: `run.py` (`python -P -m pagewire.loadtest.faults.run SYSTEM.toml`).
Read first: `scenarios.py` (the table of faults, and the requests: pure functions of a seed), then
`results.py` (what is counted, also pure). `system.py` reads the description of a system;
`systems/` has some. `processes.py` starts its processes and runs its commands, `players.py` sends
the requests, `measures.py` reads KV usage and measures capacity, `benchmark.py` puts them together.

docs/fault-benchmark.md describes how to use it.
"""
