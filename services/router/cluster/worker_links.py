"""Keeps a router's control connections to the workers of a role, one for each worker's run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

import msgspec

from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import ChannelError
from pagewire.shared.base.logs import Complaints
from pagewire.shared.cluster.crash_reports import FindCrash
from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ClusterKeys, ControlClient, make_client_id
from pagewire.shared.control.protocol import (
    Blamed,
    ControlMessage,
    EngineLost,
    LoadReport,
    Refused,
    Role,
    TokenBatch,
    TokenOutput,
)
from pagewire.shared.request.logprobs import join

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MIN_RETRY_S = 0.1
MAX_RETRY_S = 1.0
MAX_JOIN_S = 0.02

OnLoad = Callable[[str, LoadReport], None]
OnLost = Callable[["WorkerLink", str, bool], None]
MakeClient = Callable[[Callable[[ControlMessage], None], Callable[[str], None]], ControlClient]


class RequestListener(Protocol):
    """Gets the outputs and the end of one request on one link."""

    def on_output(self, output: TokenOutput, now: float) -> None:
        """Handle a step's output, which arrived at `now` on the monotonic clock."""

    def on_refused(self, refused: Refused) -> None:
        """Handle that the worker refused the request."""

    def on_blamed(self, strikes: int, error: str) -> None:
        """Handle that the request may be why a worker hung or died."""

    def on_lost(self, reason: str, is_explained: bool = False) -> None:
        """Handle that the worker is lost; if that is explained, the request is not at fault."""


class WorkerLink:
    """A usable connection to one run of a worker.

    Outputs are passed on once all messages that have arrived are read. If the event loop lags, a
    request's tokens of several steps are joined to one output.

    Args:
        make_client: makes the client of the connection to the worker. Called once, with a function
            that handles each message and one that handles the loss of the connection.
    """

    def __init__(
        self, worker_id: str, epoch: int, make_client: MakeClient, on_load: OnLoad, on_lost: OnLost
    ) -> None:
        self.worker_id, self.epoch = worker_id, epoch
        self._on_load, self._on_lost = on_load, on_lost
        self.lost = asyncio.Event()
        self._listeners: dict[str, RequestListener] = {}
        self._arrived: list[list[TokenOutput]] = []
        self._arrived_since = 0.0
        self.client = make_client(self.on_message, self.lose)

    def post(self, message: ControlMessage) -> None:
        """Queue a message to the worker.

        Raises:
            ChannelError: the connection is gone, or its queue is full.
        """
        self.client.post(message)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for this worker's messages."""
        return not self._listeners

    def listen(self, request_id: str, listener: RequestListener) -> None:
        """Pass a request's messages to its listener, until `forget`."""
        self._listeners[request_id] = listener

    def forget(self, request_id: str) -> None:
        """Drop further messages of a request. Idempotent."""
        self._listeners.pop(request_id, None)

    def on_message(self, message: ControlMessage) -> None:
        """Pass a message to the listeners of its requests, except those that have ended."""
        match message:
            case TokenBatch():
                if message.load is not None:
                    self._on_load(self.worker_id, message.load)
                self._collect(message.outputs)
            case Refused():
                if (listener := self._listeners.get(message.request_id)) is not None:
                    listener.on_refused(message)
            case Blamed():
                self.suspect(message)
            case EngineLost():
                self.lose(message.error, is_explained=True)
            case _:
                name = type(message).__name__
                logger.warning("ignoring an unexpected %s message from %s", name, self.worker_id)

    def _collect(self, outputs: list[TokenOutput]) -> None:
        now = time.monotonic()
        if not self._arrived:
            self._arrived_since = now
            asyncio.get_running_loop().call_soon(self._deliver)
        self._arrived.append(outputs)
        if now - self._arrived_since > MAX_JOIN_S:
            self._deliver()

    def _deliver(self) -> None:
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        now, listeners = time.monotonic(), self._listeners
        for output in arrived[0] if len(arrived) == 1 else joined_steps(arrived):
            if (listener := listeners.get(output.request_id)) is not None:
                listener.on_output(output, now)

    def lose(self, reason: str, is_explained: bool = False) -> None:
        """Close the connection and notify the owner, which ends the requests. Idempotent.

        Args:
            reason: for the log.
            is_explained: the worker has named the requests that may be at fault.
        """
        if self.lost.is_set():
            return
        self.lost.set()
        self.client.close()
        self._deliver()
        self._on_lost(self, reason, is_explained)

    def suspect(self, message: Blamed) -> None:
        """Notify the requests that may be why a worker hung or died."""
        for request_id in message.request_ids:
            if (listener := self._listeners.get(request_id)) is not None:
                listener.on_blamed(message.strikes, message.error)

    def end_requests(self, reason: str, is_explained: bool) -> None:
        """Notify all requests that the worker is lost. Idempotent."""
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_lost(reason, is_explained)


def joined_steps(steps: Iterable[list[TokenOutput]]) -> Iterable[TokenOutput]:
    """Join the outputs of several steps to one output for each request.

    Log probabilities of a prompt stay separate outputs, which come before any tokens.
    """
    of_prompts: list[TokenOutput] = []
    outputs: dict[str, TokenOutput] = {}
    for output in chain.from_iterable(steps):
        if output.prompt_logprobs is not None:
            of_prompts.append(output)
        elif (before := outputs.get(output.request_id)) is None:
            outputs[output.request_id] = output
        else:
            outputs[output.request_id] = joined(before, output)
    return chain(of_prompts, outputs.values())


