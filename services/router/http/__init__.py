"""The router's HTTP side: routes, request bodies, OpenAI's responses, errors and streams.

    body --> schemas.py --> inputs.py --> answers.py --> responses.py --> http_io.py --> client

Entry point: `create_app` (app.py).
Read first: `api.py` (routes), `inputs.py` (a body becomes token ids and parameters, or is refused;
chooses `max_tokens` if a request gives none), `responses.py`, `http_io.py` (reads bodies, sends
streams, cancels a request whose client has left or takes nothing for too long), `body_reader.py`
(where a body is read).

May import: all of the router. Nothing of a worker.
"""
