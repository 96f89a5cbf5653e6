"""`/v1/responses`, OpenAI's Responses API.

A body (`bodies.py`) becomes a chat (`inputs.py`, `messages.py`). From its answer, `format.py` and
`items.py` make the response object and its events. `store.py` keeps responses in Redis, and
`input_items.py` lists what a stored response answers. `objects.py` has the types that
responses are encoded from. The route (`routes/responses.py`) decides what is stored, and
when.

Read first: `inputs.py`, `format.py`.

May import: `api.openai`; `text` of the router.
"""