def joined(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    """Join a request's outputs of two consecutive steps to one."""
    parts = [output.logprobs for output in (first, second) if output.logprobs is not None]
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        cached_tokens=second.cached_tokens if first.cached_tokens is None else first.cached_tokens,
        prefill_worker=second.prefill_worker or first.prefill_worker,
        prefill_load=second.prefill_load or first.prefill_load,
        timings=second.timings or first.timings,
        logprobs=join(parts),
    )


@dataclass(slots=True, eq=False)
class WorkerLinks:
    """Keeps a link to every worker of a role that `join`ed and has not `leave`d.

    Args:
        role: role of the workers; others are left out.
        name: this router's name, part of its client id at the workers.
        lease_s: silence after which a worker counts as lost.
        on_load: gets the load reports that come with tokens.
        find_crash: returns the crash report of a worker's run; None if it did not crash.
    """

    role: Role
    keys: ClusterKeys
    name: str
    heartbeat_s: float
    lease_s: float
    on_load: OnLoad
    find_crash: FindCrash
    _links: dict[str, WorkerLink] = field(default_factory=dict)
    _has_linked: bool = False
    _complaints: Complaints = field(default_factory=lambda: Complaints(logger))
    _keepers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _is_closed: bool = False

    def __iter__(self) -> Iterator[WorkerLink]:
        return iter([link for link in self._links.values() if not link.lost.is_set()])

    def get(self, worker_id: str) -> WorkerLink | None:
        """Return the usable link to a worker."""
        link = self._links.get(worker_id)
        return None if link is None or link.lost.is_set() else link

    @property
    def expects_worker(self) -> bool:
        """Whether a worker is known, or was known and may come back."""
        return self._has_linked or bool(self._keepers)

    def join(self, record: WorkerRecord) -> None:
        """Connect to a run of a worker, and keep the connection."""
        if record.role == self.role:
            self._keepers[record.worker_id] = start_task(
                self._keep(record), f"link to {record.worker_id}"
            )

    def leave(self, record: WorkerRecord) -> None:
        """End the link to a run of a worker; its requests lose their worker."""
        keeper = self._keepers.pop(record.worker_id, None)
        if keeper is not None:
            keeper.cancel()
            self._ending.add(keeper)
            keeper.add_done_callback(self._ending.discard)
        self._drop(record.worker_id, "its record is gone")

    async def close(self) -> None:
        """End the connections to all workers and the tasks that keep them up."""
        self._is_closed = True
        keepers = [*self._keepers.values(), *self._ending]
        self._keepers.clear()
        for keeper in keepers:
            await end_task(keeper)
        for worker_id in list(self._links):
            self._drop(worker_id, "the router shuts down")

    def _drop(self, worker_id: str, reason: str) -> None:
        link = self._links.pop(worker_id, None)
        if link is not None:
            link.lose(reason)

    def _on_link_lost(self, link: WorkerLink, reason: str, is_explained: bool) -> None:
        """End a lost link's requests; if the worker did not say why, look for a crash before."""
        if is_explained or self._is_closed or link.is_idle:
            link.end_requests(reason, is_explained)
            return
        task = start_task(self._explain(link, reason), f"finding out about {link.worker_id}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        # However it ends, even before it begins.
        task.add_done_callback(lambda _: link.end_requests(reason, is_explained=False))

    async def _explain(self, link: WorkerLink, reason: str) -> None:
        """Suspect the requests that a crash report names, then end all requests of the link."""
        crash = await self.find_crash(link.worker_id, link.epoch)
        if crash is not None:
            link.suspect(crash.blamed())
            link.end_requests(reason, is_explained=crash.in_step)

    async def _keep(self, record: WorkerRecord) -> None:
        """Connect to a worker again and again; runs until it is cancelled."""
        delay = MIN_RETRY_S
        while True:
            try:
                link = await self._connect(record)
            except ChannelError as exc:
                text = f"no connection to {record.worker_id}: {exc}"
                self._complaints.say(record.worker_id, record.epoch, text)
                delay = min(2 * delay, MAX_RETRY_S)
            else:
                self._complaints.forget(record.worker_id, record.epoch)
                logger.info("connected to %s", record.worker_id)
                self._links[record.worker_id] = link
                self._has_linked = True
                await link.lost.wait()
                if self._links.get(record.worker_id) is link:
                    del self._links[record.worker_id]
                delay = MIN_RETRY_S
            await asyncio.sleep(delay)

    async def _connect(self, record: WorkerRecord) -> WorkerLink:
        make_client = partial(
            ControlClient,
            record.endpoint,
            self.keys,
            make_client_id(self.name),
            heartbeat_s=self.heartbeat_s,
            lease_s=self.lease_s,
        )
        run = record.worker_id, record.epoch
        link = WorkerLink(*run, make_client, self.on_load, self._on_link_lost)
        await link.client.connect_to(*run, CONNECT_TIMEOUT_S)
        return link
