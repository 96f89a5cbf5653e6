"""vLLM's routes for texts and tokens, and the version."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire import __version__
from pagewire.services.router.http.api.openai.objects import Detokenized, Tokenized, Version
from pagewire.services.router.http.api.openai.tokens import DetokenizeBody, TokenizeBody
from pagewire.services.router.http.operation import SERVER, TOKENS, described
from pagewire.services.router.http.routes.generation import json_response, read_request, service_of

token_router = APIRouter(redirect_slashes=False)


@token_router.post(
    "/tokenize", **described(TOKENS, Tokenized, body=TokenizeBody, example={"prompt": "Hello"})
)
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, or of a conversation's prompt."""
    generation, service = await read_request(request, "tokenize"), service_of(request)
    ids = generation.prompts[0].token_ids
    tokenized = Tokenized(len(ids), service.max_model_len, ids)
    if generation.return_token_strs:
        name = service.model.tokenizer.token_strings
        tokenized.token_strs = await asyncio.to_thread(name, ids)  # a long prompt's take a while
    return json_response(tokenized)


@token_router.post(
    "/detokenize",
    **described(TOKENS, Detokenized, body=DetokenizeBody, example={"tokens": [72, 101]}),
)
async def detokenize(request: Request) -> Response:
    """Return the text of a list of token ids."""
    generation = await read_request(request, "detokenize")
    return json_response(Detokenized(generation.prompts[0].echo or ""))


@token_router.get("/version", **described(SERVER, Version))
async def version() -> Response:
    """Return the release of Pagewire that this router runs."""
    return json_response(Version(__version__))
