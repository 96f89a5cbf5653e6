"""What a request of `/v1/responses` has besides its prompt."""

from __future__ import annotations

import msgspec


class ResponseTurn(msgspec.Struct, frozen=True):
    """One turn of a conversation.

    Attributes:
        echo: a JSON object: the request's fields that the response repeats.
        items: a JSON list: the conversation up to the answer, as items; empty if the response is
            not to be stored, or cannot be.
        store: the response is to be stored.
        has_logprobs: texts have log probabilities.
    """

    echo: bytes
    items: bytes
    store: bool
    has_logprobs: bool
