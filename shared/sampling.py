"""What a request asks for: what its caller says, what the model suggests, and the result.

    SamplingParams (None: unset)  +  SamplingDefaults of the model  ->  RequestSpec

The router and the offline `LLM` resolve a request once. The result crosses the services' messages
unchanged and stays with the engine's sequence. A further setting of a request is a field of
`SamplingFields` and of `RequestSpec`, and code where it acts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.field_rules import check_fields
from pagewire.shared.logprobs import MAX_TOP
from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputs

MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 16_384

Temperature = Annotated[float, Meta(ge=0, le=100, description="a number between 0 and 100")]
TopP = Annotated[float, Meta(gt=0, le=1, description="a number greater than 0 and at most 1")]
_TOP_K = "0 (all tokens) or a positive integer below 2**31"
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a 64-bit integer")]
MaxTokens = Annotated[int, Meta(ge=1, lt=2**31, description="an integer from 1 to 2**31 - 1")]
TokenId = Annotated[int, Meta(ge=0, lt=2**31, description="an integer from 0 to 2**31 - 1")]
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP, description=f"an integer from 0 to {MAX_TOP}")]
_StopTokenIds = Meta(
    max_length=MAX_STOP_TOKEN_IDS, description=f"a list of at most {MAX_STOP_TOKEN_IDS} token ids"
)
_GRAMMAR = Meta(
    min_length=1,
    max_length=MAX_GRAMMAR_CHARS,
    description=f"the text of a grammar, at most {MAX_GRAMMAR_CHARS} characters",
)
_StopString = Annotated[str, Meta(min_length=1)]


class RequestSpec(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """All settings of one request: how its tokens are chosen, reported, and when they end.

    Nothing is unset. `Generate`, `Prefill`, the engine's `Sequence` and `NewDeviceSlot` hold one.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 keeps all.
        seed: makes the tokens reproducible. If it is None, the router draws one
            (dispatch/dispatcher.py), or offline the engine does (`new_sequence`).
        max_tokens: upper bound on generated tokens.
        stop_token_ids: end after any of these; the model's end-of-sequence ids are added to
            them unless `ignore_eos`.
        ignore_eos: generate on past the end of the sequence.
        logprobs: report each token's log probability and those of this many most likely tokens.
        prompt_logprobs: likewise of the prompt's tokens but the first; the prompt is then computed
            without the prefix cache.
        grammar: text of the grammar that the answer follows (shared/grammar); None: any answer.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31, description=_TOP_K)] = 0
    seed: Seed | None = None
    max_tokens: MaxTokens = 16
    stop_token_ids: Annotated[tuple[TokenId, ...], _StopTokenIds] = ()
    ignore_eos: bool = False
    logprobs: NumTop | None = None
    prompt_logprobs: NumTop | None = None
    grammar: Annotated[str, _GRAMMAR] | None = None

    def validate(self) -> None:
        """Check types and ranges.

        Raises:
            InvalidRequestError: a field is out of range; names it.
        """
        check_fields(self)

    def for_choice(self, choice: int) -> RequestSpec:
        """Return the parameters of one of n answers: the first has the caller's own seed.

        The others' seeds are a function of that seed and their index. Without a seed each answer
        gets one of its own later.
        """
        if choice == 0 or self.seed is None:
            return self
        raw = hashlib.blake2b(f"{self.seed}:{choice}".encode(), digest_size=8).digest()
        return msgspec.structs.replace(self, seed=int.from_bytes(raw, "big", signed=True))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What applies where a request says nothing.

    Attributes:
        max_tokens: None if the model suggests none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None

    def answer_length(self, room: int, otherwise: int) -> int:
        """Return the `max_tokens` of a request that gives none.

        Args:
            room: tokens that fit after the prompt.
            otherwise: if the model suggests none.
        """
        return min(room, otherwise if self.max_tokens is None else self.max_tokens)


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may say about the choice of tokens. None means unset.

    `SamplingParams` and the bodies of HTTP requests have these fields by these names.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        seed: makes the tokens reproducible; the further answers of `n` have seeds derived from it.
        stop_token_ids: tokens that end an answer, in addition to the model's own.
        ignore_eos: generate on past the end of the sequence.
        prompt_logprobs: report the log probability of each of the prompt's tokens but the first,
            and those of this many most likely tokens.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31, description=_TOP_K)] | None = None
    seed: Seed | None = None
    stop_token_ids: Annotated[Sequence[TokenId], _StopTokenIds] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: NumTop | None = None


class SamplingParams(SamplingFields, frozen=True, kw_only=True):
    """What a caller asks for. Where something is unset, the model's defaults apply.

    Attributes:
        max_tokens: upper bound on generated tokens.
        logprobs: report each token's log probability and those of this many most likely tokens.
        stop: strings that end an answer and are not part of its text.
        n: answers to each prompt, each sampled on its own.
        structured_outputs: the form that an answer must have.
    """

    max_tokens: MaxTokens | None = None
    logprobs: NumTop | None = None
    stop: (
        Annotated[
            _StopString | Sequence[_StopString],
            Meta(description="a string or a list of strings, none empty"),
        ]
        | None
    ) = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description=f"between 1 and {MAX_CHOICES}")] = 1
    structured_outputs: StructuredOutputs | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, one or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def resolve(self, defaults: SamplingDefaults, max_tokens: int) -> RequestSpec:
        """Fill in what is unset, and check everything.

        Args:
            defaults: the model's.
            max_tokens: if unset; see `SamplingDefaults.answer_length`.

        Raises:
            InvalidRequestError: a field has a wrong type or is out of range; names it.
        """
        check_fields(self)
        fields = asdict(defaults) | {"max_tokens": max_tokens}
        for name in (*SamplingFields.__struct_fields__, "max_tokens", "logprobs"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        if fields["top_k"] == -1:
            fields["top_k"] = 0
        fields["stop_token_ids"] = tuple(self.stop_token_ids or ())
        resolved = RequestSpec(**fields)
        resolved.validate()
        return resolved
