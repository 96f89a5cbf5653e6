"""The router's HTTP side: routes, request bodies, answers, errors and streams.

    body --> body_processes/ --> api/ (checked request) --> api/ (JSON) --> connection/ --> client

    api/openai/      OpenAI's and vLLM's API: bodies to checked requests, tokens to JSON
    api/anthropic/   the same for `/v1/messages`, Anthropic's API
    api/responses/   the same for `/v1/responses`; stored responses
    body_processes/  the threads and processes that read bodies and try grammars
    connection/      one HTTP request: its body, its stream, its end, what is known of it
    routes/          the routes
    openapi/         the OpenAPI document, and a page that shows it
    server/          the application around the routes: connections, API keys, log lines

Each package may import those above it. The modules of this directory are small and come first:
errors, the decoder of all bodies with its texts about wrong fields, and what the document says of a
route.

Entry point: `create_app` (server/app.py).
Read first: `routes/generation.py`, `api/openai/generation.py`, `api/openai/answer_set.py`.

May import: all of the router. Nothing of a worker.
"""
