"""Every control message between the services: tagged msgspec structs in versioned frames.

    router --Generate, Cancel--> decode --TokenBatch, Refused--> router
    router --Embed, Cancel--> prefill, or decode --TokenBatch, Refused--> router
    decode --KvHello--> prefill --KvRefusal--> decode
    prefill --Blamed, EngineLost--> decode --Blamed, EngineLost--> router
    any client --Ping--> server --Pong--> client

Each worker handles all of these: "prefill" and "decode" are what it does here, and prefers to do.

A frame is one byte of protocol version and a msgpack map with the message's tag. The first byte is
the version in every release; a server answers a client of another version with a `Pong` of its own,
so that both report the mismatch. Decoding is strict: unknown tags, wrong types and oversized fields
are `ProtocolError`s. A request id names a request between a router and a worker. Decode and prefill
workers exchange messages about prompts over their KV link (shared/transfer/job_messages.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import UNDECODABLE, ProtocolError, VersionMismatchError
from pagewire.shared.costs.load import Load
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.request.logprobs import Logprobs, PromptLogprobs
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.request.sampling_types import LogId, OwnerName

FinishReason = Literal["stop", "length", "abort", "error"]
PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 << 20
FORGOTTEN_EPOCH = 0  # workers' epochs begin above it

Id = Annotated[str, Meta(min_length=1, max_length=64)]
MAX_TEXT_CHARS = 2048
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Count = Annotated[int, Meta(ge=0, lt=2**40)]
MAX_FORKS = 127  # further answers that one `Generate` asks for
# A request is suspected of making workers hang or die; so strongly suspected, it is to blame.
MAX_STRIKES = 2
# When a worker is lost, its peers lack the newest few tokens. So a request that makes each worker
# crash at the same token does so within this many tokens of the next worker. With more, it is not
# suspected any more.
CLEARING_TOKENS = 8
Strikes = Annotated[int, Meta(ge=0, le=MAX_STRIKES)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1 << 21)]
MAX_EPOCH = 2**63 - 1
Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Role = Literal["prefill", "decode"]  # what a worker prefers to do; each can do both
PoolingMode = Literal["last", "mean", "cls"]  # how a prompt's hidden states become one vector
MAX_EMBEDDING_BYTES = 1 << 22
RefusalReason = Literal["overloaded", "invalid", "draining"]
# W3C's `traceparent`: version, trace id, parent span's id, flags.
Trace = Annotated[str, Meta(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the messages that routers and workers send each other."""


class Ping(Message, frozen=True, kw_only=True):
    """A client is alive. Servers answer `Pong` and forget clients that stay silent."""


class Pong(Message, frozen=True, kw_only=True):
    """The server's loop is alive; `epoch` shows a client that its server was restarted.

    `FORGOTTEN_EPOCH` means that the server does not know the client (any more).
    """

    worker_id: Id
    epoch: Epoch


