"""The router's HTTP side: routes, request bodies, OpenAI's responses, errors and streams.

    body --> schemas.py --> inputs.py --> answers.py --> responses.py --> http_io.py --> client

Entry point: `create_app` (app.py).
Read first: `api.py` (routes), `schemas.py` (fields of bodies), `inputs.py` (checks a body and makes
token ids and parameters of it; chooses `max_tokens` if a request gives none), `answers.py` (runs
the answers), `responses.py` (their JSON), `http_io.py` (receives bodies and sends streams; cancels
a request whose client has left or reads too slowly).

Before a body is read, each request passes `access_log.py` (gives it an id; writes its log line at
the end), CORS, and `key_check.py` (its API key). `request_record.py` has what is known of a request
so far; `body_reader.py` decides in which thread or process a body is read.

Other APIs:

- `/v1/messages` (Anthropic's): bodies become chats (message_inputs.py, message_chat.py); responses
  and errors have their own form (message_format.py, error_forms.py).
- `/v1/responses`: a chat in another form. `response_routes.py` decides what is stored, and when;
  `response_inputs.py` makes a chat of a body; `response_format.py` and `response_items.py` make the
  response object and its events; `input_items.py` lists what a stored response answers.
- `/v1/embeddings`: embedding_inputs.py and embedding_api.py.

`openapi.py` makes the OpenAPI document from the types of bodies and answers (`answer_objects.py`
and others) and the list of routes (`operations.py`). `docs_pages.py` serves it, and a page that
shows it.

May import: all of the router. Nothing of a worker.
"""
