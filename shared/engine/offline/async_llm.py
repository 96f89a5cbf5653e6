"""`AsyncLLM`: generation in one process, for programs with an event loop.

The engine runs in a thread of its own. What it computes goes to the loop of the task that consumes
it, which makes text of it. Consumers may be slow: an output keeps growing, up to its `max_tokens`,
and a consumer gets all that is new at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, Self, Unpack

import torch

from pagewire.shared.base.errors import InvalidRequestError, PagewireError, RequestFailedError
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.offline.chats import ChatArguments
from pagewire.shared.engine.offline.model import (
    DEFAULT_TOKENS,
    Answers,
    OfflineModel,
    queue,
    readers_of,
)
from pagewire.shared.engine.offline.outputs import RequestOutput
from pagewire.shared.engine.offline.prompts import Prompt
from pagewire.shared.engine.step_output import StepOutput, StepOutputs
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.kv.block_pool import BlockCounts
from pagewire.shared.request.sampling import SamplingParams

logger = logging.getLogger(__name__)

STOP_S = 30.0  # for the step under way to end
LIVENESS_S = 1.0  # between looks at the engine's thread

_Batch = dict[asyncio.AbstractEventLoop, list[tuple["_Request", StepOutput]]]


class AsyncLLM(OfflineModel):
    """A model that several tasks use at once, in the loops of one or several threads.

    At most `max_num_seqs` requests run at once, and `max_waiting` wait for them.

    Example:
        >>> async with AsyncLLM("demo") as llm:
        ...     async for output in llm.generate("Lambda expressions"):
        ...         print(output.text)
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **settings: Any) -> None:
        """Load a model, and start its engine's thread; see `LLM`.

        Args:
            model: a local Hugging Face directory, a hub id, or "demo".
            settings: fields of `LLMSettings`.

        Raises:
            ConfigError: a setting is wrong, or this machine or model does not support it.
        """
        super().__init__(model, **settings)
        self._by_answer = _Requests(self.engine.config.eos_token_ids)
        self._thread = EngineThread(self.core, self._by_answer.deliver)
        device = self.engine.runner.kv_pool.device
        if device.type == "cuda":  # a thread's current GPU is the first one
            self._thread.submit(lambda _core: torch.cuda.set_device(device))
        self._thread.start()
        self._open: set[_Request] = set()
        # Also when the object is collected, or the program ends without `close`.
        self._stop = weakref.finalize(self, self._thread.stop, STOP_S)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, and yield its output as tokens come.

        An output has all of its answers so far, or what `SamplingParams.output_kind` says. If the
        consumer leaves, is cancelled or closes the generator, the request ends and frees its
        blocks.

        Args:
            prompt: see `LLM.generate`.
            sampling_params: see `LLM.generate`.
            add_special_tokens: add the special tokens that the model expects around a text.

        Raises:
            InvalidRequestError: the prompt or a parameter is out of range.
            OverloadedError: too many requests wait.
            RequestFailedError: the engine failed, or `close` was called.
        """
        prompts = self._tokenized(prompt, add_special_tokens)
        if len(prompts) != 1:
            raise InvalidRequestError(
                f"prompt must be one prompt, not {len(prompts)}: call generate for each", "prompt"
            )
        return self._follow(self._prepare(prompts, sampling_params, DEFAULT_TOKENS, True)[1])

    def chat(
        self,
        messages: Seq[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, and yield the output as tokens come; see `generate`.

        An answer has its `message` when it ends.

        Args:
            messages: see `LLM.chat`.
            sampling_params: see `LLM.chat`.
            arguments: tools and other arguments of the template, see `ChatArguments`.

        Raises:
            InvalidRequestError: the model has no chat template, or a message or a parameter is
                out of range.
            OverloadedError: too many requests wait.
            RequestFailedError: the engine failed, or `close` was called.
        """
        prompts = self._rendered([messages], arguments)
        most = self.engine.max_model_len
        return self._follow(self._prepare(prompts, sampling_params, most, True)[1])

    def block_counts(self) -> BlockCounts:
        """Return how many KV blocks are free, cached and used; up to 20 ms old."""
        return self._thread.snapshot.blocks

    async def close(self) -> None:
        """End all requests with an error, stop the engine's thread, and end other ranks."""
        for request in tuple(self._open):
            request.fail_from_anywhere(_closed())
        if await asyncio.to_thread(self._stop) is False:
            logger.warning("the engine's thread still runs a step after %g s", STOP_S)
        else:
            await asyncio.to_thread(self.engine.ranks.close)

    async def __aenter__(self) -> Self:
        """Return this engine, for `async with`."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close the engine at the end of `async with`."""
        await self.close()

    async def _follow(self, answers: Answers) -> AsyncGenerator[RequestOutput, None]:
        if not self._stop.alive:
            raise _closed()
        request = _Request(answers, asyncio.get_running_loop(), self._thread)
        (reader,) = readers_of(answers)
        self._thread.submit(partial(self._by_answer.add, request))
        self._open.add(request)
        try:
            while True:
                await request.wait()
                if (news := reader.news()) is not None:
                    yield news
                    if news.finished:
                        return
        finally:
            self._open.discard(request)
            self._thread.submit(partial(self._by_answer.remove, request), admitted=True)


