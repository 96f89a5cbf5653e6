"""The services: router, prefill, decode, and the command line that starts and asks them.

Services talk by messages only and never import each other; `cli` starts them by name.
"""
