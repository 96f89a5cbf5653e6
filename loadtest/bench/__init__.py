"""Benches of the engine, KV transfer and serving on GPUs, and of the router and the host on CPUs.

    make bench-gpu, make bench-gpu-2, make bench-warm, make bench-router

Each module is a program that prints one line of JSON for each result, or a part of such programs.
docs/benchmarks.md has the figures. Other benches: kernels in kernels/bench, clusters on a CPU in
loadtest/compare.py, any endpoint by `pagewire bench` (services/cli/bench).

Read first: `engine.py`, `wire.py`, `two_gpus.py`, `router.py`; `phases.py` has the measurements of
a cluster, `clusters.py` starts clusters, also vLLM's.
"""
