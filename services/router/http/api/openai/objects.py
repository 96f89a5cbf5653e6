"""The responses of OpenAI's and vLLM's routes, and their errors, as types.

Responses are encoded from these types, errors by shared/http/refusals.py. The OpenAPI document
(openapi/document.py) is made from them all. `formats.py` fills them in. The default of a field that
may be missing is `UNSET`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pagewire.services.router.http.api.openai.timings import RequestTimings

Finish = Literal["stop", "length"]
ChatFinish = Finish | Literal["tool_calls"]
UnixTime = Annotated[int, Meta(description="seconds since 1970")]


class CachedTokens(msgspec.Struct):
    """How much of a prompt was in the prefix cache."""

    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    """How much of an answer is reasoning."""

    reasoning_tokens: int


class TokenUsage(msgspec.Struct):
    """How many tokens the prompt and the answers of a request have."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class PromptToken(msgspec.Struct):
    """A token at one position of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]
PromptLogprobs = Annotated[
    PromptTokens,
    Meta(description="for each token of the prompt, by token id; null for the first"),
]


class AnswerHead(msgspec.Struct, kw_only=True):
    """The fields of each response with generated answers."""

    id: str
    object: str
    created: UnixTime
    model: str
    service_tier: str | UnsetType = UNSET


class CompletionTokens(msgspec.Struct):
    """Tokens of a completion, in four lists of one length; a prompt's first token has null."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionPart(msgspec.Struct):
    """An answer, or the part of one that a chunk of a stream adds.

    Attributes:
        finish_reason: null if the answer is not complete.
        token_ids: of the answer, with return_token_ids.
        prompt_token_ids: of the prompt, with return_token_ids.
    """

    index: int
    text: str
    logprobs: CompletionTokens | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChunk(AnswerHead, kw_only=True):
    """An event of a stream of completions; "data: [DONE]" is the last.

    Attributes:
        usage: with stream_options; null in all chunks but the last unless it is continuous.
        timings: of the last chunk.
    """

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionPart]
    usage: TokenUsage | UnsetType | None = UNSET
    timings: RequestTimings | UnsetType = UNSET


class Completion(CompletionChunk, kw_only=True):
    """The answers to a request for completions, prompts times n.

    Attributes:
        usage: of all answers.
        timings: if they are asked for.
    """

    usage: TokenUsage


class TopToken(msgspec.Struct):
    """A token that was likely at a position.

    Attributes:
        bytes: of the token, which may be a part of a character.
    """

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TopToken):
    """A token of an answer, and the most likely ones in its place."""

    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct):
    """The log probabilities of a chat answer's tokens."""

    content: list[ChatToken]
    refusal: None = None


class AnswerFunction(msgspec.Struct):
    """The function that an answer calls.

    Attributes:
        arguments: a JSON object as text.
    """

    name: str
    arguments: str


class AnswerCall(msgspec.Struct):
    """A tool call that the model made in an answer."""

    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct):
    """An answer's message.

    Attributes:
        reasoning: what came before the answer, without the markers around it.
        reasoning_content: the same by its older name.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of the answers to a chat request.

    Attributes:
        token_ids: with return_token_ids.
    """

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(AnswerHead, kw_only=True):
    """The n answers to a conversation.

    Attributes:
        prompt_token_ids: with return_token_ids.
    """

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    timings: RequestTimings | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    """The part of a called function that a chunk adds; the name comes once."""

    arguments: str = ""
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct):
    """The part of a call that a chunk adds; id and type come once."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(msgspec.Struct):
    """The part of a message that a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """The part of one answer that a chunk adds."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(AnswerHead, kw_only=True):
    """An event of a chat's stream; "data: [DONE]" is the last.

    Attributes:
        usage: with stream_options; null in all chunks but the last unless it is continuous.
        timings: of the last chunk.
        prompt_token_ids: of the first chunk, with return_token_ids.
    """

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: RequestTimings | UnsetType = UNSET


class Model(msgspec.Struct):
    """A model by one of its names.

    Attributes:
        root: its first name.
        max_model_len: prompt and answer together, in tokens.
    """

    id: str
    created: UnixTime
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "pagewire"
    parent: None = None


class Models(msgspec.Struct):
    """The model, by each of its names.

    Requests with the header `anthropic-version` get the list in Anthropic's form.
    """

    data: list[Model]
    object: Literal["list"] = "list"


class Embedding(msgspec.Struct):
    """The embedding of one input.

    Attributes:
        embedding: numbers, or base64 of little-endian 32-bit ones.
    """

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class InputUsage(msgspec.Struct):
    """How many tokens the inputs of an embeddings request have."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    """The embeddings of all inputs, in their order."""

    data: list[Embedding]
    model: str
    usage: InputUsage
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct):
    """The tokens of a text.

    Attributes:
        token_strs: as the vocabulary writes them, with return_token_strs.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class Detokenized(msgspec.Struct):
    """The body of an answer to `/detokenize`."""

    prompt: str


class Version(msgspec.Struct):
    """The body of an answer to `/version`."""

    version: str


Status = Literal["ok", "starting", "draining", "no decode worker"]


class Readiness(msgspec.Struct):
    """Whether requests can be answered now, which is so if the status is "ok"."""

    status: Status


class Health(msgspec.Struct):
    """The server is alive. Only clients with a valid key, if keys are needed, see the model."""

    status: Status
    model: str | UnsetType = UNSET


class Problem(msgspec.Struct):
    """The message, type, field and code of an error.

    Attributes:
        param: the field at fault, such as "messages[0].content".
        code: the kind of problem, for programs.
        request_id: the request's id in the server's logs.
    """

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str


class Error(msgspec.Struct):
    """The body of each error in OpenAI's API."""

    error: Problem
