"""A request's parameters: the caller's, the model's defaults, and the result of both.

    SamplingParams (None: unset)  +  SamplingDefaults of the model  ->  RequestSpec

The router and the offline `LLM` resolve a request once. The result crosses the services' messages
unchanged and stays with the engine's sequence. A further setting of a request is a field of
`SamplingFields` and of `RequestSpec`, and code where it acts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.base.field_rules import CheckedStruct, check_fields
from pagewire.shared.request.sampling_types import (
    ALLOWED_TOKEN_IDS,
    BAD_STRINGS,
    MAX_BAD_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    STOP_TOKEN_IDS,
    TOP_K,
    BadString,
    BadWord,
    Biases,
    CacheSalt,
    GapObjective,
    Grammar,
    LogId,
    LogprobsMode,
    MaxTokens,
    MinP,
    MinTokens,
    NumChoices,
    NumTop,
    OutputKind,
    OwnerName,
    Penalty,
    PromptLength,
    RepetitionPenalty,
    RetainSeconds,
    Seed,
    StopString,
    Temperature,
    TokenId,
    TopP,
    last_tokens,
)
from pagewire.shared.request.structured_outputs import StructuredOutputs


class RequestSpec(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The settings of a request: how its tokens are chosen and reported, and when they end.

    Nothing is unset. `Generate`, `Prefill`, the engine's `Sequence` and `NewDeviceSlot` hold one.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: keep tokens that are at least this many times as probable as the most probable one.
        frequency_penalty: subtracted from a token's logit for each time it is in the output.
        presence_penalty: subtracted from a token's logit if it is in the output.
        repetition_penalty: divides positive logits of tokens of prompt and output, and multiplies
            others.
        logit_bias: added to logits, by token id.
        min_tokens: no token ends the answer before it has that many.
        allowed_token_ids: no other tokens are sampled; None allows all.
        bad_words: no output has these tokens one after the other.
        seed: makes the tokens reproducible. If it is None, the router draws one
            (dispatch/dispatcher.py), or offline the engine does (`new_sequence`).
        max_tokens: upper bound on generated tokens.
        stop_token_ids: end after any of these; the model's end-of-sequence ids are added to
            them unless `ignore_eos`.
        ignore_eos: generate on past the end of the sequence.
        logprobs: report each token's log probability and those of this many most likely tokens.
        prompt_logprobs: report the same of all prompt tokens but the first; they are then computed
            without the prefix cache.
        logprobs_mode: "raw": log probabilities of sampled tokens by the model's logits alone;
            "processed": of the distribution that is sampled from.
        grammar: text of the grammar that the answer follows (shared/grammar); None: any answer.
        slo_gap_s: largest time between two tokens of the answer that its worker tries to keep, in
            seconds; None: the worker's own.
        log_id: names the request in the logs of all services; None: it has no name.
        cache_salt: goes into the block hashes, so that cached blocks are shared only with requests
            of the same salt. None counts as a salt.
        owner: who takes turns with other owners where requests wait: the name of an API key, or an
            address; None counts as an owner.
        tenant: name of the API keys whose requests share cached blocks with this one; None: cached
            blocks are not divided by keys.
        use_prefill_worker: a prefill worker computes the prompt if there is one, even where that
            takes longer.
        retain_s: seconds for which the blocks of prompt and answer are evicted after others.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31, description=TOP_K)] = 0
    min_p: MinP = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Biases = {}
    min_tokens: MinTokens = 0
    allowed_token_ids: Annotated[tuple[TokenId, ...], ALLOWED_TOKEN_IDS] | None = None
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    seed: Seed | None = None
    max_tokens: MaxTokens = 16
    stop_token_ids: Annotated[tuple[TokenId, ...], STOP_TOKEN_IDS] = ()
    ignore_eos: bool = False
    logprobs: NumTop | None = None
    prompt_logprobs: NumTop | None = None
    logprobs_mode: LogprobsMode = "raw"
    grammar: Grammar | None = None
    slo_gap_s: GapObjective | None = None
    log_id: LogId | None = None
    cache_salt: CacheSalt | None = None
    owner: OwnerName | None = None
    tenant: OwnerName | None = None
    use_prefill_worker: bool = False
    retain_s: RetainSeconds = 0

    @property
    def hash_extra(self) -> bytes:
        """What block hashes depend on besides tokens, see `BlockHasher`.

        A tenant's name stands between two bytes that no UTF-8 text has, so that no other tenant and
        salt have the same, and no salt alone.
        """
        salt = (self.cache_salt or "").encode(errors="surrogatepass")
        return salt if self.tenant is None else b"\xff%b\xff%b" % (self.tenant.encode(), salt)

    def validate(self) -> None:
        """Check types and ranges, and what goes together.

        Raises:
            InvalidRequestError: a field is out of range; names it.
        """
        check_fields(self)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must not be more than max_tokens, which is {self.max_tokens}",
                "min_tokens",
            )
        if sum(map(len, self.bad_words)) > MAX_BAD_TOKENS:
            raise InvalidRequestError(
                f"bad_words must be at most {MAX_BAD_TOKENS} tokens together", "bad_words"
            )

    def check_vocabulary(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """Check that token ids lie in the model's vocabulary, and that some can come first.

        Args:
            vocab_size: logits of a row.
            eos_token_ids: what ends the model's answers.

        Raises:
            InvalidRequestError: one does not, or none can; names the field.
        """
        ids_of = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias,
            "bad_words": [token_id for word in self.bad_words for token_id in word],
        }
        for name, ids in ids_of.items():
            if max(ids, default=0) >= vocab_size:
                raise InvalidRequestError(
                    f"{name} must be token ids below {vocab_size}, not {max(ids)}", name
                )
        forbidden = {word[0] for word in self.bad_words if len(word) == 1}
        if self.min_tokens:
            forbidden.update(self.stop_token_ids, () if self.ignore_eos else eos_token_ids)
        if self.allowed_token_ids is not None and forbidden.issuperset(self.allowed_token_ids):
            raise InvalidRequestError(
                "allowed_token_ids must have a token that bad_words and min_tokens do not forbid",
                "allowed_token_ids",
            )

    @property
    def is_penalized(self) -> bool:
        """Whether the request has a penalty, which changes logits of tokens that occurred."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def is_shaped(self) -> bool:
        """Whether tokens are chosen by more than temperature, min_p, top_k and top_p."""
        return bool(
            self.is_penalized
            or self.logit_bias
            or self.min_tokens
            or self.allowed_token_ids is not None
            or self.bad_words
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
    """The model's values for parameters that a request leaves out.

    Attributes:
        max_tokens: None if the model suggests none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    def answer_length(self, room: int, otherwise: int) -> int:
        """Return the `max_tokens` of a request that gives none.

        Args:
            room: tokens that fit after the prompt.
            otherwise: the value if the model suggests none.
        """
        return min(room, otherwise if self.max_tokens is None else self.max_tokens)


Encode = Callable[[str], list[int]]


def bad_word_ids(words: Sequence[str], encode: Encode | None) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of words that must not come.

    Each word is banned as it is written, and without and with a space before it (as vLLM does if
    both forms have as many tokens), as they are tokenized at the beginning of a text and after a
    line break. A form that ends with another one needs no ban of its own.

    Raises:
        InvalidRequestError: the tokenizer is missing, or the words have too many tokens or forms.
    """
    if encode is None:
        if words:
            raise InvalidRequestError(
                "bad_words needs a tokenizer.json, which the model lacks", "bad_words"
            )
        return ()
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        forms = _forms_of(word, encode)
        longest = max(map(len, forms), default=0)
        if longest > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words: {word!r} is {longest} tokens: at most {MAX_BAD_WORD_TOKENS}",
                "bad_words",
            )
        sequences |= dict.fromkeys(forms)
    if len(sequences) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words: these {len(words)} words are tokenized in {len(sequences)} ways: at most "
            f"{MAX_BAD_WORDS}",
            "bad_words",
        )
    return tuple(sequences)


