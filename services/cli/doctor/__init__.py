"""`pagewire doctor`: looks at this machine and says what would go wrong.

Entry point: `doctor` (command.py).
Read first: `checks.py` (findings: pure), `probe.py` (looks at torch, Triton and UCX), `memory.py`.

May import: `shared`, `kernels`, `services.cli.up`, modules of `services.cli`.
"""
