"""Benches on GPUs: the engine, KV transfer, and serving on one and two GPUs.

    make bench-gpu, make bench-gpu-2

Each module is a program that prints one line of JSON for each result; docs/benchmarks.md has the
figures.
Kernels are timed in kernels/bench, clusters on a CPU in loadtest/compare.py, and any endpoint by
`pagewire bench` (services/cli/bench).
Read first: `engine.py`, `wire.py`, `two_gpus.py`; `phases.py` has what is measured of a cluster,
`clusters.py` starts them, vLLM's as well.
"""
