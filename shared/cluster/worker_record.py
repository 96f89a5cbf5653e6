"""The record that a worker publishes about itself, for routers and for other workers.

A record of this protocol version may have fields that this release does not know. If a record has
another version, only `RecordHead` is read: a later release may change everything else.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import UNDECODABLE, ProtocolError
from pagewire.shared.control.protocol import PROTOCOL_VERSION, Count, Epoch, Id, Role
from pagewire.shared.costs.load import Load
from pagewire.shared.costs.step_prices import StepPrices
from pagewire.shared.kv.model_identity import ModelIdentity

MAX_RECORD_BYTES = 1 << 20
MAX_LINKS = 1024  # in a record
# How long the KV links of ready workers are waited for: a decode worker without one computes
# prompts itself.
LINK_WAIT_S = 15.0

_Endpoint = Annotated[str, Meta(max_length=512)]
_Name = Annotated[str, Meta(max_length=64)]
_T = TypeVar("_T")


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a worker is.

    Attributes:
        running, waiting: requests in the engine.
        rows: answers that it decodes, or will when their prompts are computed or have arrived.
        room: prompt tokens that a step has room for; 0: unknown.
        queued_prefill_tokens: prompt tokens that are still to be computed.
        queued_prefill_s: predicted seconds of those that this worker computes; None: unknown.
        free_blocks, cached_blocks, used_blocks, total_blocks: blocks of the KV pool.
        iterations: of the engine so far; the number does not change if the engine hangs.
        max_num_seqs: how many requests can run at once.
    """

    running: Count = 0
    waiting: Count = 0
    rows: Count = 0
    room: Count = 0
    queued_prefill_tokens: Count = 0
    queued_prefill_s: Annotated[float, Meta(ge=0)] | None = None
    free_blocks: Count = 0
    cached_blocks: Count = 0
    used_blocks: Count = 0
    total_blocks: Count = 0
    iterations: Epoch = 0
    max_num_seqs: Count = 0

    @property
    def total(self) -> Load:
        """The load as placement adds it up."""
        return Load(
            self.used_blocks,
            self.queued_prefill_tokens,
            self.queued_prefill_s or 0.0,
            self.rows,
            self.room,
        )


class LinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A KV link over which a worker sends to a peer: transport and measured GB/s.

    Attributes:
        gbps: GB/s of the link's test, then of what it carries; 0: unknown.
        latency_s: seconds that the first of some blocks takes in addition.
        bytes: sent by this transport in this run of the worker.
    """

    peer: Id
    transport: _Name
    gbps: Annotated[float, Meta(ge=0)] = 0.0
    latency_s: Annotated[float, Meta(ge=0)] = 0.0
    bytes: Epoch = 0

    def transfer_s(self, num_bytes: int) -> float | None:
        """Return the seconds in which some bytes of KV cross the link; None if that is unknown."""
        return self.latency_s + num_bytes / (1e9 * self.gbps) if self.gbps else None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker publishes about itself.

    Attributes:
        role: what the worker prefers to do. It also does the rest, if it is asked to.
        epoch: number of this run of the worker; a later run under the same id has a greater one.
        endpoint: address of the control server.
        metrics_endpoint: base URL of `/metrics` and `/health`.
        model: the model's name for clients.
        model_identity: workers with the same one continue each other's requests.
        config_digest: of the model's config.json, see `config_digest`; empty: unknown.
        resume_blocks: see `KvLayout`.
        ranks: number of processes that compute the model together.
        max_model_len: longest prompt plus answer that the worker accepts.
        full_model_len: what `max_model_len` would be if the KV pool were large enough.
        state: a draining worker accepts no new requests.
        kv_transports: in its order of preference.
        links: those over which it sends; the peer's record has those of the other direction.
        block_bytes: KV of as many tokens as a block has, in all cache groups; 0: unknown.
        prices: of the worker's steps; None: unknown.
        protocol: version of its control messages, see `RecordHead`.
    """

    worker_id: Id
    role: Role
    epoch: Epoch
    endpoint: _Endpoint
    metrics_endpoint: _Endpoint
    model: Annotated[str, Meta(max_length=256)]
    model_identity: ModelIdentity
    config_digest: _Name = ""
    resume_blocks: Count = 0
    ranks: Count = 1
    max_model_len: Count
    full_model_len: Count = 0
    state: Literal["ready", "draining"] = "ready"
    kv_transports: Annotated[list[Id], Meta(max_length=8)] = []
    load: WorkerLoad = WorkerLoad()
    links: Annotated[list[LinkInfo], Meta(max_length=MAX_LINKS)] = []
    block_bytes: Count = 0
    prices: StepPrices | None = None
    protocol: Count = 0


class RecordHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a worker record that keep their names in every release.

    Attributes:
        protocol: a number in all releases so far; 0 if the record is older than the field.
        epoch, role, metrics_endpoint: so far as in `WorkerRecord` in every release; a later one may
            change them.
    """

    worker_id: Annotated[str, Meta(min_length=1, max_length=512)]
    protocol: int | Annotated[str, Meta(max_length=64)] = 0
    epoch: msgspec.Raw = msgspec.Raw()
    role: msgspec.Raw = msgspec.Raw()
    metrics_endpoint: msgspec.Raw = msgspec.Raw()

    @property
    def known_epoch(self) -> int | None:
        """The epoch, if it is one that this release could have written."""
        return _decode_known(self.epoch, _epoch_decoder)

    @property
    def known_role(self) -> str | None:
        """The role's name, if it has one."""
        return _decode_known(self.role, _name_decoder)

    @property
    def known_metrics_endpoint(self) -> str | None:
        """The URL of its metrics, if the record has a text there."""
        return _decode_known(self.metrics_endpoint, _endpoint_decoder)


class OtherVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a live worker of another release."""

    worker_id: str
    protocol: int | str
    epoch: int | None
    role: str | None
    metrics_endpoint: str | None


_head_decoder = msgspec.msgpack.Decoder(RecordHead)
_record_decoder = msgspec.msgpack.Decoder(WorkerRecord)
_epoch_decoder: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(Epoch)
_name_decoder: msgspec.msgpack.Decoder[str] = msgspec.msgpack.Decoder(_Name)
_endpoint_decoder: msgspec.msgpack.Decoder[str] = msgspec.msgpack.Decoder(_Endpoint)


def decode_head(raw: bytes) -> RecordHead:
    """Return the fields that a record has in every release.

    Raises:
        ProtocolError: the bytes are not a worker record of any release.
    """
    return _decode(raw, _head_decoder)


def decode_record(raw: bytes, worker_id: str) -> WorkerRecord | OtherVersion:
    """Return a worker's record. The protocol version is checked first.

    Raises:
        ProtocolError: the bytes are not a worker record, or that of another worker.
    """
    head = decode_head(raw)
    if head.worker_id != worker_id:
        raise ProtocolError(f"the record names {head.worker_id[:64]!r}")
    if head.protocol != PROTOCOL_VERSION:
        return OtherVersion(
            worker_id=head.worker_id,
            protocol=head.protocol,
            epoch=head.known_epoch,
            role=head.known_role,
            metrics_endpoint=head.known_metrics_endpoint,
        )
    return _decode(raw, _record_decoder)


def _decode(raw: bytes, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    try:
        return decoder.decode(raw)
    except UNDECODABLE as exc:
        raise ProtocolError(str(exc)) from exc


def _decode_known(raw: msgspec.Raw, decoder: msgspec.msgpack.Decoder[_T]) -> _T | None:
    try:
        return decoder.decode(raw)
    except UNDECODABLE:  # missing, or something that this release does not know
        return None
