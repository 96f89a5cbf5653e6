"""Checks a request's body and makes token ids and a `RequestSpec` of it.

`SamplingParams.resolve` (shared/request/sampling.py) fills in the model's defaults, except
`max_tokens`: `read_completion` and `read_chat` choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pagewire.services.router.http.api.openai import chats
from pagewire.services.router.http.api.openai.answer_form import form_of
from pagewire.services.router.http.api.openai.prompts import check_chars, prompt_ids, split_prompts
from pagewire.services.router.http.api.openai.schemas import (
    CacheRetention,
    ChatBody,
    CompletionBody,
    GenerationBody,
    parse_body,
    sampling_of,
)
from pagewire.services.router.http.api_errors import ContextLengthError
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.control.protocol import PoolingMode
from pagewire.shared.grammar.structures import checked_size
from pagewire.shared.request.sampling import RequestSpec, SamplingParams
from pagewire.shared.request.sampling_types import RetainSeconds
from pagewire.shared.text.answer_text import TextRules
from pagewire.shared.text.chat_template import ChatOptions
from pagewire.shared.text.detokenizer import make_detokenizer
from pagewire.shared.tool_calls.answer import AnswerParsing
from pagewire.shared.tool_calls.definitions import check_tools
from pagewire.shared.tool_calls.form_grammar import (
    form_or_calls,
    parsing_of_form,
    reasoning_before,
)
from pagewire.shared.tool_calls.tool_request import answer_parsing, tool_grammars

InputReader = Callable[[bytes | bytearray, ServedModel], "GenerationInput"]

MAX_PROMPTS = 64
DEFAULT_TOKENS = 16  # length of a completion that gives none
MAX_PROMPT_TOKEN_IDS = 1 << 22  # in one response; each choice repeats its prompt's ids
# The values of `prompt_cache_retention`, in seconds.
RETAIN_S: Mapping[CacheRetention, RetainSeconds] = {
    "in_memory": 300,
    "in-memory": 300,
    "5m": 300,
    "1h": 3600,
    "24h": 86400,
}
# In one response, of its prompts, and of its answers: 50k tokens with 20 likeliest ones each.
MAX_LOGPROBS = 1 << 20


class PromptInput(msgspec.Struct, frozen=True):
    """A prompt's tokens, and how its answers are to be generated.

    Attributes:
        spec: its seed is None if the client gave none.
        echo: text to repeat before the answer, or the text of the tokens that `/detokenize` got;
            None if it is not asked for.
    """

    token_ids: list[int]
    spec: RequestSpec
    echo: str | None = None


class EmbeddingForm(msgspec.Struct, frozen=True):
    """How embeddings are computed and written: what only a request of `/v1/embeddings` has.

    Attributes:
        pooling: how a prompt's hidden states become one vector.
        normalize: whether they have the length 1.
        dimensions: how many of their first numbers to return; None: all.
        as_base64: whether they are written as base64 of float32, not as lists of numbers.
    """

    pooling: PoolingMode
    normalize: bool
    dimensions: int | None
    as_base64: bool


class ResponseTurn(msgspec.Struct, frozen=True):
    """The fields that only a request of `/v1/responses` has, such as its history.

    Attributes:
        echo: a JSON object: the request's fields that the response repeats.
        items: a JSON list: the conversation up to the answer, as items; empty if the response is
            not to be stored, or cannot be.
        store: the response is to be stored.
        has_logprobs: texts have log probabilities.
    """

    echo: bytes
    items: bytes
    store: bool
    has_logprobs: bool


class GenerationInput(msgspec.Struct, frozen=True, tag=True):
    """A request's body once it is checked: prompts as tokens, and options.

    Attributes:
        model: the name that was asked for, one of the model's.
        prompts: at least one; each is answered `n` times.
        rules: of the answers' texts.
        running_usage: each chunk of a stream carries the usage so far.
        service_tier: the response names one.
        return_token_ids: the response has the token ids of prompts and answers, too.
        names_by_id: log probabilities name tokens by their ids.
        generates: whether answers have tokens; otherwise nothing but the prompt is echoed.
        prompt_logprobs: the response has a field of this name.
        unknown_fields: how many the body had.
        parsing: how calls and reasoning are found in the answers; None: they are only content.
        form_field: the body's field that asks for a form; the prompts' specs have its grammar.
        timings: the response says where the time went.
        other_grammars: to be used in this order if that grammar is refused; None: any answer.
        return_token_strs: the response of `/tokenize` has the tokens as the vocabulary writes them.
        session: name of the conversation that this continues; None: it has no name.
        cache_key: see `Sender`.
        turn: what only a request of `/v1/responses` has.
        embedding: what only a request of `/v1/embeddings` has.
    """

    model: str
    prompts: tuple[PromptInput, ...]
    n: int = 1
    rules: TextRules = TextRules()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    generates: bool = True
    prompt_logprobs: bool = False
    unknown_fields: int = 0
    running_usage: bool = False
    names_by_id: bool = False
    service_tier: bool = False
    parsing: AnswerParsing | None = None
    form_field: str | None = None
    other_grammars: tuple[str | None, ...] = ()
    timings: bool = False
    return_token_strs: bool = False
    session: str | None = None
    cache_key: str | None = None
    turn: ResponseTurn | None = None
    embedding: EmbeddingForm | None = None

    def with_grammar(self, text: str | None) -> GenerationInput:
        """Return the request with another grammar for its answers."""
        prompts = tuple(_with(prompt, grammar=text) for prompt in self.prompts)
        return msgspec.structs.replace(self, prompts=prompts)

    def with_grammars(self, grammars: Sequence[str | None], field: str) -> GenerationInput:
        """Return the request with grammars for its answers, the preferred one first.

        Args:
            grammars: at least one; None: any answer.
            field: the request's field that asks for them.

        Raises:
            InvalidRequestError: one is too large; names the field.
        """
        first, *others = (text and checked_size(text, field) for text in grammars)
        changed = msgspec.structs.replace(self, form_field=field, other_grammars=tuple(others))
        return changed.with_grammar(first)


def read_completion(raw: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Check and tokenize the body of a completion request.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, _, unknown_fields = parse_body(CompletionBody, raw)
    model.check_name(body.model)
    prompts = []
    sampling = sampling_of(body, body.logprobs)
    adds_special = body.add_special_tokens is not False
    texts = split_prompts(body.prompt, "prompt", MAX_PROMPTS)
    for prompt in texts:
        ids = prompt_ids(prompt, model, adds_special)
        ids = sampling.truncate(ids, model.max_model_len - (body.max_tokens or DEFAULT_TOKENS))
        room = _room(ids, model.max_model_len, body.max_tokens, "prompt")
        room = _reportable(room, body, sampling, len(texts), "max_tokens")
        max_tokens = model.defaults.answer_length(room, DEFAULT_TOKENS)
        if body.max_tokens is not None:
            # Without an answer the first token, which comes with the prompt, is dropped.
            max_tokens = max(1, body.max_tokens)
        spec = _spec(sampling, max_tokens, model)
        if body.echo and spec.prompt_logprobs is None:
            spec = msgspec.structs.replace(spec, prompt_logprobs=spec.logprobs)
        prompt_part = prompt if body.truncate_prompt_tokens is None else ids
        echo = _echo_text(prompt_part, model, body.max_tokens != 0) if body.echo else None
        prompts.append(PromptInput(ids, spec, echo))
    generation = _input(body, prompts, unknown_fields, model)
    rules = msgspec.structs.replace(generation.rules, echoes=bool(body.echo))
    return msgspec.structs.replace(generation, rules=rules)


def read_chat(raw: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Check, render and tokenize the body of a chat request.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, fields, unknown_fields = parse_body(ChatBody, raw)
    options = chats.template_options(body, chats.written_tools(body, fields))
    return chat_input(chats.Chat(body, options, unknown_fields), model)


def chat_ids(body: ChatBody, options: ChatOptions, model: ServedModel) -> list[int]:
    """Return the token ids of a conversation, none of them cut off.

    Raises:
        InvalidRequestError: a message is wrong, or the template refuses it, or the model lacks a
            token of it; names the field.
    """
    messages = chats.conversation(body)
    check_chars(chats.num_chars(messages, options), model.max_model_len, "messages")
    tokenizer = model.tokenizer_with(body.chat_template)
    ids = tokenizer.encode_chat(messages, options, body.add_special_tokens is True)
    model.tokenizer.check_ids(ids, model.vocab_size, "messages")
    return ids


def chat_input(chat: chats.Chat, model: ServedModel) -> GenerationInput:
    """Check, render and tokenize a chat of any API.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    with chat.in_fields_of_client():
        generation = _read_chat(chat, model)
    field = generation.form_field
    return msgspec.structs.replace(generation, form_field=field and chat.client_field(field))


