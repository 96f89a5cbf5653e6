"""Benches on GPUs (the engine, KV transfer, serving on one and two GPUs), and one of the router.

    make bench-gpu, make bench-gpu-2, make bench-router

Each module is a program that prints one line of JSON for each result, or a part of one;
docs/benchmarks.md has the figures.
Kernels are timed in kernels/bench, clusters on a CPU in loadtest/compare.py, and any endpoint by
`pagewire bench` (services/cli/bench).
Read first: `engine.py`, `wire.py`, `two_gpus.py`, `router.py`; `phases.py` has the
measurements of a cluster, `clusters.py` starts clusters, also vLLM's.
"""
