"""The sockets of KV links: what waits for what."""

from __future__ import annotations

import asyncio
import time

import pytest

from pagewire.shared.control.auth import ClusterKeys
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import NO_LOAD
from pagewire.shared.transfer.endpoint.sockets import KvSockets, ReceiverSocket, SenderSocket
from pagewire.shared.transfer.job_messages import PrefillDone
from pagewire.shared.transfer.messages import Segment, ToReceiver
from pagewire.tests.support.aio import run_async

pytestmark = pytest.mark.timeout(60)

TOKEN = bytes(range(16))
PAYLOAD = bytes(32 << 20)


def test_a_first_token_does_not_wait_for_the_payloads_before_it() -> None:
    done = PrefillDone(job_id="job", first_token=1, cached_tokens=0, load=LoadReport(1, 1, NO_LOAD))

    async def scenario() -> list[ToReceiver]:
        sockets = KvSockets(ClusterKeys.derive("secret"), len(PAYLOAD))
        receiver = ReceiverSocket(sockets, "127.0.0.1", "127.0.0.1")
        sender = SenderSocket(sockets, receiver.endpoint, TOKEN, "receiver")
        for use in range(4):
            sender.post(segment_of(use), memoryview(PAYLOAD))
        sender.post(done)
        received: list[ToReceiver] = []
        deadline = time.monotonic() + 30
        while len(received) < 5 and time.monotonic() < deadline:
            for token, message, _body in receiver.receive():
                assert token == TOKEN
                received.append(message)
            await asyncio.sleep(0.001)  # the loop answers who may connect
        sender.close()
        receiver.close()
        sockets.close()
        return received

    received = run_async(scenario())
    assert [message.use for message in received if isinstance(message, Segment)] == [0, 1, 2, 3]
    assert received.index(done) < 3


def segment_of(use: int) -> Segment:
    """A segment of one block."""
    return Segment(
        credit=use,
        use=use,
        job="job",
        first_block=use,
        num_blocks=1,
        first_group=0,
        num_groups=1,
        seed=0,
        nbytes=len(PAYLOAD),
    )
