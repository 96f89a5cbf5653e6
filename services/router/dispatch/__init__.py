"""Requests in progress: sent to a decode worker, and migrated to another one if that dies.

`dispatcher.py` draws a seed for a request without one, so that a migrated answer keeps its tokens,
and decides what migrates a request, and how often. If no decode worker can take it, a request waits
up to 30 s for one and then fails with status 503; it fails at once if this router has known none.

Entry point: `Dispatcher.open` (dispatcher.py), which returns a `TokenStream` for each prompt;
`EmbeddingSet` (embeddings.py) for prompts that are to have embeddings.
Read first: `dispatcher.py`, `attempt.py` (one try with one worker).

May import: `placement`, `workers` and `metrics` of the router, `shared.control`, small modules.
No HTTP.
"""
