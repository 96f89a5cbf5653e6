"""The services: router, prefill, decode, and the command line.

Services communicate by messages only and do not import each other. `pagewire up` starts them as
processes; `pagewire router`, `prefill` and `decode` import one service's `main` when they run.
docs/decisions.md says which file decides what.
"""
