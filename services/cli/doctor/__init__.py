"""`pagewire doctor`: checks this machine and reports what would go wrong.

Entry point: `doctor` (command.py).
Read first: `checks.py` (findings: pure), `probe.py` (checks torch, Triton and UCX), `memory.py`.

May import: `shared`, `kernels`, `services.cli.up`, modules of `services.cli`.
"""
