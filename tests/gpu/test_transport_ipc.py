"""KV payloads by CUDA IPC between two processes: on two GPUs, on one, and when either is killed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
import torch

from pagewire.shared.base.errors import TransferError
from pagewire.tests.support.ipc_peer import IpcPeer, make_transport, remote_ipc_peer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1 << 20
SLOT_BYTES = 16 * MIB
PAYLOAD_BYTES = 5 * MIB + 17


@dataclass(frozen=True)
class Place:
    """Where the other process is; this one is on GPU 0 and sees all.

    Attributes:
        device: as the other process counts.
        visible: its CUDA_VISIBLE_DEVICES.
    """

    device: int
    visible: str | None = None


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PLACES = [
    pytest.param(Place(0), id="one-gpu"),
    pytest.param(Place(1), id="two-gpus", marks=TWO_GPUS),
    # As in a container that is given one GPU: it does not see this process's.
    pytest.param(Place(0, visible="1"), id="hidden-gpu", marks=TWO_GPUS),
]


@pytest.mark.parametrize("place", PLACES)
def test_payloads_cross_both_ways(place: Place) -> None:
    here = IpcPeer(0, SLOT_BYTES)
    with remote_ipc_peer(place.device, SLOT_BYTES, place.visible) as there:
        here.connect(there.call("offer"))
        there.call("connect", here.offer())
        here.write(0, 1, seed=3, nbytes=PAYLOAD_BYTES)
        assert there.call("holds", 1, 3, PAYLOAD_BYTES)
        assert there.call("holds", 0, 0, 0)  # nothing else was written
        there.call("write", 0, 1, 4, SLOT_BYTES)
        assert here.holds(1, 4, SLOT_BYTES)


@pytest.mark.parametrize("place", PLACES)
def test_a_receiver_sees_when_a_payload_has_arrived(place: Place) -> None:
    here = IpcPeer(0, SLOT_BYTES)
    with remote_ipc_peer(place.device, SLOT_BYTES, place.visible) as there:
        for _ in range(3):  # the events of ended links are used again
            there.call("accept", here.connect(there.call("offer")))
            there.call("accept", here.connect(there.call("offer")))
            here.queue_late_copy(1)
            assert not there.call("has_arrived", 1)
            here.finish_copies()
            assert there.call("has_arrived", 1)
            here.end_link(0)
            here.write(0, 0, seed=5, nbytes=PAYLOAD_BYTES)
            assert there.call("has_arrived", 0)
            assert there.call("holds", 0, 5, PAYLOAD_BYTES)
            here.end_link(0)


@pytest.mark.parametrize("place", PLACES)
def test_a_receiver_may_have_several_links_one_after_the_other_or_at_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    here = IpcPeer(0, SLOT_BYTES)
    with remote_ipc_peer(place.device, SLOT_BYTES, place.visible) as there:
        offer = there.call("offer")
        here.connect(offer)
        here.connect(offer)
        here.end_link(0)
        time.sleep(0.3)  # its mapping ends in a thread
        here.write(0, 0, seed=6, nbytes=PAYLOAD_BYTES)
        assert there.call("holds", 0, 6, PAYLOAD_BYTES)
        here.end_link(0)
        here.connect(offer)
        here.write(1, 1, seed=7, nbytes=PAYLOAD_BYTES)
        assert there.call("holds", 1, 7, PAYLOAD_BYTES)
    assert not caplog.records  # all mappings could be ended


@pytest.mark.parametrize("place", PLACES)
def test_a_link_that_ends_with_copies_queued_harms_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    here = IpcPeer(0, SLOT_BYTES)
    with remote_ipc_peer(place.device, SLOT_BYTES, place.visible) as there:
        here.connect(there.call("offer"))
        here.queue_copies(500)
        here.end_link(0)
        here.finish_copies()
        time.sleep(0.3)
        assert here.can_compute()
        assert there.call("can_compute")
    assert not caplog.records


@pytest.mark.parametrize("place", PLACES)
def test_a_sender_survives_a_receiver_that_is_killed_while_it_writes(place: Place) -> None:
    here = IpcPeer(0, SLOT_BYTES)
    with remote_ipc_peer(place.device, SLOT_BYTES, place.visible) as there:
        here.connect(there.call("offer"))
        here.queue_copies(2000)
        there.child.process.kill()
        here.finish_copies()
        there.child.kill()
        here.write(0, 0, seed=8, nbytes=SLOT_BYTES)  # into memory that is nobody's any more
        here.end_link(0)
        time.sleep(0.3)
        assert here.can_compute()
    with remote_ipc_peer(place.device, SLOT_BYTES, place.visible) as next_life:
        here.connect(next_life.call("offer"))
        here.write(0, 0, seed=9, nbytes=SLOT_BYTES)
        assert next_life.call("holds", 0, 9, SLOT_BYTES)


@pytest.mark.parametrize("place", PLACES)
def test_slots_are_free_when_a_killed_sender_has_gone(place: Place) -> None:
    here = IpcPeer(0, SLOT_BYTES)
    with remote_ipc_peer(place.device, SLOT_BYTES, place.visible) as there:
        here.accept(there.call("connect", here.offer()))
        there.call("write", 0, 0, 10, SLOT_BYTES)
        there.call("queue_copies", 2000)
        quarantine = here.inbound[0].close()
        assert not quarantine.poll()
        there.child.process.kill()
        killed_s = time.monotonic()
        while not quarantine.poll():
            time.sleep(0.001)
        assert time.monotonic() - killed_s < 8, "the process's end was not noticed"
        here.memory.zero_()
        torch.cuda.synchronize()
        time.sleep(0.3)
        assert not here.memory.any().item(), "something was written after the quarantine"


def test_the_memory_of_a_dead_receiver_is_refused_in_words() -> None:
    here = IpcPeer(0, SLOT_BYTES)
    with remote_ipc_peer(0, SLOT_BYTES) as there:
        offer = there.call("offer")
        there.child.kill()
    with pytest.raises(TransferError, match=r"cudaIpcOpenMemHandle: cudaError\w+; "):
        here.connect(offer)
    assert here.can_compute()


def test_memory_of_the_caching_allocator_is_not_offered() -> None:
    memory = torch.zeros(2, SLOT_BYTES, dtype=torch.uint8, device="cuda")
    with pytest.raises(TransferError, match="another process may map"):
        make_transport(memory, SLOT_BYTES).offer(1)


@pytest.mark.parametrize("place", PLACES)
def test_rates(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how fast 128 MiB cross each way, alone and at once."""
    here = IpcPeer(0, 128 * MIB)
    with remote_ipc_peer(place.device, 128 * MIB, place.visible) as there:
        here.connect(there.call("offer"))
        there.call("connect", here.offer())
        out, back = here.gb_per_s(100), there.call("gb_per_s", 100)
        at_once = there.start("gb_per_s", 400)
        both: list[float] = []
        thread = threading.Thread(target=lambda: both.append(here.gb_per_s(400)))
        thread.start()
        back_at_once = at_once.wait()
        thread.join(60)
    with capsys.disabled():
        print(
            f"\nGPU {place.device}, sees {place.visible or 'all'}: {out:.0f} GB/s, "
            f"back {back:.0f}; at once {both[0]:.0f} and {back_at_once:.0f}"
        )
    assert min(out, back) > 1, "slower than through the host"
