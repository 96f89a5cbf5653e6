"""From a request body to a checked request, for OpenAI's and vLLM's routes.

    body --> schemas.py (fields, types, bounds) --> generation.py --> GenerationInput

`generation.py` makes token ids and parameters of completions and chats, and chooses `max_tokens` if
a request gives none. `tokens.py` does so for `/tokenize` and `/detokenize`, `embeddings.py` for
`/v1/embeddings`. `chats.py` and `prompts.py` are what these share.

Read first: `schemas.py`, `generation.py`.

May import: `text` of the router, `shared` without torch.
"""