def _forms_of(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """Return the ways in which a word is tokenized, none of which ends with another."""
    bare = word.lstrip()
    texts = dict.fromkeys([bare, f" {bare}", word] if bare else [word])
    before = tuple(encode("\n"))
    sequences: dict[tuple[int, ...], None] = {}
    for text in texts:
        inside = tuple(encode(f"\n{text}"))
        if inside[: len(before)] == before:  # otherwise the line break is a part of a token
            sequences[inside[len(before) :]] = None
        sequences[tuple(encode(text))] = None
    forms = [form for form in sequences if form]
    return [
        form
        for form in forms
        if not any(form != other and form[-len(other) :] == other for other in forms)
    ]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields with which a caller controls the choice of tokens. None means unset.

    `SamplingParams` and the bodies of HTTP requests have these fields by these names.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens that are at least this many times as probable as the most probable one.
        frequency_penalty: subtracted from a token's logit for each time it is in the output.
        presence_penalty: subtracted from a token's logit if it is in the output.
        repetition_penalty: divides positive logits of tokens of prompt and output, and multiplies
            others.
        logit_bias: added to logits, by token id.
        min_tokens: no stop token or stop string ends the answer before it has that many.
        allowed_token_ids: no other tokens are sampled.
        bad_words: texts that the answer never has, at the start of a word or within it.
        seed: makes the tokens reproducible; the further answers of `n` have seeds derived from it.
        stop_token_ids: tokens that end an answer, in addition to the model's own.
        ignore_eos: generate on past the end of the sequence.
        prompt_logprobs: report the log probability of each of the prompt's tokens but the first,
            and those of this many most likely tokens.
        logprobs_mode: "processed": log probabilities of the answer's tokens are of the distribution
            that is sampled from: after masks, penalties, temperature and limits. "raw": before.
        include_stop_str_in_output: the stop string that ends an answer is part of its text.
        skip_special_tokens: the text has no special tokens; so it is if unset.
        truncate_prompt_tokens: keep this many last tokens of the prompt; -1: as many as fit with
            `max_tokens` after them, or with 16.
        cache_salt: cached blocks are shared only with requests of the same salt.
        slo_gap_s: largest time between two tokens of an answer that its worker tries to keep, in
            seconds: prompts next to it are computed in shorter parts.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31, description=TOP_K)] | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None
    min_tokens: MinTokens | None = None
    allowed_token_ids: Annotated[Sequence[TokenId], ALLOWED_TOKEN_IDS] | None = None
    bad_words: Annotated[Sequence[BadString], BAD_STRINGS] | None = None
    seed: Seed | None = None
    stop_token_ids: Annotated[Sequence[TokenId], STOP_TOKEN_IDS] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: NumTop | None = None
    logprobs_mode: LogprobsMode | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: PromptLength | None = None
    cache_salt: CacheSalt | None = None
    slo_gap_s: GapObjective | None = None


