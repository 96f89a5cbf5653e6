"""Prompts with the greedy tokens that one process gives, to ask a cluster for the same."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pagewire import LLM, SamplingParams
from pagewire.tests.support.local_cluster import complete_all
from pagewire.tools.demo_model.prompts import standard_prompts

MOST_TOKENS = 64  # of an answer


@dataclass(frozen=True)
class GreedyPrompts:
    """Prompts and what a cluster must answer.

    Attributes:
        tokens: the right ones, for each prompt.
        max_tokens: of each answer.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    max_tokens: int

    def __getitem__(self, part: slice) -> GreedyPrompts:
        return replace(self, prompts=self.prompts[part], tokens=self.tokens[part])

    async def ask(
        self,
        url: str,
        in_flight: int = 8,
        *,
        timeout: float,
        trouble: Callable[[], None] | None = None,
        after_s: float = 0.0,
    ) -> list[dict[str, Any]]:
        """Ask everything; returns the response bodies, whose tokens are the right ones.

        Args:
            timeout: of each request, in seconds.
            trouble: called meanwhile, in a thread, when `after_s` have passed.
        """

        async def make(trouble: Callable[[], None]) -> None:
            await asyncio.sleep(after_s)
            await asyncio.to_thread(trouble)

        bodies = [greedy_body(prompt, self.max_tokens) for prompt in self.prompts]
        async with asyncio.TaskGroup() as group:
            if trouble is not None:
                group.create_task(make(trouble))
            asked = group.create_task(complete_all(url, bodies, in_flight, timeout))
        answers = asked.result()
        got = [answer["choices"][0]["token_ids"] for answer in answers]
        different = [i for i, (a, b) in enumerate(zip(got, self.tokens, strict=True)) if a != b]
        assert not different, f"prompts {different} differ"
        return answers


def greedy_prompts(max_tokens: int, count: int | None = None) -> GreedyPrompts:
    """Return the first standard prompts, or all, with their tokens by one process on the CPU."""
    assert max_tokens <= MOST_TOKENS
    prompts, tokens = _prompts_and_tokens()
    return GreedyPrompts(
        prompts[:count], [each[:max_tokens] for each in tokens[:count]], max_tokens
    )


@functools.cache
def _prompts_and_tokens() -> tuple[list[list[int]], list[list[int]]]:
    llm = LLM("demo", device="cpu")
    assert llm.tokenizer is not None
    prompts = standard_prompts(llm.tokenizer)
    greedy = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, ignore_eos=True)
    return prompts, [output.token_ids for output in llm.generate(prompts, greedy)]


def greedy_body(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a completion request that is answered with token ids."""
    return {
        "model": "pagewire-demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
