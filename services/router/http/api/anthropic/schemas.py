"""The bodies of Anthropic's Messages API, as strict as those of OpenAI's (openai/schemas.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagewire.services.router.http.api.openai import schemas
from pagewire.shared.base.field_rules import of_chars, of_items
from pagewire.shared.request.sampling_types import CacheSalt, GapObjective, Temperature, TopP
from pagewire.shared.text.chat_messages import Name
from pagewire.shared.tool_calls.definitions import MAX_TOOLS, FunctionName

MAX_USER_CHARS = 256
MAX_EDITS = 16

TopK = Annotated[
    int, Meta(ge=0, lt=2**31, description="0 (all tokens) or a positive integer below 2**31")
]
_Unsupported = Annotated[None, Meta(description="null: it is not supported")]


class CacheControl(msgspec.Struct, frozen=True):
    """How long the cached blocks of the conversation are kept: the longest time in it counts."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A block of text in a message."""

    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The reasoning before an earlier answer. Its signature is not checked."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only Anthropic can read; the model does not get it."""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call in an earlier answer."""

    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """An image in a message; the request is refused."""


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    """A document in a message; the request is refused."""


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock,
    Meta(description='a block like {"type": "text", "text": "..."}; others are not supported'),
]


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a tool call.

    Attributes:
        is_error: the text says so to the model; this field changes nothing.
    """

    tool_use_id: Name
    content: str | Annotated[list[ResultBlock], Meta(max_length=schemas.MAX_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock,
    Meta(
        description='a block whose type is "text" (with text), "thinking" (with thinking), '
        '"tool_use" (with id, name and input) or "tool_result" (with tool_use_id and content: text '
        "or blocks of text), and whose cache_control is left out, or of the type "
        '"ephemeral" with a ttl of "5m" or "1h"'
    ),
]
_Blocks = Annotated[
    list[Block],
    Meta(
        max_length=schemas.MAX_PARTS,
        description=f"text or a list of at most {schemas.MAX_PARTS} blocks",
    ),
]


class SystemBlock(msgspec.Struct, frozen=True):
    """Text that comes before the conversation."""

    type: Annotated[Literal["text"], Meta(description='"text"')]
    text: str
    cache_control: CacheControl | None = None


class Message(msgspec.Struct, frozen=True):
    """A message of a conversation, by the user, the assistant or the system."""

    role: Literal["user", "assistant", "system"]
    content: str | _Blocks


class MessageTool(msgspec.Struct, frozen=True):
    """A tool.

    Attributes:
        input_schema: a JSON schema of an object.
        type: of a tool that the client runs; the tools that Anthropic runs have others.
    """

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Annotated[
        Literal["custom"] | None,
        Meta(description='"custom", or left out: Anthropic\'s own tools are not supported'),
    ] = None
    cache_control: CacheControl | None = None


class AutoChoice(msgspec.Struct, frozen=True, tag_field="type", tag="auto"):
    """`tool_choice` that leaves it to the model whether to call a tool."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, frozen=True, tag_field="type", tag="any"):
    """`tool_choice` that has the model call at least one tool."""

    disable_parallel_tool_use: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, tag_field="type", tag="tool"):
    """`tool_choice` that has the model call a named tool, once."""

    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class NoneChoice(msgspec.Struct, frozen=True, tag_field="type", tag="none"):
    """`tool_choice` that keeps the model from calling tools."""


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model reasons before it answers.

    Attributes:
        budget_tokens: checked, but does not limit the reasoning; `max_tokens` limits the answer.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: schemas.AtLeastOne | None = None


class MessageForm(msgspec.Struct, frozen=True):
    """The form that an answer must have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """How an answer is given.

    Attributes:
        effort: given to the chat template, as `reasoning_effort`.
        format: of the answer.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageForm | None = None


class MessageMetadata(msgspec.Struct, frozen=True):
    """Changes no answer.

    Attributes:
        user_id: as OpenAI's prompt_cache_key.
    """

    user_id: Annotated[str, of_chars(0, MAX_USER_CHARS)] | None = None


class ContextEdit(msgspec.Struct, frozen=True):
    """An edit that clears parts of a long conversation, where the server holds its tokens.

    Nothing is: a prompt has all that its request has.
    """

    type: Annotated[
        str,
        Meta(
            pattern=r"\Aclear_",
            description='a string that begins with "clear_"; others are not supported',
        ),
    ]


class ContextManagement(msgspec.Struct, frozen=True):
    """The edits of a long conversation that a client asks for."""

    edits: Annotated[list[ContextEdit], Meta(max_length=MAX_EDITS)] | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`.

    Attributes:
        thread: not supported: the server keeps no conversations.
        model: one of the names that `/v1/models` lists.
        messages: the conversation; if the last is the assistant's, the answer continues it.
        system: text before the conversation.
        output_format: an earlier name of `output_config.format`.
        cache_control: as in a block.
    """

    model: str
    messages: Annotated[list[Message], of_items(1, schemas.MAX_MESSAGES, "messages")]
    system: str | Annotated[list[SystemBlock], Meta(max_length=schemas.MAX_PARTS)] | None = None
    tools: Annotated[list[MessageTool], of_items(0, MAX_TOOLS, "tools")] | None = None
    tool_choice: Annotated[
        AutoChoice | AnyChoice | ToolChoice | NoneChoice | None,
        Meta(description='an object whose type is "auto", "any", "tool" (with name) or "none"'),
    ] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: MessageForm | None = None
    container: _Unsupported = None
    context_management: ContextManagement | None = None
    mcp_servers: (
        Annotated[list[Any], Meta(max_length=0, description="an empty list: it is not supported")]
        | None
    ) = None
    thread: dict[str, Any] | None = None
    compaction: _Unsupported = None
    cache_control: CacheControl | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """Body of `POST /v1/messages`.

    Attributes:
        max_tokens: how long the answer may be, in tokens.
        stop_sequences: end the answer before any of these.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 keeps all.
        stream: send the answer as server-sent events while it is made.
        cache_salt: cached blocks are shared only with requests of the same salt.
        slo_gap_s: largest time between two tokens that the worker tries to keep, in seconds.
        metadata: changes no answer, nor does service_tier.
        session_id: names a conversation that goes on: it stays on its worker while load allows, and
            its cached blocks are kept for a while.
        timings: the response says where the time went.
        use_prefill_worker: a prefill worker computes the prompt, even where that takes longer.
    """

    max_tokens: schemas.AtLeastOne
    stop_sequences: schemas.StopStrings | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    cache_salt: CacheSalt | None = None
    slo_gap_s: GapObjective | None = None
    metadata: MessageMetadata | None = None
    session_id: schemas.Label | None = None
    service_tier: str | None = None
    timings: bool | None = None
    use_prefill_worker: bool | None = None
