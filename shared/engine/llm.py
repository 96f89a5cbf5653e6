"""Offline generation in one process: the same engine as the services', without any socket."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from pagewire.shared.config import EngineSettings, load_settings
from pagewire.shared.engine.build import build_engine, new_sequence
from pagewire.shared.engine.core import StepOutput
from pagewire.shared.errors import InvalidRequestError, RequestFailedError
from pagewire.shared.kv_cache.block_pool import BlockCounts
from pagewire.shared.request import SamplingParams
from pagewire.shared.tokenizer import Tokenizer

UNBOUNDED = 2**31  # the caller's own list is the bound of the queue
Prompt = str | Seq[int]


@dataclass(slots=True)
class RequestOutput:
    """What came of one prompt.

    Attributes:
        finish_reason: "stop" or "length".
        cached_tokens: prompt tokens that were found in the prefix cache.
    """

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0


class LLM:
    """A model, ready to generate.

    Example:
        >>> llm = LLM("demo")
        >>> llm.generate(["The with statement"], SamplingParams(temperature=0))[0].text
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        """Load a model.

        On the CPU, a small model lowers torch's number of threads, which the whole process
        shares. OMP_NUM_THREADS or `torch.set_num_threads` chooses another, before or after.

        Args:
            model: a local Hugging Face directory, a hub id, or "demo".
            settings: fields of `EngineSettings`.

        Raises:
            ConfigError: what was asked for is not to be had here.
        """
        self.settings = load_settings(
            EngineSettings, {"model": model, "max_waiting": UNBOUNDED, **settings}
        )
        self.engine = build_engine(self.settings)
        self.tokenizer: Tokenizer | None = None
        if (self.engine.model_path / "tokenizer.json").exists():
            self.tokenizer = Tokenizer.from_dir(self.engine.model_path)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all in one batch as far as they fit.

        Args:
            prompts: one or several texts or lists of token ids.
            sampling_params: one for all, or one each.

        Raises:
            InvalidRequestError: a prompt or a parameter is out of range.
            RequestFailedError: the engine failed in the middle of a request.
        """
        token_lists = [self._tokenize(prompt) for prompt in _as_list(prompts)]
        params = self._params(sampling_params, len(token_lists))
        results: dict[str, RequestOutput] = {}
        core = self.engine.core
        try:
            for tokens, sampling in zip(token_lists, params, strict=True):
                request_id = f"llm-{next(self._ids)}"
                core.add(
                    new_sequence(request_id, tokens, sampling, self.engine.config.eos_token_ids)
                )
                results[request_id] = RequestOutput(tokens)
            self._run(results)
        finally:
            for request_id in results:
                core.abort(request_id)
        for result in results.values():
            if self.tokenizer is not None:
                result.text = self.tokenizer.decode(result.token_ids)
        return list(results.values())

    def _run(self, results: dict[str, RequestOutput]) -> None:
        unfinished = set(results)
        while unfinished:
            outputs, _worked = self.engine.core.step()
            for output in outputs:
                if output.request_id in unfinished:
                    _take(results[output.request_id], output)
                    if output.finish_reason is not None:
                        unfinished.discard(output.request_id)
        self.engine.core.step()  # reads what an overlapped step left in flight

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            vocab_size = self.engine.config.vocab_size
            if not all(isinstance(token, int) and 0 <= token < vocab_size for token in prompt):
                raise InvalidRequestError(
                    f"token ids must be integers from 0 to {vocab_size - 1}", "prompts"
                )
            return list(prompt)
        if self.tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer.json: pass lists of token ids", "prompts"
            )
        return self.tokenizer.encode(prompt)

    @staticmethod
    def _params(
        given: SamplingParams | Seq[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            params = [given or SamplingParams()] * count
        else:
            params = list(given)
        if len(params) != count:
            raise InvalidRequestError(
                f"{len(params)} sampling parameters for {count} prompts", "sampling_params"
            )
        for sampling in params:
            sampling.validate()
        return params

    def block_counts(self) -> BlockCounts:
        """Return how many KV blocks are free, cached and used."""
        return self.engine.core.scheduler.pool.counts()


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    tokens = [item for item in prompts if isinstance(item, int)]
    others = [item for item in prompts if not isinstance(item, int)]
    if tokens and others:
        raise InvalidRequestError("prompts must be token ids or prompts, not both", "prompts")
    return [tokens] if tokens else others


def _take(result: RequestOutput, output: StepOutput) -> None:
    if output.finish_reason == "error":
        raise RequestFailedError(output.error or "the engine failed")
    result.token_ids.extend(output.token_ids)
    result.finish_reason = output.finish_reason
    if output.cached_tokens is not None:
        result.cached_tokens = output.cached_tokens
