"""The bodies of OpenAI's completion and chat requests, with types as strict as OpenAI's.

Each known field is declared with its bounds and, where the type does not say it, a rule in words.
`unsupported.py` has the unsupported fields, which may only have values that change nothing. Unknown
fields are only counted, so that they cost little.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from pagewire.services.router.http.api.openai.answer_form import FormFields
from pagewire.services.router.http.unsupported import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS
from pagewire.services.router.http.wrong_fields import decode_body
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.base.field_rules import of_chars, of_items, of_numbers
from pagewire.shared.control.protocol import MAX_FORKS
from pagewire.shared.request.sampling import SamplingFields, SamplingParams
from pagewire.shared.request.sampling_types import NumTop
from pagewire.shared.text.chat_messages import ROLES, MessageFields, Part
from pagewire.shared.text.chat_template import TemplateText, TemplateVariables
from pagewire.shared.tool_calls.definitions import ToolChoice, Tools

MAX_CHOICES = 1 + MAX_FORKS
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # content parts of one message
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_LABEL_CHARS = 512  # in a text that is only a name

BodyT = TypeVar("BodyT", bound="GenerationBody")

StopString = Annotated[str, of_chars(1, MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString], of_items(0, MAX_STOPS, f"strings of 1 to {MAX_STOP_CHARS} characters")
]
# Larger numbers than any context, and none that is too long to be printed.
AtLeastOne = Annotated[int, Meta(ge=1, le=2**63 - 1, description="a positive integer below 2**63")]
AtLeastZero = Annotated[int, Meta(ge=0, le=2**63 - 1, description="an integer from 0 to 2**63 - 1")]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_METADATA_KEY)],
        Annotated[str, Meta(max_length=MAX_METADATA_VALUE)],
    ],
    Meta(
        max_length=MAX_METADATA,
        description=f"an object of at most {MAX_METADATA} strings of up to {MAX_METADATA_VALUE} "
        f"characters, with names of up to {MAX_METADATA_KEY}",
    ),
]
Label = Annotated[str, of_chars(0, MAX_LABEL_CHARS)]
Priority = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a 64-bit integer")]
# How long cached blocks are kept: OpenAI's two values, as documents and clients write them, and
# Anthropic's two.
CacheRetention = Literal["in_memory", "in-memory", "5m", "1h", "24h"]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
NumChoices = Annotated[int, of_numbers(1, MAX_CHOICES)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
PROMPT_RULE = (
    "a string, a list of strings, a list of token ids, or a list of lists of token ids, none of "
    "them empty"
)
Prompt = Annotated[str | list[str | int | list[int]], Meta(description=PROMPT_RULE)]


class StreamOptions(msgspec.Struct, frozen=True):
    """The parts of a stream besides the answer that a client may ask for.

    Attributes:
        include_usage: a last chunk with the usage.
        continuous_usage_stats: the usage so far in each chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(FormFields, frozen=True, kw_only=True):
    """The fields that completions, chats and responses have; null means the default.

    Attributes:
        model: one of the names that `/v1/models` lists.
        stop: ends an answer before any of these.
        stream: send the answer as server-sent events while it is made.
        add_special_tokens: the tokenizer adds its special tokens to the prompt's text; true by
            default for completions, and false for chats, whose template has these tokens.
        service_tier: changes nothing; if it is given, the response has "default".
        timings: the response says where the time went.
        use_prefill_worker: a prefill worker computes the prompt, even where that takes longer.
        session_id: names a conversation that goes on: it stays on its worker while load allows, and
            its cached blocks are kept for a while.
        prompt_cache_key: names requests with the same beginning, which stay on a worker likewise if
            there is no session_id.
        prompt_cache_retention: how long cached blocks are kept.
        user: changes nothing, nor do the fields after it.
    """

    model: str
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    add_special_tokens: bool | None = None
    service_tier: ServiceTier | None = None
    timings: bool | None = None
    use_prefill_worker: bool | None = None
    session_id: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: CacheRetention | None = None
    user: Label | None = None
    metadata: Metadata | None = None
    request_id: Label | None = None
    store: bool | None = None
    priority: Priority | None = None
    safety_identifier: Label | None = None


