"""Clients that ask all the time, with the official client, while a test makes trouble."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import openai

from pagewire import LLM, SamplingParams
from pagewire.tools.demo_model.prompts import standard_prompts

MODEL = "pagewire-demo"
MAX_TOKENS = 48
TIMEOUT_S = 60.0


@dataclass
class Outcome:
    """What clients have seen.

    Attributes:
        failures: what a request raised, or which prompt was answered wrongly.
        slowest_s: the longest time that a request took, however it ended.
    """

    answered: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


@dataclass
class Load:
    """Prompts and their right answers.

    Attributes:
        url: of the gateway.
        prompts, answers: token ids.
    """

    url: str
    prompts: list[list[int]]
    answers: list[list[int]]

    @classmethod
    def of_demo_model(cls, url: str) -> Load:
        """Return prompts of all lengths, with the tokens of one process."""
        llm = LLM("demo", device="cpu")
        assert llm.tokenizer is not None
        prompts = standard_prompts(llm.tokenizer)[:40]
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        return cls(url, prompts, [o.token_ids for o in llm.generate(prompts, greedy)])

    async def ask(self, client: openai.AsyncOpenAI, index: int) -> list[int]:
        """Return the greedy tokens of a prompt; every third is asked for as a stream."""
        options = {
            "model": MODEL,
            "prompt": self.prompts[index],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }
        if index % 3:
            whole = await client.completions.create(**options)
            return whole.choices[0].token_ids
        tokens = []
        async for chunk in await client.completions.create(stream=True, **options):
            for choice in chunk.choices:
                tokens += choice.token_ids or []
        return tokens

    async def all_once(self, in_flight: int = 4) -> list[list[int]]:
        limit = asyncio.Semaphore(in_flight)
        async with self._client() as client:

            async def one(index: int) -> list[int]:
                async with limit:
                    return await self.ask(client, index)

            return await asyncio.gather(*[one(index) for index in range(len(self.prompts))])

    async def during(
        self, trouble: Callable[[], None], users: int = 4, fresh: bool = False
    ) -> Outcome:
        """Ask until the trouble, which runs in a thread, is over.

        Args:
            trouble: what happens meanwhile.
            users: requests at once.
            fresh: whether each request has a connection of its own, to where `url` leads then.
        """
        outcome, over, start = Outcome(), asyncio.Event(), time.monotonic()

        async def user(client: openai.AsyncOpenAI, number: int) -> None:
            index = number
            while not over.is_set():
                began = time.monotonic()
                try:
                    if fresh:
                        async with self._client() as own:
                            tokens = await self.ask(own, index)
                    else:
                        tokens = await self.ask(client, index)
                except openai.OpenAIError as exc:
                    after = f"{began - start:.1f} to {time.monotonic() - start:.1f} s"
                    outcome.failures.append(f"{type(exc).__name__}: {exc} ({after})")
                else:
                    outcome.answered += 1
                    if tokens != self.answers[index]:
                        outcome.failures.append(f"prompt {index} was answered wrongly")
                outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
                index = (index + users) % len(self.prompts)

        async with self._client() as client, asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(client, number))
            try:
                await asyncio.sleep(1)
                await asyncio.to_thread(trouble)
                await asyncio.sleep(1)
            finally:
                over.set()
        return outcome

    def _client(self) -> openai.AsyncOpenAI:
        """Return a client with its default number of retries."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=TIMEOUT_S)
