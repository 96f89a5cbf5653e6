"""Chooses the workers of a request: gives usable workers, cache hits and loads to the policy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial

from pagewire.services.router.cluster.members import ClusterMembers
from pagewire.services.router.cluster.worker_links import WorkerLink
from pagewire.services.router.placement.forecast import Forecast, Forecasts
from pagewire.services.router.placement.in_flight_load import InFlightLoad
from pagewire.services.router.placement.placed_sessions import PlacedSessions
from pagewire.services.router.placement.policy import Candidate, Placement, Policy, Prompt
from pagewire.shared.base.errors import ChannelError, NoWorkerError
from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.protocol import LoadReport, PrefillSoon
from pagewire.shared.costs.load import NO_LOAD, Load
from pagewire.shared.index.prefix_index import Found, PrefixIndex
from pagewire.shared.kv.block_hash import BlockHash, BlockHasher
from pagewire.shared.request.sampling import RequestSpec

WAKE_INTERVAL_S = 0.05  # a worker that was woken polls for a tenth of this time
_MAX_HASHERS = 16


class WorkerSelector:
    """Chooses the workers of a request.

    Args:
        cluster_secret: block hashes are keyed by it.
        members: have all workers' records, and the links; those to prefill workers are used for
            embeddings, to wake them, and for requests that these decode.
    """

    def __init__(
        self,
        cluster_secret: str,
        members: ClusterMembers,
        index: PrefixIndex,
        policy: Policy,
        in_flight: InFlightLoad,
    ) -> None:
        self._directory, self._index = members.directory, index
        self._served = members.served
        self._links, self._prefill_links = members.decode_links, members.prefill_links
        self._policy, self._in_flight = policy, in_flight
        self._hasher = lru_cache(_MAX_HASHERS)(partial(BlockHasher, cluster_secret))
        self._forecasts, self._sessions = Forecasts(), PlacedSessions()
        self._next_wake_s = 0.0

    def decode_records(self) -> list[WorkerRecord]:
        """Return the records of the decode workers that get requests; all have one model."""
        return self._served.decodes()

    def max_model_len(self, model_len: int) -> int:
        """Return the longest sequence that every decode worker takes."""
        return min([model_len, *(record.max_model_len for record in self.decode_records())])

    def why_no_longer(self, model_len: int) -> str:
        """Return why no sequence may be longer if a KV pool is the reason; empty if it is not."""
        records = self.decode_records()
        shortest = min(records, key=lambda record: record.max_model_len, default=None)
        if shortest is None or shortest.max_model_len >= min(model_len, shortest.full_model_len):
            return ""
        return (
            f"More does not fit into the KV pool of {shortest.worker_id}; the model's context is "
            f"{shortest.full_model_len} tokens: its operator can raise --num-blocks or "
            "--gpu-memory-utilization."
        )

    def embedding_workers(
        self, num_tokens: int, excluded: AbstractSet[str]
    ) -> list[tuple[WorkerLink, Load]]:
        """Return the workers that may compute an embedding, the least loaded first.

        These are prefill workers, or decode workers where there is no such worker.

        Args:
            num_tokens: of the prompt.
            excluded: ids of workers to leave out.

        Returns:
            Links, each with the amount that the prompt adds to its worker's load.
        """
        decodes, prefills = (
            [record for record in records if record.worker_id not in excluded]
            for records in (self._served.decodes(), self._served.prefills())
        )
        if prefills or not decodes:
            wanted = Load(tokens=num_tokens)
            ordered = sorted(prefills, key=lambda record: self._load(record).tokens)
        else:
            wanted = Load(blocks=-(-num_tokens // decodes[0].model_identity.block_size))
            ordered = sorted(decodes, key=lambda record: self._load(record).blocks)
        links = [self.link_of(record.worker_id) for record in ordered]
        return [(link, wanted) for link in links if link is not None]

    def link_of(self, worker_id: str) -> WorkerLink | None:
        """Return the connection to a worker of either role; None if there is none."""
        return self._links.get(worker_id) or self._prefill_links.get(worker_id)

    def _load(self, record: WorkerRecord) -> Load:
        """Return a worker's load: what it last reported, and what was placed since."""
        on_record = LoadReport(record.epoch, record.load.iterations, record.load.total)
        return self._in_flight.load(record.worker_id, on_record, self._directory.redis_ok)

    async def place(
        self,
        token_ids: Sequence[int],
        excluded: AbstractSet[str],
        spec: RequestSpec,
        session: int | None = None,
    ) -> tuple[Placement, Prompt]:
        """Choose workers for a sequence whose tokens so far are to be computed.

        Args:
            token_ids: at least one.
            excluded: decode workers that must not be used.
            spec: parameters of the request.
            session: number of the conversation that it continues; None: it has no name.

        Raises:
            NoWorkerError: no decode worker is left.
        """
        decodes = [record for record in self.decode_records() if record.worker_id not in excluded]
        if not decodes:
            raise NoWorkerError("no decode worker is alive that takes requests")
        identity = decodes[0].model_identity
        prefills = [
            record
            for record in self._directory.workers("prefill")
            if record.state == "ready" and record.model_identity == identity
        ]
        hashes: Sequence[BlockHash] | None = None
        cached = Found({}, {})
        if self._policy.needs_hits(len(decodes), len(prefills)):
            hashes = self._hasher(identity).hash_prompt(token_ids, spec.hash_extra)
            epochs = {record.worker_id: record.epoch for record in (*decodes, *prefills)}
            cached = await self._index.lookup(hashes, epochs, decodes[0].resume_blocks)
        prompt = Prompt(
            len(token_ids),
            identity.block_size,
            cached.hits,
            hashes,
            spec.use_prefill_worker,
            session,
            has_home=session in self._sessions,
        )
        count, longest = len(decodes), min(worker.max_model_len for worker in decodes)
        candidates = self._candidates([*decodes, *prefills], excluded, cached, longest)
        return self._policy.place(prompt, candidates[:count], candidates[count:]), prompt

    def _candidates(
        self,
        records: list[WorkerRecord],
        excluded: AbstractSet[str],
        cached: Found,
        longest: int,
    ) -> list[Candidate]:
        """Return what the policy knows of each worker.

        Args:
            records: of workers of one model.
            excluded: workers that must not decode.
            cached: what the index has of the prompt.
            longest: prompt plus answer that a worker must have room for to decode.
        """
        forecasts: dict[str, Forecast] = {}
        if self._policy.uses_forecasts:
            forecasts = self._forecasts.of(records)

        def candidate(record: WorkerRecord) -> Candidate:
            worker_id = record.worker_id
            load = self._load(record).plus(cached.reserved.get(worker_id, NO_LOAD))
            may_decode = (
                worker_id not in excluded
                and self.link_of(worker_id) is not None
                and record.max_model_len >= longest
            )
            pace = self._in_flight.pace(worker_id)
            return Candidate(worker_id, load, forecasts.get(worker_id), may_decode, pace)

        return [candidate(each) for each in records]

    def record_sent(self, prompt: Prompt, worker_ids: Collection[str]) -> None:
        """Publish, for this and other routers, which workers compute a prompt, and their load.

        So a burst of equal prefixes goes to the worker that computes the first of them.
        """
        self._sessions.add(prompt.session)
        if prompt.hashes is None:  # there was no choice
            return
        records = [self._directory.get(worker_id) for worker_id in worker_ids]
        epochs = {record.worker_id: record.epoch for record in records if record is not None}
        self._index.add_optimistic(prompt.hashes, epochs, self._in_flight.take_changes())

    def wake_idle(self) -> None:
        """Wake the idle prefill workers, since a request is arriving: one of them may compute it.

        An idle worker takes 0.8 ms longer to begin a prompt than one that busy-polls.
        """
        if time.monotonic() < self._next_wake_s:
            return
        self._next_wake_s = time.monotonic() + WAKE_INTERVAL_S
        for record in self._served.prefills():
            link = self._prefill_links.get(record.worker_id)
            if link is not None and not self._load(record).tokens:
                with contextlib.suppress(ChannelError):  # a lost connection is handled by the links
                    link.post(PrefillSoon())
