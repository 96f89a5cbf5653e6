"""The routes, a file for each API.

`generation.py` has completions, chats and health, and what other routes use: reading a request,
running its answers, counting what becomes of it.

Read first: `generation.py`.

May import: all of `http` but `openapi` and `server`.
"""
