"""A model in the caller's process: what `LLM` and `AsyncLLM` have in common."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, overload

import msgspec

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.build import build_engine
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.offline.chats import ChatArguments, ChatPrompt, read_chats
from pagewire.shared.engine.offline.llm_answer import LLMAnswer
from pagewire.shared.engine.offline.outputs import OutputReader, RequestOutput
from pagewire.shared.engine.offline.prompts import TokenizedPrompt, read_prompts
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.grammar.structures import grammar_text, read_structured_outputs
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.request.sampling import RequestSpec, SamplingParams
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.shared.settings.config import LLMSettings, load_settings
from pagewire.shared.text.markers import NO_MARKERS
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.shared.tool_calls.template_fixes import template_fix_for

DEFAULT_TOKENS = 16  # length of an answer to a prompt; in a chat, as many tokens as fit

Answers = dict[str, LLMAnswer]  # by request id


class OfflineModel:
    """A model with its engine and its tokenizer.

    Attributes:
        settings: the settings that it was made with.
        engine: its engine's parts.
        core: the core of its engine.
        tokenizer: its tokenizer; None if it has no tokenizer.json.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        """Load a model and make an engine for it.

        Raises:
            ConfigError: a setting is wrong, or this machine or model does not support it.
        """
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self.settings = load_settings(LLMSettings, {"model": name, **settings})
        self.engine = build_engine(self.settings)
        self.core = self.engine.make_core()
        self.tokenizer: Tokenizer | None = None
        if (self.engine.model_path / "tokenizer.json").exists():
            self.tokenizer = Tokenizer.from_dir(
                self.engine.model_path,
                self.settings.special_tokens_in_messages,
                self.settings.chat_template,
                self.engine.config.eos_token_ids,
            )
        self._syntax = ChatSyntax()
        if self.tokenizer is not None:
            self._syntax = ChatSyntax.choose(
                self.tokenizer.template_source,
                self.settings.tool_parser,
                self.settings.reasoning_parser,
                self.tokenizer.marker_token_id,
            )
            self.tokenizer.fit_chats(partial(template_fix_for, form=self._syntax.tools))
        self._defaults = load_sampling_defaults(
            self.engine.model_path, self.settings.generation_config
        )
        self._ids = itertools.count()
        self._unseeded = itertools.count()

    def __repr__(self) -> str:
        """Return what the model is, and where."""
        built, dtype = self.engine, self.engine.model_identity.dtype
        return (
            f"{type(self).__name__}({self.settings.model!r}, device={built.device.type!r}, "
            f"dtype={dtype!r}, max_model_len={built.max_model_len})"
        )

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, which has `encode`, `decode` and `render_chat`.

        Raises:
            InvalidRequestError: the model has no tokenizer.json.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer.json: use token ids")
        return self.tokenizer

    @overload
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @overload
    def encode(self, text: list[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    def encode(
        self, text: str | list[str], add_special_tokens: bool = True
    ) -> list[int] | list[list[int]]:
        """Return the token ids of a text, or of each of several texts.

        They are those that `generate` computes for the text. In vLLM, a method of this name returns
        hidden states, for which Pagewire has `LLM.embed`.

        Args:
            text: one text or several.
            add_special_tokens: add the special tokens that the model expects around a text, such as
                one that begins it; the names of special tokens within the text always become these
                tokens.

        Raises:
            InvalidRequestError: this is not a text, or the model has no tokenizer.json.
        """
        tokenizer = self.get_tokenizer()
        texts = [text] if isinstance(text, str) else list(text)
        if not all(isinstance(each, str) for each in texts):
            raise InvalidRequestError("text must be a text or a list of texts", "text")
        found = [tokenizer.encode(each, add_special_tokens) for each in texts]
        return found[0] if isinstance(text, str) else found

    def _tokenized(self, prompts: object, add_special_tokens: bool) -> list[TokenizedPrompt]:
        vocab_size = self.engine.config.vocab_size
        return read_prompts(prompts, self.tokenizer, vocab_size, add_special_tokens)

    def _rendered(self, conversations: Seq[object], arguments: ChatArguments) -> list[ChatPrompt]:
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer.json, and so no chat template")
        vocab_size = self.engine.config.vocab_size
        return read_chats(conversations, self.tokenizer, vocab_size, self._syntax, arguments)

    def _prepare(
        self,
        prompts: Seq[TokenizedPrompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        default_tokens: int,
        streams: bool = False,
    ) -> tuple[list[RequestOutput], Answers]:
        """Return the outputs of prompts, still without text, and the answers that fill them.

        Args:
            prompts: tokenized prompts.
            sampling_params: one for all prompts, or one for each.
            default_tokens: length of an answer for which neither request nor model has one.
            streams: answers have their text as it comes, not only at the end.

        Raises:
            InvalidRequestError: a parameter is out of range.
        """
        params = _params(sampling_params, len(prompts))
        answers: Answers = {}
        outputs = []
        for index, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            spec, token_ids = self._resolve(prompt.token_ids, asked, default_tokens)
            if isinstance(prompt, ChatPrompt):
                prompt = prompt.with_form(spec.grammar)
                spec = self._with_grammar(spec, prompt.grammars)
            output = RequestOutput(prompt.text, token_ids, [], index=index)
            outputs.append(output)
            for choice in range(asked.n):
                answer = LLMAnswer(
                    choice, output, spec.for_choice(choice), asked, self.tokenizer, prompt, streams
                )
                answers[f"llm-{next(self._ids)}"] = answer
        return outputs, answers

    def _resolve(
        self, prompt_ids: list[int], asked: SamplingParams, default_tokens: int
    ) -> tuple[RequestSpec, list[int]]:
        """Return a request's settings, and its prompt's tokens, truncated as it asks."""
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
        return self._seeded(spec), prompt_ids

    def _seeded(self, spec: RequestSpec) -> RequestSpec:
        """Return the settings with a seed, if there is one for requests without their own."""
        if spec.seed is not None or self.settings.seed is None:
            return spec
        text = f"{self.settings.seed}:{next(self._unseeded)}"
        raw = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return msgspec.structs.replace(spec, seed=int.from_bytes(raw, "big", signed=True))

    def _constrained(self, spec: RequestSpec, asked: StructuredOutputs) -> RequestSpec:
        name = "structured_outputs"
        markers = NO_MARKERS if self.tokenizer is None else self.tokenizer.markers
        text = grammar_text(read_structured_outputs(asked, name), name, markers)
        if text is not None:
            self.core.constraints.check_text(text, name)
        return msgspec.structs.replace(spec, grammar=text)

    def _with_grammar(self, spec: RequestSpec, grammars: Seq[str | None]) -> RequestSpec:
        """Return the settings with the first grammar that compiles."""
        for index, text in enumerate(grammars):
            try:
                if text is not None:
                    self.core.constraints.check_text(text, "tools")
            except InvalidRequestError:
                if index == len(grammars) - 1:
                    raise
            else:
                return msgspec.structs.replace(spec, grammar=text)
        return spec


def queue(core: EngineCore, answers: Answers, eos_token_ids: tuple[int, ...]) -> None:
    """Queue the answers to one prompt, which is computed once.

    Raises:
        InvalidRequestError: the prompt is too long, or empty.
        OverloadedError: too many sequences wait.
    """
    sequences = [
        new_sequence(request_id, answer.output.prompt_token_ids, answer.spec, eos_token_ids)
        for request_id, answer in answers.items()
    ]
    core.sequences.add(sequences[0], tuple(sequences[1:]))


def readers_of(answers: Answers) -> list[OutputReader]:
    """Return a reader of each prompt's output."""
    of_output = {each.output.index: each for each in answers.values()}
    return [OutputReader(each.output, each.output_kind) for each in of_output.values()]


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
