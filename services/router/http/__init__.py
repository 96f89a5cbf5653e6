"""The router's HTTP side: routes, request bodies, answers, errors and streams.

    body --> bodies/ --> inputs/ --> answers/ --> requests/ --> client

    inputs/     from a body of OpenAI's or vLLM's form to a checked request
    answers/    from tokens to OpenAI's JSON, full responses and stream chunks
    messages/   the same two for `/v1/messages`, Anthropic's API
    responses/  the same two for `/v1/responses`; stored responses
    bodies/     the threads and processes that read bodies and try grammars
    requests/   one HTTP request: its body, its stream, its end, what is known of it
    routes/     the routes
    openapi/    the OpenAPI document, and a page that shows it
    server/     the application around the routes: connections, API keys, log lines

Each package may import those above it. The modules of this directory are small and come first:
errors, and texts about wrong fields.

Entry point: `create_app` (server/app.py).
Read first: `routes/generation.py`, `inputs/generation.py`, `answers/answer_set.py`.

May import: all of the router. Nothing of a worker.
"""
