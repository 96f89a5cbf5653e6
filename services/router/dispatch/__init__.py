"""Requests in progress: sent to a decode worker, and migrated to another one if that dies.

It draws a seed for a request without one, so that a migrated answer keeps its tokens. If there is
no decode worker, a request waits up to 30 s for one, and then fails with status 503.

Entry point: `Dispatcher.open` (dispatcher.py), which returns a `TokenStream` for each prompt.
Read first: `dispatcher.py`, `attempt.py` (one try with one worker).

May import: `placement`, `workers` and `metrics` of the router, `shared.control`, small modules.
No HTTP.
"""
