"""The router's connections to decode workers, one to each run of each worker.

Entry point: `DecodeLinks` (decode_links.py), which decides when a lost worker is tried again.

May import: `shared.control`, `shared.cluster`. No HTTP.
"""
