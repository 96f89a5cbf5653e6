"""Reads bodies and tries grammars where that stalls no stream.

`reader.py` decides where a body is read: a small one at once, a larger one in a thread, a large one
in a process (`body_process.py`), which it exchanges the messages of `body_messages.py` with.
`owner_turns.py` lets owners take turns. `grammar_checker.py` has each new grammar compiled in
another process (`grammar_process.py`) first.
`child_process.py` keeps the processes of both, `framing.py` sends messages to them and back, and
`child_serving.py` is what runs in them.

Read first: `reader.py`, `grammar_checker.py`.

May import: `api`; `text` of the router.
"""
