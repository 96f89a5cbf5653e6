"""The router's HTTP side: routes, request bodies, OpenAI's responses, errors and streams.

    body --> schemas.py --> inputs.py --> answers.py --> responses.py --> http_io.py --> client

Before a body is read, each request passes `access_log.py` (its id, and its log line at the end),
CORS, and `key_check.py` (its API key).

The bodies of Anthropic's Messages API become chats (message_inputs.py, message_chat.py), and have
responses and errors of their own form (message_format.py, error_forms.py).

Entry point: `create_app` (app.py).
Read first: `api.py` (routes), `request_record.py` (what is known of a request), `inputs.py` (a body
becomes token ids and parameters, or is refused; chooses `max_tokens` if a request gives none),
`responses.py`, `http_io.py` (reads bodies, sends streams, cancels a request whose client has left
or takes nothing for too long), `body_reader.py` (where a body is read).

`/v1/embeddings` has its own reader (embedding_inputs.py) and response (embedding_api.py).

`/v1/responses` is a chat in another form: `response_routes.py` (what is stored, and when),
`response_inputs.py` (a body becomes a chat's), `response_format.py` and `response_items.py` (the
response object and its events), `input_items.py` (what a stored response answers).

`openapi.py` makes the OpenAPI document of the bodies' types, of the types of answers
(`answer_objects.py` and others) and of a list of routes (`operations.py`); `docs_pages.py` serves
it, and a page that shows it.

May import: all of the router. Nothing of a worker.
"""