def counted_chat(chat: chats.Chat, model: ServedModel) -> GenerationInput:
    """Check, render and tokenize a chat of any API whose tokens are only counted.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body = chat.body
    with chat.in_fields_of_client():
        model.check_name(body.model)
        check_tools(body.tools, body.tool_choice)
        ids = chat_ids(body, chat.options, model)
    return counted_input(body.model, ids, chat.unknown_fields, model)


def _read_chat(chat: chats.Chat, model: ServedModel) -> GenerationInput:
    body = chat.body
    model.check_name(body.model)
    check_tools(body.tools, body.tool_choice)
    wanted = model.syntax.wanted(body.tools, body.tool_choice, body.parallel_tool_calls)
    sampling = sampling_of(body, (body.top_logprobs or 0) if body.logprobs else None)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(body, field)
    ids = chat_ids(body, chat.options, model)
    ids = sampling.truncate(ids, model.max_model_len - (limit or DEFAULT_TOKENS))
    room = _room(ids, model.max_model_len, limit, "messages")
    room = _reportable(room, body, sampling, 1, field)
    max_tokens = limit or model.defaults.answer_length(room, room)
    prompt = PromptInput(ids, _spec(sampling, max_tokens, model))
    continued = (body.messages[-1].text or "") if body.continue_final_message else None
    parsing = answer_parsing(
        model.syntax, model.tokenizer, ids, wanted, continued, body.include_reasoning is not False
    )
    generation = _input(body, [prompt], chat.unknown_fields, model)
    begins = reasoning_before(model.syntax, model.tokenizer, ids, parsing, continued)
    if generation.form_field is not None and not (wanted is not None and wanted.must_call):
        text = generation.prompts[0].spec.grammar or ""
        forms = form_or_calls(text, model.syntax, wanted, begins)
        parsing = parsing and parsing_of_form(parsing, text, model.syntax)
        generation = generation.with_grammars(forms, generation.form_field)
    elif wanted is not None and parsing is not None:
        grammars = tool_grammars(model.syntax, wanted, parsing, may_reason=begins is not None)
        generation = generation.with_grammars(grammars, "tools")
    if parsing is not None:
        rules = msgspec.structs.replace(generation.rules, visible_tokens=parsing.visible_tokens)
        generation = msgspec.structs.replace(generation, parsing=parsing, rules=rules)
    return generation


def counted_input(
    name: str, ids: list[int], unknown_fields: int, model: ServedModel
) -> GenerationInput:
    """Return a request whose prompt is tokenized and not answered.

    Args:
        name: of the model, as it was asked for; checked.
        ids: the prompt.
        unknown_fields: how many the request had.
        model: the model.
    """
    prompt = PromptInput(ids, _spec(SamplingParams(), 1, model))
    return GenerationInput(name, (prompt,), generates=False, unknown_fields=unknown_fields)


def _input(
    body: GenerationBody, prompts: list[PromptInput], unknown_fields: int, model: ServedModel
) -> GenerationInput:
    options = body.stream_options
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _check_size(body, prompts)
    form = form_of(body, model.tokenizer.markers)
    if body.use_prefill_worker:
        model.check_placement()
        prompts = [_with(prompt, use_prefill_worker=True) for prompt in prompts]
    if form is not None:
        prompts = [_with(prompt, grammar=form[0]) for prompt in prompts]
    if body.prompt_cache_retention is not None:
        seconds = RETAIN_S[body.prompt_cache_retention]
        prompts = [_with(prompt, retain_s=seconds) for prompt in prompts]
    return GenerationInput(
        model=body.model,
        prompts=tuple(prompts),
        n=body.n or 1,
        rules=TextRules.of(body, stops),
        stream=bool(body.stream),
        include_usage=bool(options is not None and options.include_usage),
        running_usage=bool(options is not None and options.continuous_usage_stats),
        service_tier=body.service_tier is not None,
        return_token_ids=bool(body.return_token_ids),
        names_by_id=bool(body.return_tokens_as_token_ids),
        generates=body.max_tokens != 0,
        prompt_logprobs=body.prompt_logprobs is not None,
        unknown_fields=unknown_fields,
        form_field=None if form is None else form[1],
        timings=bool(body.timings),
        session=body.session_id or None,
        cache_key=body.prompt_cache_key or None,
    )


def _with(prompt: PromptInput, **parameters: Any) -> PromptInput:
    spec = msgspec.structs.replace(prompt.spec, **parameters)
    return msgspec.structs.replace(prompt, spec=spec)


def _check_size(body: GenerationBody, prompts: list[PromptInput]) -> None:
    """Bound what a response has of its prompts' tokens; `_reportable` bounds its answers.

    Raises:
        InvalidRequestError: it would have too many; names the field.
    """
    num_ids = sum(len(prompt.token_ids) for prompt in prompts) if body.return_token_ids else 0
    num_logprobs = sum(
        len(prompt.token_ids) * (1 + prompt.spec.prompt_logprobs)
        for prompt in prompts
        if prompt.spec.prompt_logprobs is not None
    )
    logprobs = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    for field, what, count, most in (
        ("return_token_ids", "token ids of prompts", num_ids, MAX_PROMPT_TOKEN_IDS),
        (logprobs, "log probabilities of prompt tokens", num_logprobs, MAX_LOGPROBS),
    ):
        if (body.n or 1) * count > most:
            problem = f"{(body.n or 1) * count} {what} are too many: at most {most}"
            raise InvalidRequestError(f"{field}: {problem} in one response", field)


def _spec(sampling: SamplingParams, max_tokens: int, model: ServedModel) -> RequestSpec:
    spec = sampling.resolve(model.defaults, max_tokens, model.tokenizer.encode_word)
    spec.check_vocabulary(model.vocab_size, model.eos_token_ids)
    return spec


def _room(ids: list[int], max_model_len: int, max_tokens: int | None, param: str) -> int:
    """Return how many tokens fit after the prompt; check that those asked for do."""
    if not ids:
        raise InvalidRequestError(f"{param} must not be empty", param)
    room = max_model_len - len(ids)
    if room < (max_tokens or 1):
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {len(ids) + (max_tokens or 1)} tokens ({len(ids)} in the {param}, "
            f"{max_tokens or 1} in the completion). Please reduce the length of either.",
            param,
        )
    return room


def _reportable(
    room: int, body: GenerationBody, sampling: SamplingParams, num_prompts: int, field: str
) -> int:
    """Return how many of the tokens that fit after a prompt one response can report.

    Args:
        room: tokens that fit.
        body: what is asked for.
        sampling: says whether the answers have log probabilities, and how many.
        num_prompts: of the request; each is answered `n` times.
        field: where the body says how long an answer may be.

    Raises:
        InvalidRequestError: an answer may be longer than that; names the field.
    """
    if sampling.logprobs is None or body.stream:
        return room
    num_answers, width = num_prompts * (body.n or 1), 1 + sampling.logprobs
    longest, length = MAX_LOGPROBS // (num_answers * width), getattr(body, field)
    if (length or 0) > longest:
        raise InvalidRequestError(
            f"{field} must be at most {longest}, not {length}: tokens x answers x log "
            f"probabilities of a token ({length} x {num_answers} x {width}) may be at most "
            f"{MAX_LOGPROBS} in one response",
            field,
        )
    return min(room, longest)


def _echo_text(prompt: str | list[int], model: ServedModel, generates: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    text = model.tokenizer.decode(prompt)
    # A character that the prompt leaves unfinished comes with the answer, if there is one.
    unfinished = make_detokenizer(model.tokenizer, prompt).take_rest() if generates else 0
    return text[: len(text) - unfinished]
