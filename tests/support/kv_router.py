"""A router's connection to a decode worker over fake devices, and the answers that it gets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from pagewire.shared.control.channel import ControlClient
from pagewire.shared.control.protocol import (
    Blamed,
    Cancel,
    ControlMessage,
    Embed,
    Fork,
    Generate,
    LoadReport,
    Refused,
    TokenBatch,
    TokenOutput,
)
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.control import connected
from pagewire.tests.support.fake_device import VOCAB, next_token
from pagewire.tests.support.kv_services import PrefillProcess, Worker

SEED = 3
MAX_TOKENS = 4


def prompt_of(length: int, first: int = 1) -> list[int]:
    """Return `length` token ids; prompts with another first one differ."""
    return [(first + 3 * index + index // VOCAB) % VOCAB for index in range(length)]


def expected_answer(prompt: list[int], max_tokens: int = MAX_TOKENS, seed: int = SEED) -> list[int]:
    """Return the fake model's answer if all KV is where it belongs."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(seed, tokens))
    return tokens[len(prompt) :]


class Router:
    """Posts requests and keeps the messages that come."""

    def __init__(self) -> None:
        self.outputs: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        self.loads: list[LoadReport | None] = []
        self.refused: list[Refused] = []
        self.blamed: list[Blamed] = []
        self.lost: list[str] = []
        self._prompts: dict[str, tuple[list[int], int, int]] = {}
        self.client: ControlClient

    def on_message(self, message: ControlMessage) -> None:
        """Keep an answer."""
        if isinstance(message, TokenBatch):
            self.loads.append(message.load)
            for output in message.outputs:
                self.outputs[output.request_id].append(output)
        elif isinstance(message, Refused):
            self.refused.append(message)
        elif isinstance(message, Blamed):
            self.blamed.append(message)

    def generate(
        self,
        request_id: str = "r",
        prompt: list[int] | None = None,
        workers: tuple[str, ...] = ("prefill-0",),
        max_tokens: int = MAX_TOKENS,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        forks: tuple[str, ...] = (),
        cache_salt: str | None = None,
        tenant: str | None = None,
        **fields: Any,
    ) -> None:
        """Post a request, and with it `forks`, which differ in their seeds."""
        prompt = prompt_of(9) if prompt is None else prompt
        for seed, name in enumerate((request_id, *forks), start=SEED):
            self._prompts[name] = prompt, max_tokens, seed
        self.client.post(
            Generate(
                request_id=request_id,
                prompt_token_ids=prompt,
                spec=RequestSpec(
                    max_tokens=max_tokens,
                    seed=SEED,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    cache_salt=cache_salt,
                    tenant=tenant,
                ),
                prefill_workers=list(workers),
                forks=[
                    Fork(request_id=name, seed=seed)
                    for seed, name in enumerate(forks, start=SEED + 1)
                ],
                **fields,
            )
        )

    def embed(self, request_id: str = "e", prompt: list[int] | None = None, **fields: Any) -> None:
        """Post a request for a prompt's embedding."""
        prompt = prompt_of(9) if prompt is None else prompt
        fields = {"pooling": "mean", "normalize": False} | fields
        self.client.post(Embed(request_id=request_id, token_ids=prompt, **fields))

    async def embedding(self, request_id: str = "e") -> list[float]:
        """Wait for an embedding."""
        await eventually(lambda: self._has_ended(request_id))
        [output] = self.outputs[request_id]
        assert output.finish_reason == "stop"
        assert output.embedding is not None
        found: list[float] = np.frombuffer(output.embedding, "<f4").tolist()
        return found

    def cancel(self, request_id: str = "r") -> None:
        """Post a cancellation."""
        self.client.post(Cancel(request_id=request_id))

    def tokens(self, request_id: str = "r") -> list[int]:
        """Return the tokens that came for a request so far."""
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def scored(self, request_id: str = "r") -> list[int]:
        """Return the prompt tokens from position 1 on whose log probabilities came so far."""
        found: list[int] = []
        for output in self.outputs[request_id]:
            if output.prompt_logprobs is not None:
                assert not output.token_ids
                assert output.prompt_logprobs.start <= 1 + len(found), "a gap"
                news = output.prompt_logprobs.since(1 + len(found))
                found += [token.id for token in news.tokens]
        return found

    def prefilled_by(self, request_id: str = "r") -> str | None:
        """Return the prefill worker that sampled the first token; None: the decode worker did."""
        outputs = self.outputs[request_id]
        return next(output for output in outputs if output.token_ids).prefill_worker

    async def first_token(self, request_id: str = "r") -> None:
        """Wait for a request's first token."""
        await eventually(lambda: self.tokens(request_id))

    async def answer(self, request_id: str = "r", timeout: float = 20.0) -> None:
        """Wait for the whole answer, which must be right."""
        await eventually(lambda: self._has_ended(request_id), timeout)
        assert self.outputs[request_id][-1].finish_reason == "length"
        assert self.tokens(request_id) == self.expected(request_id)

    def expected(self, request_id: str = "r") -> list[int]:
        """Return the whole right answer."""
        return expected_answer(*self._prompts[request_id])

    def _has_ended(self, request_id: str) -> bool:
        return any(output.finish_reason for output in self.outputs[request_id])


@asynccontextmanager
async def router_of(worker: Worker | PrefillProcess) -> AsyncIterator[Router]:
    """Connect a router to a worker."""
    router, times = Router(), worker.times
    async with connected(
        worker.endpoint, "router", times.lease_s, times.heartbeat_s, router.on_message
    ) as connection:
        router.client, router.lost = connection.control, connection.lost
        yield router