class GenerationBody(RequestFields, frozen=True, kw_only=True):
    """The fields that both completion and chat requests have.

    Attributes:
        max_tokens: how long an answer may be, in tokens.
        n: how many answers to each prompt.
        return_token_ids: the response has the token ids of prompts and answers.
        return_tokens_as_token_ids: log probabilities name tokens by their ids.
    """

    max_tokens: AtLeastOne | None = None
    n: NumChoices | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`.

    Attributes:
        prompt: text, several texts, token ids, or several lists of token ids.
        max_tokens: may be 0 if the prompt is echoed: nothing is generated then.
        best_of: not supported: at most 1.
        echo: the answer begins with the prompt.
        logprobs: report the log probability of each token and those of this many most likely ones.
    """

    prompt: Prompt
    max_tokens: AtLeastZero | None = None
    best_of: AtLeastOne | None = None
    echo: bool | None = None
    logprobs: NumTop | None = None


class ChatMessage(MessageFields, frozen=True, kw_only=True):
    """A message of a chat: who wrote it, and its text."""

    role: ROLES
    content: Annotated[
        str | Annotated[list[Part], Meta(max_length=MAX_PARTS)] | None,
        Meta(
            description=f"text, or a list of at most {MAX_PARTS} parts; only parts of type "
            '"text" are supported'
        ),
    ] = None

    @property
    def text(self) -> str | None:
        """The content, whose parts are joined."""
        content = self.content
        return "".join(part.text for part in content) if isinstance(content, list) else content


Messages = Annotated[list[ChatMessage], of_items(1, MAX_MESSAGES, "messages")]


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`.

    Attributes:
        messages: the conversation.
        max_completion_tokens: how long an answer may be, in tokens; as `max_tokens`.
        logprobs: report the log probability of each token.
        top_logprobs: report those of this many most likely tokens as well.
        tools: functions that the model may call.
        tool_choice: whether tools are called; by default the model chooses, if there are any.
        parallel_tool_calls: an answer may have several calls; by default it may.
        include_reasoning: answers have their reasoning; by default they do.
        reasoning_effort: given to the chat template.
        chat_template: renders the conversation in place of the model's template, if the operator
            allows it.
        chat_template_kwargs: given to the chat template.
        add_generation_prompt: the prompt ends where an answer begins; by default it does.
        continue_final_message: the answer goes on with the last message.
        verbosity: changes nothing.
    """

    messages: Messages
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbosity: Label | None = None


def parse_body(
    kind: type[BodyT], raw: bytes | bytearray
) -> tuple[BodyT, dict[str, msgspec.Raw], int]:
    """Return what `decode_body` does, with fields that go together checked.

    Raises:
        InvalidRequestError: see `decode_body`; or a field lacks or excludes another; names the
            field.
    """
    refused = REFUSED_IN_CHATS if kind is ChatBody else REFUSED_IN_COMPLETIONS
    body, fields, unknown_fields = decode_body(kind, raw, refused)
    _check_together(body)
    return body, fields, unknown_fields


def sampling_of(body: GenerationBody, logprobs: int | None) -> SamplingParams:
    """Return the sampling parameters that a request's body gives."""
    fields = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    return SamplingParams(logprobs=logprobs, **fields)


def _check_together(body: GenerationBody) -> None:
    """Check fields that go with others.

    Raises:
        InvalidRequestError: one lacks the other, or excludes it; names the field.
    """
    problems = {}
    if body.stream_options is not None and not body.stream:
        problems["stream_options"] = "is only allowed when stream is true"
    if body.prompt_logprobs is not None and body.stream:
        problems["prompt_logprobs"] = "cannot be streamed"
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        problems["top_logprobs"] = "is only allowed when logprobs is true"
    if isinstance(body, CompletionBody) and body.max_tokens == 0 and not body.echo:
        problems["max_tokens"] = "must be at least 1, or 0 with echo"
    if isinstance(body, CompletionBody) and body.best_of and body.best_of < (body.n or 1):
        problems["best_of"] = f"must not be less than n, which is {body.n}: leave it out"
    for field, problem in problems.items():
        raise InvalidRequestError(f"{field} {problem}", field)
