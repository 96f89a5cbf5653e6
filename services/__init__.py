"""The services: router, prefill, decode, and the command line.

Services communicate by messages only and do not import each other. The commands `pagewire router`,
`prefill` and `decode` each import one service's `main`; `pagewire up` starts these commands as
processes. docs/architecture.md follows a request through all of them; docs/decisions.md has
decisions with their reasons.
"""
