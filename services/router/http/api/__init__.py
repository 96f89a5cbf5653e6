"""The APIs that clients speak: each from a request's body to workers' tokens and back to JSON.

    openai/      completions, chats, embeddings, tokens, as OpenAI and vLLM define them
    anthropic/   `/v1/messages`
    responses/   `/v1/responses`, with stored conversations

`anthropic` and `responses` make a `GenerationInput` of `openai`, and format what its
`answer_set.py` runs.

Read first: `openai/__init__.py`.
"""