# Fields that concern prompts and texts, not the choice of tokens: workers do not get them.
_OF_TEXT = {"include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens"}


class SamplingParams(
    SamplingFields, frozen=True, kw_only=True, repr_omit_defaults=True, metaclass=CheckedStruct
):
    """The sampling that a caller asks for. The model's defaults apply where a field is unset.

    The constructor checks names and values, and raises an `InvalidRequestError`.

    Attributes:
        max_tokens: upper bound on generated tokens.
        logprobs: report each token's log probability and those of this many most likely tokens.
        stop: strings that end an answer and are not part of its text.
        n: answers to each prompt, each sampled on its own.
        structured_outputs: the form that an answer must have.
        output_kind: what a stream yields each time: "cumulative": all of the answers so far;
            "delta": only what is new; "final": nothing before their end.
    """

    max_tokens: MaxTokens | None = None
    logprobs: NumTop | None = None
    stop: (
        Annotated[
            StopString | Sequence[StopString],
            Meta(description="a string or a list of strings, none empty"),
        ]
        | None
    ) = None
    n: NumChoices = 1
    structured_outputs: StructuredOutputs | None = None
    output_kind: OutputKind = "cumulative"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, one or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def truncate(self, prompt_ids: list[int], longest: int) -> list[int]:
        """Return as many of a prompt's last tokens as are to be kept; at most `longest` fit.

        Raises:
            InvalidRequestError: none are.
        """
        return last_tokens(prompt_ids, self.truncate_prompt_tokens, longest)

    def resolve(
        self, defaults: SamplingDefaults, max_tokens: int, encode: Encode | None = None
    ) -> RequestSpec:
        """Fill in what is unset, and check the result; the constructor has checked the rest.

        Args:
            defaults: the model's.
            max_tokens: if unset; see `SamplingDefaults.answer_length`.
            encode: returns a text's token ids without special ones; None if the model has no
                tokenizer.

        Raises:
            InvalidRequestError: a field has a wrong type or is out of range; names it.
        """
        fields = asdict(defaults) | {"max_tokens": max_tokens}
        for name in (*SamplingFields.__struct_fields__, "max_tokens", "logprobs"):
            value = getattr(self, name)
            if value is not None and name not in _OF_TEXT:
                fields[name] = value
        if fields["top_k"] == -1:
            fields["top_k"] = 0
        fields["stop_token_ids"] = tuple(self.stop_token_ids or ())
        fields["bad_words"] = bad_word_ids(self.bad_words or (), encode)
        if self.allowed_token_ids is not None:
            fields["allowed_token_ids"] = tuple(self.allowed_token_ids)
        resolved = RequestSpec(**fields)
        resolved.validate()
        return resolved
