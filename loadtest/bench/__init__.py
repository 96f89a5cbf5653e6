"""Benches on GPUs: kernels' neighbours, the engine, the KV wire, serving on one and two GPUs.

    make bench-gpu, make bench-gpu-2

Each module is a program with a line of JSON a result; docs/benchmarks.md has the figures.
Read first: `engine.py`, `wire.py`, `two.py`.
"""
