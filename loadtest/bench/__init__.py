"""Benches on GPUs: the engine, KV transfer, and serving on one and two GPUs.

    make bench-gpu, make bench-gpu-2

Each module is a program that prints one line of JSON for each result; docs/benchmarks.md has the
figures.
Read first: `engine.py`, `wire.py`, `two.py`.
"""
