"""Prefill and decode engines over fake devices and the KV links between them, stepped by hand.

Endpoints and sockets are real; the clock is the test's. `KvPair` stands in for the services: it
asks for jobs, delivers first tokens, retries at another worker or prefills locally.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.executor import StepHook
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.step_output import StepOutput
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.endpoint.events import (
    JobActivated,
    JobFailed,
    JobReserved,
    KvEvent,
)
from pagewire.shared.transfer.endpoint.receiver_jobs import ReceiverJob
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender import DIVIDED_BYTES
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.tests.support.fake_device import FakeDevice
from pagewire.tests.support.fake_engine import generate, make_sequence
from pagewire.tests.support.kv_sides import Clock, Side, hello_of

_REAL_S = 5.0  # real time limit of any wait


@dataclass(eq=False)
class KvLink:
    """Both halves of a link."""

    prefill: Side
    decode: Side
    sent: SenderLink
    received: ReceiverLink

    @property
    def is_tested(self) -> bool:
        return self.received in self.decode.tested


@dataclass(eq=False)
class Request:
    """A request of a decode worker.

    Attributes:
        expected: the correct tokens of its answer.
        tokens: tokens delivered so far.
        tried: links of its jobs, the latest last.
    """

    decode: Side
    sequence: Sequence
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    job: str = ""
    blocks: ReceiverJob | None = None
    tried: list[KvLink] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    @property
    def positions(self) -> range:
        """Positions of the blocks that are expected."""
        assert self.blocks is not None
        return self.blocks.coverage.blocks


@dataclass(eq=False)
class KvPair:
    """Workers, links and requests.

    Attributes:
        starts_jobs: whether each reservation starts a job of a prefill worker at once.
        reports_losses: whether a link that one half has lost is closed on the other side.
        news: work for the services, which runs at the end of `step`.
    """

    prefills: list[Side]
    decodes: list[Side]
    clock: Clock
    starts_jobs: bool = True
    reports_losses: bool = True
    links: list[KvLink] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    news: deque[Callable[[], object]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        for side in self.sides:
            side.handle = self._on_event

    # One of each

    @property
    def prefill(self) -> Side:
        return self.prefills[0]

    @property
    def decode(self) -> Side:
        return self.decodes[0]

    @property
    def link(self) -> KvLink:
        return self.links[0]

    @property
    def sides(self) -> list[Side]:
        return [*self.prefills, *self.decodes]

    # Links

    def open(self, prefill: Side, decode: Side) -> KvLink:
        """Open a link and wait until it is tested."""
        link = self.connect(prefill, decode)
        self.until(lambda: link.is_tested and not link.sent.credits.in_use)
        return link

    def connect(self, prefill: Side, decode: Side) -> KvLink:
        """Open a link without waiting for its test."""
        received = decode.receiver.offer(prefill.name, 1)
        try:
            sent = prefill.sender.connect(hello_of(decode, received))
        except TransferError:
            decode.receiver.close(received)
            raise
        link = KvLink(prefill, decode, sent, received)
        self.links.append(link)
        return link

    def end(self, link: KvLink) -> None:
        """Close both halves, and move the link's jobs to other workers."""
        if link in self.links:
            self.links.remove(link)
            link.prefill.sender.close(link.sent)
            link.decode.receiver.close(link.received)
            for request in self.requests.values():
                if request.job and request.tried[-1:] == [link]:
                    self.retry(request)

    def kill(self, side: Side) -> None:
        """End a worker; the others are notified if `reports_losses`."""
        for link in [link for link in self.links if side in (link.prefill, link.decode)]:
            if self.reports_losses:
                self.end(link)
        side.close()

    # Requests

    def ask(self, prompt: list[int], decode: Side | None = None, max_tokens: int = 4) -> Request:
        """Add a request whose prompt is to be computed by a prefill worker."""
        decode = decode or self.decode
        name = f"r{len(self.requests)}"
        sequence = make_sequence(name, prompt, remote_prefill=True, max_tokens=max_tokens)
        request = Request(decode, sequence, generate(sequence, 1024))
        decode.core.sequences.add(sequence)
        self.requests[name] = request
        return request

    def abort(self, request: Request) -> None:
        """Abort a request, as when its client disconnects."""
        if not request.is_over:
            request.finish_reason = "abort"
            request.decode.core.sequences.abort(request.sequence.request_id)
            self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request's job on the prefill side."""
        for link in request.tried[-1:] if request.job else ():
            link.prefill.sender.cancel(request.job, link.sent)
            request.job = ""

    def retry(self, request: Request, failed: str | None = None) -> None:
        """Ask for the blocks elsewhere, if this is still the request's job."""
        if failed is not None and request.job != failed:
            return
        self.cancel(request)
        name = request.sequence.request_id
        if request.decode.core.sequences.get(name) is None or request.blocks is None:
            return
        request.blocks = request.decode.receiver.jobs.retry(request.blocks)
        self._begin(request, request.blocks.name)

    def start(self, request: Request, job: str, link: KvLink) -> Sequence:
        """Let a prefill worker compute a request's prompt."""
        request.job = job
        request.tried.append(link)
        prompt, seed = request.sequence.token_ids, request.sequence.spec.seed or 0
        sequence = make_sequence(job, list(prompt), prefill_only=True, seed=seed)
        link.prefill.core.sequences.add(sequence)
        try:
            positions = request.positions
            link.prefill.sender.export(job, link.sent, positions.start, positions.stop)
        except TransferError as exc:
            link.prefill.core.sequences.abort(job)
            link.prefill.failed[job] = str(exc)
            self._on_failed(job)
        return sequence

    def _begin(self, request: Request, job: str) -> None:
        if request.is_over:
            return
        tried = [link.prefill for link in request.tried]
        for link in self.links:
            if link.decode is request.decode and link.prefill not in tried and link.is_tested:
                self.start(request, job, link)
                return
        sequence = request.sequence
        if sequence.status is RequestStatus.RESERVED:
            first_token = next(iter(request.tokens), None)
            request.decode.core.sequences.recompute_locally(sequence, first_token)

    def _on_event(self, event: KvEvent) -> None:
        match event:
            case JobReserved(job):
                self._on_reserved(job)
            case JobActivated(job):
                self.requests[job.request_id].job = ""
            case JobFailed(name):
                self._on_failed(name)

    def _on_reserved(self, job: ReceiverJob) -> None:
        """Ask for a request's blocks."""
        request = self.requests[job.request_id]
        request.blocks = job
        if self.starts_jobs:
            self.news.append(lambda: self._begin(request, job.name))
        else:
            request.job = job.name

    def _on_failed(self, job: str) -> None:
        request = self._find(job)
        if request is not None and self.starts_jobs:
            self.news.append(lambda: self.retry(request, job))

    def _find(self, job: str) -> Request | None:
        return next((r for r in self.requests.values() if r.job == job), None)

    def _on_first_token(self, output: StepOutput) -> None:
        request = self._find(output.request_id)
        if request is None or request.decode.is_dead:
            return
        if output.finish_reason == "error":
            self.retry(request)
            return
        token = output.token_ids[0]
        if not request.tokens:
            request.tokens.append(token)
        assert request.blocks is not None
        request.decode.receiver.complete(request.blocks, token)

    def _on_tokens(self, output: StepOutput) -> None:
        request = self.requests.get(output.request_id)
        if request is not None and request.finish_reason != "abort":
            assert not request.is_over, "an output after the last one"
            request.tokens += output.token_ids
            request.finish_reason = output.finish_reason

    # Time

    def step(self, *sides: Side) -> None:
        """Run each engine's loop once, and then the services."""
        for side in sides or self.sides:
            if side.is_dead:
                continue
            outputs, side.worked = side.core.step(wait=False)
            side.core.scheduler.table.check_integrity()
            for output in outputs:
                if side in self.prefills:
                    self._on_first_token(output)
                else:
                    self._on_tokens(output)
        while self.news:
            self.news.popleft()()
        if self.reports_losses:
            halves = [half for side in self.sides for half, _ in side.lost]
            for link in [link for link in self.links if {link.sent, link.received} & {*halves}]:
                self.end(link)

    def until(self, condition: Callable[[], object], *sides: Side) -> None:
        """Step until a condition holds, or fail; messages take a moment to arrive."""
        until_s = time.monotonic() + _REAL_S
        while not condition():
            self.step(*sides)
            if time.monotonic() > until_s:
                pytest.fail(f"not within {_REAL_S:g} s; held: {self.held()}")
            time.sleep(0.0002)

    def finish(self) -> None:
        """Step until all requests have ended and nothing is held; check their tokens."""
        self.until(lambda: all(r.is_over for r in self.requests.values()) and not self.held())
        for request in self.requests.values():
            if request.finish_reason == "abort":
                assert request.tokens == request.expected[: len(request.tokens)]
            else:
                assert (request.finish_reason, request.tokens) == ("length", request.expected)

    def held(self) -> list[str]:
        """Describe everything that is held anywhere."""
        held = [what for side in self.sides if not side.is_dead for what in side.held()]
        for decode in [decode for decode in self.decodes if not decode.is_dead]:
            lent = decode.slots.count(StagingSlotState.LENT) - decode.slots.num_idle
            idle = sum(len(k.sent.credits.idle) for k in self.links if k.decode is decode)
            if lent != idle:
                held.append(f"{lent} staging slots of {decode.name} lent, {idle} known to senders")
        return held

    def let_go(self) -> None:
        """End all delays and faults of the test."""
        for side in self.sides:
            side.device.has_moved = True
            for transport in side.transports.values():
                transport.holds_writes = transport.holds_payloads = transport.holds_slots = False
                transport.num_corrupt = 0

    def close(self) -> None:
        for side in self.sides:
            side.close()


