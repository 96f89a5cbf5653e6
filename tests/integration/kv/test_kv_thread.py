"""Endpoints in the threads of their engines, which sleep when there is nothing to do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from pagewire.shared.engine import thread as thread_module
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_output import StepOutput, StepOutputs
from pagewire.shared.engine.thread import Command, EngineThread
from pagewire.shared.transfer.endpoint.receiver_jobs import JobCallbacks, ReceiverJob
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.tests.support.fake_engine import generate, make_sequence
from pagewire.tests.support.kv_sides import CARRIERS, Clock, DecodeSide, PrefillSide, Side, hello_of

pytestmark = pytest.mark.timeout(30)
PROMPT = [n * n % 7 for n in range(18)]


@dataclass
class Running:
    """A side whose engine has a thread.

    Attributes:
        handed_over: commands to the thread.
    """

    side: Side | None = None
    thread: EngineThread | None = None
    fds: list[int] = field(default_factory=list)
    handed_over: int = 0
    outputs: list[StepOutput] = field(default_factory=list)

    def watch(self, fd: int) -> None:
        if self.thread is None:
            self.fds.append(fd)  # it has not started
        else:
            self.thread.watch(fd)

    def unwatch(self, fd: int) -> None:
        self.thread.unwatch(fd)

    def submit(self, command: Command) -> None:
        self.handed_over += 1
        self.thread.submit(command)

    def tokens(self, request_id: str) -> list[int]:
        return [t for o in self.outputs if o.request_id == request_id for t in o.token_ids]


class Workers(JobCallbacks):
    """A prefill and a decode worker, each in a thread."""

    def __init__(self, kind: str) -> None:
        self.prefilling, self.decoding = Running(), Running()
        clock, kinds = Clock(), (kind,)
        self.prefill = PrefillSide(
            "p0",
            clock,
            kinds,
            4,
            2,
            {},
            watch=self.prefilling.watch,
            unwatch=self.prefilling.unwatch,
        )
        self.decode = DecodeSide(
            "d0", clock, kinds, 4, 2, {}, watch=self.decoding.watch, unwatch=self.decoding.unwatch
        )
        self.link: SenderLink | None = None
        self.users: Counter[str] = Counter()
        for running, side, take in [
            (self.prefilling, self.prefill, self.on_first_token),
            (self.decoding, self.decode, self.decoding.outputs.extend),
        ]:
            running.side, running.thread = side, EngineThread(side.core, take)
            for fd in running.fds:
                running.thread.watch(fd)
            running.thread.start()
        self.decode.receiver.callbacks = self

    def open(self) -> None:
        def offer(_core: EngineCore) -> None:
            received = self.decode.receiver.offer("p0", 1)

            def connect(_core: EngineCore) -> None:
                self.link = self.prefill.sender.connect(hello_of(self.decode, received))

            self.prefilling.submit(connect)

        self.decoding.submit(offer)
        until(lambda: self.decode.tested)

    def on_reserved(self, job: ReceiverJob) -> None:
        self.blocks, positions = job, job.coverage.positions

        def start(core: EngineCore) -> None:
            core.add(make_sequence(job.name, PROMPT, prefill_only=True))
            self.prefill.sender.export(job.name, self.link, positions.start, positions.stop)

        self.prefilling.submit(start)

    def on_first_token(self, outputs: StepOutputs) -> None:
        for output in outputs:
            self.users[threading.current_thread().name] += 1
            token = output.token_ids[0]
            self.decoding.outputs.append(StepOutput("request", output.token_ids))
            self.decoding.submit(
                lambda _core, token=token: self.decode.receiver.complete(self.blocks, token)
            )

    def close(self) -> None:
        for running in (self.prefilling, self.decoding):
            assert running.thread.stop(5.0)
            running.side.close()


@contextmanager
def workers(kind: str) -> Iterator[Workers]:
    made = Workers(kind)
    try:
        made.open()
        yield made
    finally:
        made.close()


def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle loop sleeps for ever unless it is woken."""
    monkeypatch.setattr(thread_module, "IDLE_WAIT_S", 60.0)


@CARRIERS
def test_messages_wake_the_engines_and_nothing_else_has_to(kind: str) -> None:
    threads = threading.active_count()
    with workers(kind) as both:
        before = both.prefilling.handed_over, both.decoding.handed_over
        sequence = make_sequence("request", PROMPT, remote_prefill=True)
        expected = generate(sequence, 64)
        both.decoding.submit(lambda core: core.add(sequence))
        until(lambda: sequence.is_finished)
        until(lambda: both.decoding.tokens("request") == expected)
        until(lambda: both.prefill.sender.num_jobs == 0)
        assert both.prefill.sender.stats.outcomes == {"ok": 3}
        # One for the job, one for the request, one for its first token: none for a segment.
        assert both.prefilling.handed_over - before[0] == 1
        assert both.decoding.handed_over - before[1] == 2
        assert threading.active_count() == threads + 2
        assert set(both.users) == {"engine"}


@CARRIERS
def test_an_idle_pair_sleeps(kind: str) -> None:
    with workers(kind) as both:
        threads = [both.prefilling.thread, both.decoding.thread]
        iterations = -1
        until(
            lambda: (
                not any(
                    running.side.core.hooks_busy for running in (both.prefilling, both.decoding)
                )
            )
        )
        while iterations != sum(
            thread.iterations for thread in threads
        ):  # until the last message is read
            iterations = sum(thread.iterations for thread in threads)
            time.sleep(0.1)
        cpu_s = time.process_time()
        time.sleep(0.3)
        assert sum(thread.iterations for thread in threads) == iterations
        assert time.process_time() - cpu_s < 0.1
