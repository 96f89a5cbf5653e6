"""What a request asks for: what its caller says, what the model suggests, and the result.

    SamplingParams (None: unset)  +  SamplingDefaults of the model  ->  RequestSpec

The router and the offline `LLM` resolve a request once. The result crosses the services' messages
unchanged and stays with the engine's sequence. A further setting of a request is a field of
`SamplingFields` and of `RequestSpec`, and code where it acts.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.logprobs import MAX_TOP

MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 16_384
_INT64 = 2**63


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
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def validate(self) -> None:
        """Check types and ranges; a NaN fails every comparison and so is refused.

        Raises:
            InvalidRequestError: a field is out of range; names it.
        """
        _check(
            self,
            (_is_real(self.temperature, 0, 100), "temperature", "a number between 0 and 100"),
            (
                _is_real(self.top_p, 0, 1) and self.top_p > 0,
                "top_p",
                "a number greater than 0 and at most 1",
            ),
            (
                _is_int(self.top_k, 0, 2**31),
                "top_k",
                "0 (all tokens) or a positive integer below 2**31",
            ),
            (_is_int(self.max_tokens, 1, 2**31), "max_tokens", "an integer from 1 to 2**31 - 1"),
            (
                self.seed is None or _is_int(self.seed, -_INT64, _INT64),
                "seed",
                "a 64-bit integer",
            ),
            (
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                "stop_token_ids",
                f"at most {MAX_STOP_TOKEN_IDS} token ids",
            ),
            *(
                (
                    getattr(self, name) is None or _is_int(getattr(self, name), 0, MAX_TOP + 1),
                    name,
                    f"an integer from 0 to {MAX_TOP}",
                )
                for name in ("logprobs", "prompt_logprobs")
            ),
        )
        for index, token in enumerate(self.stop_token_ids):
            if not _is_int(token, 0, 2**31):
                raise InvalidRequestError(
                    f"stop_token_ids[{index}] must be an integer from 0 to 2**31 - 1, "
                    f"not {reprlib.repr(token)}",
                    "stop_token_ids",
                )

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
    `SamplingParams.resolve` refuses values of a wrong type or out of range.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        seed: makes the tokens reproducible; the further answers of `n` have seeds derived from it.
        stop_token_ids: tokens that end an answer, in addition to the model's own.
        ignore_eos: generate on past the end of the sequence.
        logprobs: report each token's log probability and those of this many most likely tokens.
        prompt_logprobs: likewise of the prompt's tokens but the first.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class SamplingParams(SamplingFields, frozen=True, kw_only=True):
    """What a caller asks for. Where something is unset, the model's defaults apply.

    Attributes:
        max_tokens: upper bound on generated tokens.
        stop: strings that end an answer and are not part of its text.
        n: answers to each prompt, each sampled on its own.
    """

    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    n: int = 1

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
        _check(
            self,
            (_is_list(self.stop_token_ids), "stop_token_ids", "a list of token ids"),
            (_is_int(self.n, 1, MAX_CHOICES + 1), "n", f"between 1 and {MAX_CHOICES}"),
            (isinstance(self.ignore_eos, bool), "ignore_eos", "a boolean"),
            (_are_stop_strings(self.stop), "stop", "a string or a list of strings, none empty"),
        )
        fields = asdict(defaults) | {"max_tokens": max_tokens}
        for name in (*SamplingFields.__struct_fields__, "max_tokens"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        if fields["top_k"] == -1:
            fields["top_k"] = 0
        fields["stop_token_ids"] = tuple(self.stop_token_ids or ())
        resolved = RequestSpec(**fields)
        resolved.validate()
        return resolved


def _check(params: msgspec.Struct, *checks: tuple[bool, str, str]) -> None:
    for ok, field, rule in checks:
        if not ok:
            value = reprlib.repr(getattr(params, field))
            raise InvalidRequestError(f"{field} must be {rule}, not {value}", field)


def _is_real(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_int(value: object, low: int, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end


def _is_list(value: object) -> bool:
    return value is None or (isinstance(value, Sequence) and not isinstance(value, str | bytes))


def _are_stop_strings(value: object) -> bool:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, Sequence):
        return stops is None
    return all(isinstance(stop, str) and stop for stop in stops)