def _closed() -> RequestFailedError:
    return RequestFailedError("this AsyncLLM is closed")


class _Request:
    """One request, for the task that consumes its output; used in that task's loop only."""

    def __init__(
        self, answers: Answers, loop: asyncio.AbstractEventLoop, thread: EngineThread
    ) -> None:
        self.answers, self.loop = answers, loop
        self.thread = thread
        self._error: PagewireError | None = None
        self._has_news = asyncio.Event()

    def add_step(self, step: StepOutput) -> None:
        """Add a step's output of one answer."""
        answer = self.answers[step.request_id]
        if answer.has_ended:
            return  # the engine had not yet heard of a stop string
        if answer.add_step(step) and step.finish_reason is None:
            self.thread.submit(lambda core: core.sequences.abort(step.request_id), admitted=True)
        if answer.error is not None:
            self._error = self._error or answer.error
        self._has_news.set()

    def fail(self, error: PagewireError) -> None:
        """Let the consumer's wait raise an error."""
        self._error = self._error or error
        self._has_news.set()

    def fail_from_anywhere(self, error: PagewireError) -> None:
        """Call `fail` in the consumer's loop, unless that has ended."""
        _call_in(self.loop, partial(self.fail, error))

    async def wait(self) -> None:
        """Wait until an answer has grown or ended.

        Raises:
            PagewireError: the request failed.
        """
        while not self._has_news.is_set():
            try:
                async with asyncio.timeout(LIVENESS_S):
                    await self._has_news.wait()
            except TimeoutError:
                if not self.thread.is_running():
                    raise RequestFailedError("the engine has stopped") from self.thread.error
        self._has_news.clear()
        if self._error is not None:
            raise self._error


class _Requests:
    """The requests that the engine computes, by the ids of their answers; used in its thread."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._of_answer: dict[str, _Request] = {}

    def add(self, request: _Request, core: EngineCore) -> None:
        """Queue a request in the engine."""
        try:
            queue(core, request.answers, self._eos)
        except PagewireError as exc:
            request.fail_from_anywhere(exc)
        else:
            self._of_answer |= dict.fromkeys(request.answers, request)

    def remove(self, request: _Request, core: EngineCore) -> None:
        """End a request in any state."""
        for name in request.answers:
            self._of_answer.pop(name, None)
            core.sequences.abort(name)

    def deliver(self, outputs: StepOutputs) -> None:
        """Give a step's outputs to the loops of their consumers."""
        batches: _Batch = defaultdict(list)
        for output in outputs:
            if (request := self._of_answer.get(output.request_id)) is not None:
                batches[request.loop].append((request, output))
        for loop, batch in batches.items():
            if not _call_in(loop, partial(_add_all, batch)):
                for request, _ in batch:
                    request.thread.submit(partial(self.remove, request), admitted=True)


def _call_in(loop: asyncio.AbstractEventLoop, call: partial[None]) -> bool:
    """Have a loop call something; returns whether it still runs."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop is closed
        return False
    return True


def _add_all(batch: list[tuple[_Request, StepOutput]]) -> None:
    for request, output in batch:
        request.add_step(output)
