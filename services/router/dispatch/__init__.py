"""Requests in progress: sent to a decode worker, and migrated to another one if that dies.

`dispatcher.py` decides what makes a request migrate, and how often. It gives each request a seed,
so that a migrated answer keeps its tokens. If no decode worker can be reached, a request waits up
to 30 s for one and then fails with status 503. It fails at once if this router has never known a
decode worker.

Entry points: `Dispatcher.open` (dispatcher.py) returns a `TokenStream` for each answer;
`EmbeddingSet` (embeddings.py) serves prompts that get embeddings.
Read first: `dispatcher.py`, `attempt.py` (one attempt at one worker).

May import: `placement`, `cluster` and `metrics` of the router, `shared.control`, `base`,
`settings`, `request`. No HTTP.
"""