class Fork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further answer to the same prompt: a request with a seed of its own."""

    request_id: Id
    seed: Int64


class Generate(Message, frozen=True, kw_only=True):
    """Answer one request, or several that differ only in their seeds.

    Attributes:
        prompt_token_ids: the prompt, at least one token.
        output_token_ids: tokens that a lost worker has already delivered; generation continues
            after them, and they count towards `spec.max_tokens`.
        spec: always has a seed: the router chooses one if the client gave none.
        prefill_workers: ids in order of preference; empty means prefill locally.
        local_tokens: the decode worker computes the prompt itself if it lacks at most this many
            tokens of it; None: as its settings say, or the router knows no prefill worker.
        forks: the other requests. The prompt is computed once, and they fork from there. Outputs,
            refusals and cancels name each of them; none depends on another.
        timed: send the timings as soon as they are known, not only with the last token. The worker
            never sends the last token of an answer that the router ends at a stop string.
        trace: the router's span, which is the parent of this worker's.
        strikes: how strongly the request is suspected of making workers hang or die.
    """

    request_id: Id
    prompt_token_ids: TokenIds
    spec: RequestSpec
    output_token_ids: TokenIds = []
    prefill_workers: Annotated[list[Id], Meta(max_length=16)] = []
    local_tokens: Count | None = None
    forks: Annotated[list[Fork], Meta(max_length=MAX_FORKS)] = []
    timed: bool = False
    trace: Trace | None = None
    strikes: Strikes = 0

    def each(self) -> list[Generate]:
        """Return a message without forks for each of the requests, this one first."""
        if not self.forks:
            return [self]
        alone = msgspec.structs.replace(self, forks=[])
        others = [
            msgspec.structs.replace(
                alone,
                request_id=fork.request_id,
                spec=msgspec.structs.replace(self.spec, seed=fork.seed),
            )
            for fork in self.forks
        ]
        return [alone, *others]


class Cancel(Message, frozen=True, kw_only=True):
    """Stop a request and free its resources; no answer is sent."""

    request_id: Id


class PrefillSoon(Message, frozen=True):
    """A request is arriving at the router: the prefill worker busy-polls, as it may get a job."""


class Embed(Message, frozen=True, kw_only=True):
    """Compute a prompt's embedding. The answer is one `TokenOutput` that has it.

    Attributes:
        token_ids: the prompt, at least one token.
        pooling: how the tokens' hidden states become one vector.
        normalize: whether to scale it to the length 1.
        dimensions: how many of its first numbers to return; None: all.
        log_id: names the client's request in logs.
        strikes: how strongly the request is suspected of making workers hang or die.
        owner: see `RequestSpec.owner`.
    """

    request_id: Id
    token_ids: TokenIds
    pooling: PoolingMode
    normalize: bool = True
    dimensions: Annotated[int, Meta(ge=1, le=MAX_EMBEDDING_BYTES // 4)] | None = None
    log_id: LogId | None = None
    strikes: Strikes = 0
    owner: OwnerName | None = None


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request's time went at its workers; sent with its last token.

    These are durations, each measured by one host: clocks of different hosts are never compared.

    Attributes:
        wait_s: in the decode worker's queue, if another worker computes the prompt.
        queue_s: in the queue of the worker that computes the prompt: all the time until the first
            token, except for `wait_s` and the computation.
        prefill_s: computation of the prompt, until the first token.
        transfer_s: from the first token to the arrival of the last KV block.
        chunks: number of steps that computed the prompt.
        prefill_worker: the worker that computed the prompt; None if the decode worker did.
        cached_tokens: prompt tokens found in that worker's cache.
        held_tokens: prompt tokens found in the decode worker's cache, if another worker computes
            the rest; their KV is not sent.
        arriving_s: from the arrival of the first KV segment to that of the last block. This
            overlaps the prefill.
        kv_bytes: bytes of these segments.
        segments: number of these segments.
        transport: the means by which they were sent, such as "ipc".
    """

    wait_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    chunks: Count = 0
    prefill_worker: Id | None = None
    cached_tokens: Count = 0
    held_tokens: Count = 0
    arriving_s: float = 0.0
    kv_bytes: Count = 0
    segments: Count = 0
    transport: Id | None = None


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """A worker's load at one moment, newer than in its record in Redis.

    Attributes:
        epoch: number of this run of the worker.
        iterations: of its engine so far; of two reports of one run, the one with more is newer.
        age_s: what came to the worker this long before it sent the report, or later, may be
            missing: the engine takes new requests between two steps.
    """

    epoch: Epoch
    iterations: Epoch
    load: Load
    age_s: Annotated[float, Meta(ge=0)] = 0.0


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One step's output for one request.

    Attributes:
        cached_tokens: prompt tokens that were cached; only in the first output.
        prefill_worker: the prefill worker that sampled the first token, in the output with that
            token; None if this worker sampled it.
        prefill_load: load of that prefill worker when it had sampled the token.
        error: why the request failed, if `finish_reason` is "error".
        param: the request's field that caused the error, if it is the client's fault.
        is_busy: the worker had no time for the request, and another attempt may succeed.
        embedding: the prompt's embedding, little-endian float32; in the one output of an `Embed`.
        logprobs: log probabilities of the tokens, if the request asks for them.
        prompt_logprobs: those of at most `MAX_POSITIONS` prompt tokens, before the first output
            with tokens. A worker that computes the prompt again sends them again.
    """

    request_id: Id
    token_ids: TokenIds = []
    finish_reason: FinishReason | None = None
    cached_tokens: Count | None = None
    prefill_worker: Id | None = None
    prefill_load: LoadReport | None = None
    error: Text | None = None
    timings: Timings | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    param: Text | None = None
    embedding: Annotated[bytes, Meta(max_length=MAX_EMBEDDING_BYTES)] | None = None
    is_busy: bool = False


class TokenBatch(Message, frozen=True, kw_only=True):
    """One step's tokens of all sequences that belong to one router.

    Attributes:
        load: the decode worker's load after the step.
    """

    outputs: Annotated[list[TokenOutput], Meta(max_length=1 << 16)]
    load: LoadReport | None = None


class Refused(Message, frozen=True, kw_only=True):
    """The worker refused a request, and keeps nothing of it."""

    request_id: Id
    reason: RefusalReason
    message: Text
    param: Text | None = None


class Blamed(Message, frozen=True, kw_only=True):
    """Requests, or prefill jobs, may be why a worker hung or died.

    Attributes:
        strikes: how much more strongly each of them is suspected now.
        error: what happened.
    """

    request_ids: Annotated[list[Id], Meta(max_length=1 << 16)]
    strikes: Strikes
    error: Text


class EngineLost(Message, frozen=True, kw_only=True):
    """The sender ends, because its engine hangs or has died; `Blamed` named those at fault before.

    Its other requests are not at fault.
    """

    error: Text


class KvHello(Message, frozen=True, kw_only=True):
    """A decode worker opens a KV link to a prefill worker.

    It is refused if the model's identity or the layout of the blocks is not the prefill worker's.

    Attributes:
        link: the decode worker's number of the link.
        token: identifies the link on the decode worker's KV socket; 16 random bytes.
        endpoint: address of that socket.
        transports: name -> what the sender's half of the transport needs, in order of preference.
        slot_bytes: size of the decode worker's staging slots, the upper bound of a segment.
    """

    worker_id: Id
    epoch: Epoch
    model_identity: ModelIdentity
    layout: KvLayout
    link: Count
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    endpoint: Text
    transports: Annotated[dict[Id, Annotated[bytes, Meta(max_length=1 << 16)]], Meta(max_length=8)]
    slot_bytes: Count


class KvRefusal(Message, frozen=True, kw_only=True):
    """The prefill worker does not open a link, or has ended it.

    Attributes:
        error: why the link was refused, or has ended.
    """

    link: Count
    error: Text


ControlMessage = (
    Ping
    | Pong
    | Generate
    | PrefillSoon
    | Embed
    | Cancel
    | TokenBatch
    | Refused
    | Blamed
    | EngineLost
    | KvHello
    | KvRefusal
)

_encoder = msgspec.msgpack.Encoder()
_control_decoder = msgspec.msgpack.Decoder(ControlMessage)
_VERSION_BYTE = bytes([PROTOCOL_VERSION])


def clip_text(text: str) -> str:
    """Return a text, e.g. of an exception, cut and cleaned so that it fits a `Text` field."""
    return text[:MAX_TEXT_CHARS].encode(errors="replace").decode()


def encode(message: ControlMessage) -> bytes:
    """Return the frame of a message.

    Raises:
        ProtocolError: the frame would be larger than any peer accepts, or holds text that is not
            Unicode (see `clip_text`).
    """
    try:
        frame = _VERSION_BYTE + _encoder.encode(message)
    except UnicodeEncodeError as exc:
        raise ProtocolError(f"a {type(message).__name__} with text that is not Unicode") from exc
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}"
        )
    return frame


def decode(frame: bytes | memoryview) -> ControlMessage:
    """Return the message of a frame.

    Raises:
        VersionMismatchError: the peer speaks another version.
        ProtocolError: the frame is too large, or is not a known message.
    """
    if not 1 < len(frame) <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is not between 2 and {MAX_FRAME_BYTES}")
    if frame[0] != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"the peer speaks protocol version {frame[0]}, this side {PROTOCOL_VERSION}: "
            "run the same release of Pagewire everywhere"
        )
    try:
        message: ControlMessage = _control_decoder.decode(memoryview(frame)[1:])
    except UNDECODABLE as exc:
        raise ProtocolError(f"not a control message: {exc}") from exc
    return message
