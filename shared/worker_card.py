"""What a worker tells of itself, to routers and to other workers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pagewire.shared.errors import VersionMismatchError
from pagewire.shared.protocol import PROTOCOL_VERSION, BlockLayout, Count, Epoch, Id, Role

_Endpoint = Annotated[str, Meta(max_length=512)]
_Name = Annotated[str, Meta(max_length=64)]


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How busy a worker is.

    Attributes:
        running, waiting: requests in the engine.
        queued_prefill_tokens: prompt tokens that are still to be computed.
        free_blocks, cached_blocks, used_blocks, total_blocks: of the KV pool.
        steps: of the engine so far: stands still if the engine does.
        max_num_seqs: how many requests can run at once.
    """

    running: Count = 0
    waiting: Count = 0
    queued_prefill_tokens: Count = 0
    free_blocks: Count = 0
    cached_blocks: Count = 0
    used_blocks: Count = 0
    total_blocks: Count = 0
    steps: Epoch = 0
    max_num_seqs: Count = 0


class LinkInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's KV way to a peer: transport, lane and measured GB/s."""

    peer: Id
    transport: _Name
    lane: Annotated[str, Meta(max_length=256)] = ""
    gbps: Annotated[float, Meta(ge=0)] = 0.0


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker tells of itself.

    Attributes:
        epoch: of this run of the worker; a later run under the same id has a greater one.
        endpoint: of the control server.
        metrics_endpoint: base URL of `/metrics` and `/health`.
        model: the name it is served under.
        max_model_len: longest prompt plus answer that it takes.
        full_model_len: what that would be if its KV pool were large enough.
        state: a draining worker takes nothing new.
        kv_transports: in its order of preference.
        protocol: version of the control messages that it speaks.
    """

    worker_id: Id
    role: Role
    epoch: Epoch
    endpoint: _Endpoint
    metrics_endpoint: _Endpoint
    model: Annotated[str, Meta(max_length=256)]
    layout: BlockLayout
    max_model_len: Count
    full_model_len: Count = 0
    state: Literal["ready", "draining"] = "ready"
    kv_transports: Annotated[list[Id], Meta(max_length=8)] = []
    load: WorkerLoad = WorkerLoad()
    links: Annotated[list[LinkInfo], Meta(max_length=256)] = []
    protocol: Count = 0  # of cards that are older than this field

    def check_protocol(self) -> None:
        """Check, before a connection that could only stay silent, that both speak the same.

        Raises:
            VersionMismatchError: they do not.
        """
        if self.protocol != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"{self.worker_id} speaks protocol version {self.protocol}, this side "
                f"{PROTOCOL_VERSION}: run the same release of Pagewire everywhere"
            )
