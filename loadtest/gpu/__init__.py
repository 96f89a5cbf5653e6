"""Benches on GPUs, next to vLLM where it can be imported; they print docs/benchmarks.md's tables.

python -P -m pagewire.loadtest.gpu.one     kernels and engine, on one GPU: `make bench-gpu`
python -P -m pagewire.loadtest.gpu.two     serving, prefill and decode apart: `make bench-gpu-2`
"""