@contextmanager
def kv_pair(
    kind: str | tuple[str, ...],
    *,
    num_prefills: int = 1,
    num_decodes: int = 1,
    prefill_slots: int = 4,
    decode_slots: int = 4,
    blocks_per_slot: int = 2,
    divided_bytes: int = DIVIDED_BYTES,
    prefill: dict[str, int] | None = None,
    decode: dict[str, int] | None = None,
    windows: tuple[int | None, ...] = (None,),
    linked: bool = True,
    more_hooks: Iterable[Callable[[FakeDevice], StepHook]] = (),
) -> Iterator[KvPair]:
    """Run prefill and decode sides; if `linked`, with a tested link between each two.

    Args:
        kind: transports of all sides, the first one preferred.
        num_prefills: number of prefill sides.
        num_decodes: number of decode sides.
        prefill_slots: staging slots of a prefill side.
        decode_slots: staging slots of a decode side.
        blocks_per_slot: blocks that fit in a staging slot.
        divided_bytes: see `KvSender`.
        prefill: arguments of `make_parts` for prefill sides.
        decode: arguments of `make_parts` for decode sides.
        windows: window of each layer; see `KvLayout`.
        linked: whether links are opened.
        more_hooks: make further hooks of prefill sides.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    clock = Clock()
    ours, theirs = ({"windows": windows, **(each or {})} for each in (prefill, decode))
    prefills = [
        Side(f"p{n}", kinds, prefill_slots, blocks_per_slot, ours, more_hooks=more_hooks)
        for n in range(num_prefills)
    ]
    decodes = [
        Side(f"d{n}", kinds, decode_slots, blocks_per_slot, theirs) for n in range(num_decodes)
    ]
    for sender in prefills:
        sender.open(clock=clock, divided_bytes=divided_bytes)
    for receiver in decodes:
        receiver.open(clock=clock)
    pair = KvPair(prefills, decodes, clock)
    try:
        for side in prefills if linked else ():
            for other in decodes:
                pair.open(side, other)
        yield pair
    finally:
        pair.close()
