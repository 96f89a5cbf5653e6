"""OpenAI's and vLLM's API: from a body to a checked request, and from tokens to JSON.

    body --> schemas.py (fields, types, bounds) --> generation.py --> GenerationInput
    TokenOutput --> answer_set.py (runs all answers to a request) --> formats.py --> JSON, events

`generation.py` makes token ids and parameters of completions and chats, and chooses `max_tokens` if
a request gives none. `tokens.py` does so for `/tokenize` and `/detokenize`, `embeddings.py` for
`/v1/embeddings`. `chats.py` and `prompts.py` are what these share. `parsed_answer.py` finds
tool calls and reasoning in an answer. `objects.py` and `timings.py` have the types that responses
are encoded from, and that the OpenAPI document is made of.

Read first: `schemas.py`, `generation.py`, `answer_set.py`, `formats.py`.

May import: `dispatch` and `text` of the router, `shared` without torch.
"""
