"""Offline generation in one process: the same engine as in the services, without sockets."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from typing import Any, Unpack

import torch

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.offline.beam_search import (
    BeamSearch,
    BeamSearchOutput,
    BeamSearchParams,
    check_beam_search,
    run_searches,
)
from pagewire.shared.engine.offline.chats import ChatArguments
from pagewire.shared.engine.offline.embeddings import EmbeddingOutput, compute_embeddings
from pagewire.shared.engine.offline.held_interrupt import held_interrupt
from pagewire.shared.engine.offline.llm_progress import GenerationProgress
from pagewire.shared.engine.offline.model import (
    DEFAULT_TOKENS,
    Answers,
    OfflineModel,
    queue,
    readers_of,
)
from pagewire.shared.engine.offline.outputs import RequestOutput
from pagewire.shared.engine.offline.prompts import Prompt, TokenizedPrompt
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.kv.block_pool import BlockCounts
from pagewire.shared.model.pooling import load_pooling
from pagewire.shared.request.sampling import SamplingParams

FAILURES = ("error", "abort")
UNBOUNDED = 2**31  # the caller's list of prompts bounds the queue

Message = Mapping[str, Any]


class LLM(OfflineModel):
    """A model, ready to generate. Calls from several threads run one after another.

    Example:
        >>> llm = LLM("demo")
        >>> llm.generate(["Lambda expressions"])[0].text
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **settings: Any) -> None:
        """Load a model and make an engine for it.

        On the CPU, a small model lowers torch's number of threads in the whole process. Set
        OMP_NUM_THREADS before, or call `torch.set_num_threads` afterwards, to use another number.

        Args:
            model: a local Hugging Face directory, a hub id, or "demo".
            settings: fields of `LLMSettings`.

        Raises:
            ConfigError: a setting is wrong, or this machine or model does not support it.
        """
        super().__init__(model, **{"max_waiting": UNBOUNDED, **settings})
        self._running = threading.Lock()  # held while steps run
        self._live: Answers = {}  # what the engine computes, of all calls
        self._left: deque[str] = deque()  # requests of streams that were left

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts, all in one batch as far as they fit.

        Args:
            prompts: one or several texts, lists of token ids, or dictionaries with `prompt` or
                `prompt_token_ids`.
            sampling_params: one for all prompts, or one for each. Without `max_tokens` an answer
                has up to the model's `max_new_tokens`, or 16 tokens.
            use_tqdm: show a progress bar if stderr is a terminal.
            add_special_tokens: add the special tokens that the model expects around a text.

        Raises:
            InvalidRequestError: a prompt or a parameter is out of range.
            RequestFailedError: the engine failed in the middle of a request.
        """
        tokenized = self._tokenized(prompts, add_special_tokens)
        return self._answer(tokenized, sampling_params, DEFAULT_TOKENS, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        add_special_tokens: bool = True,
    ) -> Generator[RequestOutput, None, None]:
        """Continue prompts, and yield their outputs as tokens come.

        An output has all of its answers so far, or what `SamplingParams.output_kind` says. Its
        `index` says which prompt it belongs to. Closing the generator ends the requests. Other
        calls may come before its end; it goes on while they run.

        Args:
            prompts: see `generate`.
            sampling_params: see `generate`.
            add_special_tokens: add the special tokens that the model expects around a text.

        Raises:
            InvalidRequestError: a prompt or a parameter is out of range.
            RequestFailedError: the engine failed in the middle of a request.
        """
        tokenized = self._tokenized(prompts, add_special_tokens)
        _, answers = self._prepare(tokenized, sampling_params, DEFAULT_TOKENS, True)
        return self._follow(answers)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **arguments: Unpack[ChatArguments],
    ) -> list[RequestOutput]:
        """Answer conversations, which the model's chat template renders.

        Args:
            messages: one conversation or several; a message has `role` and `content`.
            sampling_params: one for all, or one for each conversation. Without `max_tokens` an
                answer has up to the model's `max_new_tokens`, or as many tokens as fit.
            use_tqdm: show a progress bar if stderr is a terminal.
            arguments: tools and other arguments of the template, see `ChatArguments`.

        Returns:
            Outputs whose answers have a `message`. Their `text` includes special tokens that belong
            to a call or to reasoning.

        Raises:
            InvalidRequestError: the model has no chat template, or a message or a parameter is
                out of range.
            RequestFailedError: the engine failed in the middle of a request.
        """
        several = isinstance(messages, list | tuple) and all(
            isinstance(conversation, list | tuple) for conversation in messages
        )
        conversations = messages if several else [messages]
        prompts = self._rendered(conversations, arguments)
        return self._answer(prompts, sampling_params, self.engine.max_model_len, use_tqdm)

    def embed(
        self, prompts: Prompt | Seq[Prompt], add_special_tokens: bool = True
    ) -> list[EmbeddingOutput]:
        """Compute an embedding of each prompt; return them in the order of the prompts.

        A prompt must be at least one token shorter than the context. By default, an embedding is
        the last token's final hidden state, normalised. The files of sentence-transformers in the
        model's directory may choose another pooling.

        Args:
            prompts: see `generate`.
            add_special_tokens: add the special tokens that the model expects around a text.

        Raises:
            ConfigError: the model's files choose a pooling that is not supported.
            InvalidRequestError: a prompt is out of range.
            RequestFailedError: the engine failed in the middle of a request.
        """
        rules = load_pooling(self.engine.model_path)
        tokenized = self._tokenized(prompts, add_special_tokens)
        named = {f"llm-{next(self._ids)}": prompt for prompt in tokenized}
        try:
            with self._running:
                return compute_embeddings(self.core, self._step, named, rules)
        finally:
            self._end_left()

    def beam_search(
        self,
        prompts: Prompt | Seq[Prompt],
        params: BeamSearchParams,
        add_special_tokens: bool = True,
    ) -> list[BeamSearchOutput]:
        """Return the best continuations of prompts, as Hugging Face's `num_beams` finds them.

        They are compared by the model's logits alone; its sampling defaults are ignored.

        Args:
            prompts: see `generate`.
            params: parameters of all searches.
            add_special_tokens: add the special tokens that the model expects around a text.

        Raises:
            InvalidRequestError: a prompt or a parameter is out of range.
            RequestFailedError: the engine failed in the middle of a request.
        """
        eos = self.engine.config.eos_token_ids
        check_beam_search(params, eos)
        tokenized = self._tokenized(prompts, add_special_tokens)
        searches = [
            BeamSearch(ids, params, eos, self.engine.max_model_len - len(ids))
            for ids in (prompt.token_ids for prompt in tokenized)
        ]
        room = self.block_counts().total * self.settings.block_size
        run_searches(searches, room, self._likely_tokens)
        decode = None if self.tokenizer is None else self.tokenizer.decode
        return [search.output(decode) for search in searches]

    def _likely_tokens(self, texts: list[list[int]], count: int) -> list[dict[int, float]]:
        """Return the log probabilities of the likeliest next tokens of each text, by token id."""
        asked = SamplingParams(temperature=0, max_tokens=1, logprobs=count, logprobs_mode="raw")
        prompts = [TokenizedPrompt(None, token_ids) for token_ids in texts]
        answers = [output.outputs[0] for output in self._answer(prompts, asked, 1, False)]
        positions = [position for answer in answers for position in answer.logprobs or ()]
        return [{token: each.logprob for token, each in found.items()} for found in positions]

    def block_counts(self) -> BlockCounts:
        """Return how many KV blocks are free, cached and used."""
        return self.core.scheduler.pool.counts()

    def _answer(
        self,
        prompts: Seq[TokenizedPrompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        default_tokens: int,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        outputs, answers = self._prepare(prompts, sampling_params, default_tokens)
        try:
            with self._running:
                self._run(answers, GenerationProgress(outputs, use_tqdm))
        finally:
            self._end_left()
        return outputs

    def _run(self, answers: Answers, progress: GenerationProgress) -> None:
        """Compute all answers. All requests are aborted at the end, also after an error."""
        try:
            self._add(answers)
            with progress:
                while not self._live.keys().isdisjoint(answers.keys()):
                    others = self._step().individual
                    progress.update()
                    if any(each.finish_reason in FAILURES for each in others):
                        _raise_error(answers)
            self._step()  # finishes the overlapped step, if there is one
        finally:
            self._abort(answers)

    def _follow(self, answers: Answers) -> Generator[RequestOutput, None, None]:
        """Compute answers, and yield their outputs in between; other calls may then run."""
        readers = readers_of(answers)
        try:
            with self._running:
                self._add(answers)
            while readers:
                for reader in tuple(readers):
                    if (news := reader.news()) is not None:
                        if news.finished:
                            readers.remove(reader)
                        yield news
                _raise_error(answers)
                with self._running:
                    if not self._live.keys().isdisjoint(answers.keys()):
                        self._step()
        finally:
            self._left.extend(answers)
            self._end_left()

    def _step(self) -> StepOutputs:
        """Run a step, and give the answers of all calls their tokens."""
        device = self.engine.runner.kv_pool.device
        on_gpu = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with held_interrupt(), on_gpu:
            return self._uninterrupted_step()

    def _uninterrupted_step(self) -> StepOutputs:
        core, live = self.core, self._live
        outputs, _worked = core.step()
        plain = zip(outputs.request_ids, outputs.token_ids, strict=True)
        ended = [name for name, token in plain if name in live and live[name].add([token], None)]
        others = [output for output in outputs.individual if output.request_id in live]
        ended += [each.request_id for each in others if live[each.request_id].add_step(each)]
        self._abort(ended)  # the engine does not know stop strings
        return outputs

    def _add(self, answers: Answers) -> None:
        """Queue the sequences of answers in the engine."""
        for index, group in itertools.groupby(answers, lambda name: answers[name].output.index):
            of_prompt = {name: answers[name] for name in group}
            try:
                queue(self.core, of_prompt, self.engine.config.eos_token_ids)
            except InvalidRequestError as exc:
                raise InvalidRequestError(f"prompts[{index}]: {exc.message}", exc.param) from exc
            self._live |= of_prompt

    def _abort(self, names: Iterable[str]) -> None:
        for name in names:
            self.core.sequences.abort(name)
            self._live.pop(name, None)

    def _end_left(self) -> None:
        """End the requests of streams that were left, unless a call runs, which does it later.

        The garbage collector may leave a stream at any time, also within a step of this thread.
        """
        while self._left and self._running.acquire(blocking=False):
            try:
                while self._left:
                    self._abort([self._left.popleft()])
                if not self._live and self.core.has_work:
                    self._step()  # finishes the overlapped step
            finally:
                self._running.release()


def _raise_error(answers: Answers) -> None:
    for answer in answers.values():
        if answer.error is not None:
            raise answer.error
