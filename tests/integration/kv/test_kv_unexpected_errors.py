"""What a device or a library raises at the receiver ends one link, and harms nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import zmq

from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.endpoint.events import JobReported, KvEvent, LinkClosed, LinkTested
from pagewire.shared.transfer.endpoint.receiver_jobs import ReceiverJob
from pagewire.shared.transfer.job_messages import PrefillFailed
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.transports.base import Inbound, Pending
from pagewire.tests.support.kv_pair import KvPair, kv_pair
from pagewire.tests.support.kv_sides import TRANSPORTS

pytestmark = pytest.mark.timeout(30)


class Broken(Inbound):
    """Fails as a device may."""

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        raise RuntimeError("CUDA error: unspecified launch failure")


def fail(*_args: object) -> bytes:
    raise OSError(24, "Too many open files")


@contextmanager
def with_running_request(kind: str) -> Iterator[tuple[KvPair, Callable[[], bool]]]:
    """Yield a pair, and whether a request at the receiver runs as if nothing had happened."""
    with kv_pair(kind, linked=False) as pair:
        running = pair.decode.add("running", [9, 8, 7], max_tokens=500)
        yield pair, lambda: running.status is RequestStatus.RUNNING
        pair.decode.core.sequences.abort("running")


@TRANSPORTS
def test_a_payload_that_cannot_be_received_ends_its_link_alone(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with with_running_request(kind) as (pair, still_runs):
        transport = pair.decode.transport
        transport.inbound = lambda _link, _reply: Broken()
        pair.connect(pair.prefill, pair.decode)
        pair.until(lambda: pair.decode.lost)
        assert "unspecified launch failure" in caplog.text
        pair.until(lambda: not pair.decode.slots.count(StagingSlotState.FILLED))
        assert still_runs() and pair.decode.receiver.links == []


@TRANSPORTS
def test_a_transport_that_cannot_be_opened_ends_its_link_alone(kind: str) -> None:
    with with_running_request(kind) as (pair, still_runs):
        pair.decode.transport.inbound = fail
        pair.connect(pair.prefill, pair.decode)
        pair.until(lambda: pair.decode.lost)
        assert still_runs() and pair.decode.receiver.links == []


def test_a_transport_that_cannot_make_an_offer_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with kv_pair(("loopback", "zmq"), linked=False) as pair:
        pair.decode.transports["loopback"].offer = fail
        link = pair.decode.receiver.offer("prefill-0", 1)
        assert list(link.offers) == ["zmq"]
        assert "loopback cannot be offered to prefill-0" in caplog.text
        assert "Too many open files" in caplog.text
        pair.decode.receiver.close(link)


def test_a_report_that_cannot_be_handled_ends_its_link_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even if the job has given its link up by then."""
    with with_running_request("zmq") as (pair, still_runs):
        pair.connect(pair.prefill, pair.decode)
        pair.until(lambda: pair.decode.tested)

        def fail_to_handle(_event: KvEvent) -> None:
            pair.decode.handle = lambda _event: None
            raise RuntimeError("a bug")

        [link] = pair.decode.receiver.links
        job = Mock(ReceiverJob, link=None)
        pair.decode.handle = fail_to_handle
        report = PrefillFailed(job_id="a job", reason="draining")
        pair.decode.receiver.events.append(JobReported(link, job, report))
        pair.until(lambda: pair.decode.lost)
        assert "a bug" in caplog.text and "step hook failed" not in caplog.text
        assert still_runs() and pair.decode.receiver.links == []


def test_events_after_one_that_cannot_be_handled_are_handled() -> None:
    with kv_pair("zmq") as pair:
        handled: list[KvEvent] = []

        def handle(event: KvEvent) -> None:
            handled.append(event)
            raise RuntimeError(f"a bug {len(handled)}")

        pair.decode.handle = handle
        link = pair.decode.receiver.links[0]
        pair.decode.receiver.events += [LinkTested(link), LinkClosed(link)]
        with pytest.raises(RuntimeError, match="a bug 1"):
            pair.decode.endpoint.after_launch(None)
        assert len(handled) == 2
