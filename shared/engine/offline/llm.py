"""Offline generation in one process: the same engine as in the services, without sockets."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, Unpack

import msgspec

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.base.field_rules import check_fields
from pagewire.shared.engine.build import build_engine
from pagewire.shared.engine.offline.beam_search import (
    BeamSearch,
    BeamSearchOutput,
    BeamSearchParams,
    check_beam_search,
    run_searches,
)
from pagewire.shared.engine.offline.chats import ChatArguments, ChatPrompt, read_chats
from pagewire.shared.engine.offline.embeddings import EmbeddingOutput, compute_embeddings
from pagewire.shared.engine.offline.llm_answer import LLMAnswer
from pagewire.shared.engine.offline.llm_progress import GenerationProgress
from pagewire.shared.engine.offline.outputs import RequestOutput
from pagewire.shared.engine.offline.prompts import Prompt, TokenizedPrompt, read_prompts
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.grammar.structures import grammar_text, read_structured_outputs
from pagewire.shared.kv.block_pool import BlockCounts
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.model.pooling import load_pooling
from pagewire.shared.request.sampling import RequestSpec, SamplingParams
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.shared.settings.config import LLMSettings, load_settings
from pagewire.shared.text.markers import NO_MARKERS
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.shown import fit_for
from pagewire.shared.tool_calls.syntax import ChatSyntax

UNBOUNDED = 2**31  # the caller's list of prompts bounds the queue
DEFAULT_TOKENS = 16  # length of an answer to a prompt; in a chat, as many tokens as fit

Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate. Calls from several threads run one after another.

    Example:
        >>> llm = LLM("demo")
        >>> llm.generate(["Lambda expressions"])[0].text
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **settings: Any) -> None:
        """Load a model.

        On the CPU, a small model lowers torch's number of threads in the whole process. Set
        OMP_NUM_THREADS before, or call `torch.set_num_threads` afterwards, to use another number.

        Args:
            model: a local Hugging Face directory, a hub id, or "demo".
            settings: fields of `LLMSettings`.

        Raises:
            ConfigError: a setting is wrong, or this machine or model does not support it.
        """
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self.settings = load_settings(
            LLMSettings, {"model": name, "max_waiting": UNBOUNDED, **settings}
        )
        self.engine = build_engine(self.settings)
        self.tokenizer: Tokenizer | None = None
        if (self.engine.model_path / "tokenizer.json").exists():
            self.tokenizer = Tokenizer.from_dir(
                self.engine.model_path, self.settings.special_tokens_in_messages
            )
        self._syntax = ChatSyntax()
        if self.tokenizer is not None:
            self._syntax = ChatSyntax.choose(
                self.tokenizer.template_source,
                self.settings.tool_parser,
                self.settings.reasoning_parser,
                self.tokenizer.marker_token_id,
            )
            self.tokenizer.fit_chats(partial(fit_for, form=self._syntax.tools))
        self._defaults = load_sampling_defaults(
            self.engine.model_path, self.settings.generation_config
        )
        self._ids = itertools.count()
        self._running = threading.Lock()  # a step's outputs may be another call's

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
        vocab_size = self.engine.config.vocab_size
        tokenized = read_prompts(prompts, self.tokenizer, vocab_size, add_special_tokens)
        return self._answer(tokenized, sampling_params, DEFAULT_TOKENS, use_tqdm)

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
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer.json, and so no chat template")
        several = isinstance(messages, list | tuple) and all(
            isinstance(conversation, list | tuple) for conversation in messages
        )
        conversations = messages if several else [messages]
        vocab_size = self.engine.config.vocab_size
        prompts = read_chats(conversations, self.tokenizer, vocab_size, self._syntax, arguments)
        return self._answer(prompts, sampling_params, self.engine.max_model_len, use_tqdm)

    def embed(
        self, prompts: Prompt | Seq[Prompt], add_special_tokens: bool = True
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of prompts.

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
        vocab_size = self.engine.config.vocab_size
        tokenized = read_prompts(prompts, self.tokenizer, vocab_size, add_special_tokens)
        named = {f"llm-{next(self._ids)}": prompt for prompt in tokenized}
        with self._running:
            return compute_embeddings(self.engine.core, named, rules)

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
        eos, vocab_size = self.engine.config.eos_token_ids, self.engine.config.vocab_size
        check_beam_search(params, eos)
        tokenized = read_prompts(prompts, self.tokenizer, vocab_size, add_special_tokens)
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
        return self.engine.core.scheduler.pool.counts()

    def _answer(
        self,
        prompts: Seq[TokenizedPrompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        default_tokens: int,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _params(sampling_params, len(prompts))
        answers: dict[str, LLMAnswer] = {}
        outputs = []
        for index, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            spec, token_ids = self._resolve(prompt.token_ids, asked, default_tokens)
            if isinstance(prompt, ChatPrompt):
                spec = self._with_grammar(spec, prompt.grammars_with(spec.grammar))
            output = RequestOutput(prompt.text, token_ids, [])
            outputs.append(output)
            for choice in range(asked.n):
                answer = LLMAnswer(
                    index, choice, output, spec.for_choice(choice), asked, self.tokenizer, prompt
                )
                answers[f"llm-{next(self._ids)}"] = answer
        with self._running:
            self._run(answers, use_tqdm)
        return outputs

    def _resolve(
        self, prompt_ids: list[int], asked: SamplingParams, default_tokens: int
    ) -> tuple[RequestSpec, list[int]]:
        """Return a request's settings, and its prompt's tokens, truncated as it asks."""
        check_fields(asked)
        longest = self.engine.max_model_len - (asked.max_tokens or DEFAULT_TOKENS)
        prompt_ids = asked.truncate(prompt_ids, longest)
        room = max(1, self.engine.max_model_len - len(prompt_ids))
        length = self._defaults.answer_length(room, default_tokens)
        encode = None if self.tokenizer is None else self.tokenizer.encode_word
        spec = asked.resolve(self._defaults, length, encode)
        config = self.engine.config
        spec.check_vocabulary(config.vocab_size, config.eos_token_ids)
        if asked.structured_outputs is not None:
            spec = self._constrained(spec, asked.structured_outputs)
        return spec, prompt_ids

    def _constrained(self, spec: RequestSpec, asked: StructuredOutputs) -> RequestSpec:
        name = "structured_outputs"
        markers = NO_MARKERS if self.tokenizer is None else self.tokenizer.markers
        text = grammar_text(read_structured_outputs(asked, name), name, markers)
        if text is not None:
            self.engine.core.constraints.check_text(text, name)
        return msgspec.structs.replace(spec, grammar=text)

    def _with_grammar(self, spec: RequestSpec, grammars: Seq[str | None]) -> RequestSpec:
        """Return the settings with the first grammar that compiles."""
        for index, text in enumerate(grammars):
            try:
                if text is not None:
                    self.engine.core.constraints.check_text(text, "tools")
            except InvalidRequestError:
                if index == len(grammars) - 1:
                    raise
            else:
                return msgspec.structs.replace(spec, grammar=text)
        return spec

    def _run(self, answers: dict[str, LLMAnswer], use_tqdm: bool) -> None:
        """Compute all answers. All requests are aborted at the end, also after an error."""
        core = self.engine.core
        try:
            for _, names in itertools.groupby(answers, lambda name: answers[name].prompt_index):
                self._add({name: answers[name] for name in names})
            unfinished = dict(answers)
            with GenerationProgress(len(answers), use_tqdm) as progress:
                while unfinished:
                    outputs, _worked = core.step()
                    for request_id in _take(outputs, unfinished, progress):
                        del unfinished[request_id]
                        core.abort(request_id)  # the engine does not know stop strings
            core.step()  # finishes the overlapped step, if there is one
        finally:
            for request_id in answers:
                core.abort(request_id)

    def _add(self, answers: dict[str, LLMAnswer]) -> None:
        """Queue the answers to one prompt, which is computed once."""
        eos = self.engine.config.eos_token_ids
        sequences = [
            new_sequence(request_id, answer.output.prompt_token_ids, answer.spec, eos)
            for request_id, answer in answers.items()
        ]
        try:
            self.engine.core.add(sequences[0], tuple(sequences[1:]))
        except InvalidRequestError as exc:
            index = next(iter(answers.values())).prompt_index
            raise InvalidRequestError(f"prompts[{index}]: {exc.message}", exc.param) from exc


def _take(
    outputs: StepOutputs, answers: dict[str, LLMAnswer], progress: GenerationProgress
) -> list[str]:
    """Add a step's output to the answers; returns the request ids of answers that have ended."""
    plain = zip(outputs.request_ids, outputs.token_ids, strict=True)
    ended = [
        request_id
        for request_id, token in plain
        if request_id in answers and answers[request_id].add([token], None, progress)
    ]
    others = [output for output in outputs.others if output.request_id in answers]
    return ended + [o.request_id for o in others if answers[o.request_id].take(o, progress)]


def _params(given: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, list | tuple) or not all(
        isinstance(params, SamplingParams) for params in given
    ):
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams or a list of them, not {type(given).__name__}",
            "sampling_params",
        )
    if len(given) != count:
        raise InvalidRequestError(
            f"{len(given)} sampling parameters for {count} prompts", "sampling_params"
        )
    return list(given)
