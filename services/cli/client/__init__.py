"""Commands that use a running endpoint: `chat`, `complete`, `status`, `top`, and their client.

Entry point: `OpenAIClient` (openai_client.py).
Read first: `openai_client.py` (sends requests, counts a reply's tokens and gaps), `chat.py`,
`snapshot.py`.

May import: modules of `services.cli`, `shared`.
"""
