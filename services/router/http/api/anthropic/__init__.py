"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API.

A body (`schemas.py`) becomes a chat (`chat.py`, `inputs.py`), whose answer is written in
Anthropic's form (`format.py`); so are errors (`error_objects.py`). `objects.py` has the types that
responses are encoded from.

Read first: `inputs.py`, `format.py`.

May import: `api.openai`; `text` of the router.
"""
