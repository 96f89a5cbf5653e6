"""A prefill worker's KV ways to decode workers: their slots, their probes, and early leavers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch

from pagewire.services.prefill import peers as peers_module
from pagewire.services.prefill.peers import DecodePeers
from pagewire.shared.channel import ControlClient, make_client_id
from pagewire.shared.errors import TransferError
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.protocol import Cancel, ControlMessage, KvHello, KvWelcome, ProbeDone
from pagewire.shared.transfer import create_transport, ucx
from pagewire.shared.transfer.loopback import LoopbackHub
from pagewire.shared.transfer.staging import StagingPool
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.cards import LAYOUT
from pagewire.tests.support.kv_runtimes import KEYS, KvRuntime, kv_runtime


class Decode:
    """A decode worker's side: its control connection, and its transport."""

    def __init__(self, runtime: KvRuntime) -> None:
        self.runtime = runtime
        self.client_id = make_client_id(runtime.worker_id)
        self.received: list[ControlMessage] = []

    def hello(self) -> KvHello:
        runtime = self.runtime
        return KvHello(
            worker_id=runtime.worker_id,
            epoch=runtime.epoch,
            layout=LAYOUT,
            addresses=runtime.addresses,
            slot_bytes=runtime.receive_staging.slot_bytes,
        )

    @asynccontextmanager
    async def connected(self, prefill: KvRuntime) -> AsyncIterator[ControlClient]:
        client = ControlClient(
            prefill.endpoint, KEYS, self.client_id, self.received.append, lambda reason: None
        )
        await client.connect(5)
        client.post(Cancel(request_id="any"))
        try:
            yield client
        finally:
            client.close()


@asynccontextmanager
async def workers() -> AsyncIterator[tuple[KvRuntime, Decode]]:
    hub = LoopbackHub()
    async with kv_runtime("prefill-0", hub) as p, kv_runtime("decode-0", hub) as d:
        yield p, Decode(d)


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[KvRuntime, Decode, DecodePeers]]:
    """Both sides' ways are open."""
    async with workers() as (p, decode), decode.connected(p):
        peers = DecodePeers(p)
        await eventually(lambda: decode.client_id in p.server.peers)
        await peers.open(decode.client_id, decode.hello())
        await decode.runtime.transport.connect("prefill-0", p.addresses["loopback"], 5)
        yield p, decode, peers


def test_a_decode_worker_that_leaves_while_its_way_opens_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with workers() as (p, decode):
            peers, lost = DecodePeers(p), asyncio.Event()
            p.on_peer_lost = lambda peer_id: lost.set()
            connect = p.transport.connect

            async def slow_connect(peer_id: str, address: bytes, timeout: float) -> None:
                await connect(peer_id, address, timeout)
                await lost.wait()
                # As the service does when it hears of it.
                p.tasks.spawn(peers.forget(decode.client_id), "closing a KV way")

            monkeypatch.setattr(p.transport, "connect", slow_connect)
            async with decode.connected(p):
                opening = asyncio.create_task(peers.open(decode.client_id, decode.hello()))
                await eventually(lambda: p.connected)
            await opening
            await eventually(lambda: not p.connected)
            assert not peers.is_open(decode.client_id, "decode-0", 1)

    run_async(scenario())


def test_the_way_of_a_worker_that_comes_back_outlives_its_earlier_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with opened() as (p, decode, peers):
            connect = p.transport.connect
            made, forgotten = asyncio.Event(), asyncio.Event()

            async def slow_connect(peer_id: str, address: bytes, timeout: float) -> None:
                await connect(peer_id, address, timeout)
                made.set()
                await asyncio.wait([asyncio.create_task(forgotten.wait())], timeout=0.1)

            monkeypatch.setattr(p.transport, "connect", slow_connect)
            again = Decode(decode.runtime)
            async with again.connected(p):
                await eventually(lambda: again.client_id in p.server.peers)
                opening = asyncio.create_task(peers.open(again.client_id, again.hello()))
                await made.wait()
                closing = asyncio.create_task(peers.forget(decode.client_id))
                closing.add_done_callback(lambda _task: forgotten.set())
                await asyncio.gather(opening, closing)
                assert peers.is_open(again.client_id, "decode-0", 1)
                assert p.connected

    run_async(scenario())


def test_where_ucx_reaches_nobody_the_next_transport_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ucx, "ucx_settings", lambda host, cuda: {"TLS": "self"})

    async def scenario() -> None:
        async with workers() as (p, decode), contextlib.AsyncExitStack() as stack:
            for runtime in (p, decode.runtime):
                transport = create_transport("ucx", runtime.worker_id, runtime.receive_staging)
                stack.push_async_callback(transport.close)
                address = {"ucx": await transport.start(5)}
                runtime.transports["ucx"] = transport
                runtime.addresses = address | runtime.addresses  # UCX is the first choice
            await stack.enter_async_context(decode.connected(p))
            await eventually(lambda: decode.client_id in p.server.peers)
            await DecodePeers(p).open(decode.client_id, decode.hello())
            await eventually(lambda: decode.received)
            [welcome] = decode.received
            assert isinstance(welcome, KvWelcome)
            assert (welcome.transport, welcome.error) == ("loopback", None)
            assert p.connected == ["decode-0"]

    run_async(scenario())
    assert "no ucx to decode-0: UCX" in caplog.text


def test_layouts_that_do_not_match_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with workers() as (p, decode), decode.connected(p):
            peers = DecodePeers(p)
            await eventually(lambda: decode.client_id in p.server.peers)
            other = msgspec.structs.replace(LAYOUT, block_size=8)
            for _ in range(3):
                await peers.open(
                    decode.client_id, msgspec.structs.replace(decode.hello(), layout=other)
                )
            await eventually(lambda: len(decode.received) >= 3)

    run_async(scenario())
    assert len([r for r in caplog.records if "no KV way to decode-0" in r.message]) == 1


@pytest.mark.parametrize("missing", [0, 1])
def test_a_way_opens_where_a_block_fits_the_slots_of_the_decode_worker(missing: int) -> None:
    async def scenario() -> None:
        async with workers() as (p, decode), decode.connected(p):
            peers = DecodePeers(p)
            await eventually(lambda: decode.client_id in p.server.peers)
            slot_bytes = BlockParts.of_layout(LAYOUT).packed_bytes(1) - missing
            hello = msgspec.structs.replace(decode.hello(), slot_bytes=slot_bytes)
            await peers.open(decode.client_id, hello)
            assert peers.is_open(decode.client_id, "decode-0", 1) is not bool(missing)
            assert peers.slot_bytes(decode.client_id) == (0 if missing else slot_bytes)
            await eventually(lambda: decode.received)
            assert is_told(decode) is bool(missing)

    run_async(scenario())


@asynccontextmanager
async def acknowledging(decode: Decode, peers: DecodePeers, count: int) -> AsyncIterator[None]:
    """The decode worker takes this many probe pieces and says so."""

    async def acknowledge() -> None:
        for _ in range(count):
            piece = await decode.runtime.transport.recv()
            piece.slot.release()
            done = ProbeDone(probe_id=piece.header.job_id, piece=piece.header.piece)
            peers.on_probe_done(decode.client_id, done)

    task = asyncio.create_task(acknowledge())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def is_told(decode: Decode) -> bool:
    """Whether the decode worker was told that nothing crosses."""
    return any(getattr(message, "error", None) for message in decode.received)


def test_a_probe_that_fails_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with opened() as (p, decode, peers), acknowledging(decode, peers, 1):
            send, count = p.transport.send, 0

            async def send_two(*args: object) -> None:
                nonlocal count
                count += 1
                if count > 2:
                    raise TransferError("broke")
                await send(*args)

            monkeypatch.setattr(p.transport, "send", send_two)
            await peers.probe(decode.client_id)
            assert not [task for task in asyncio.all_tasks() if "_probe_once" in repr(task)]
            assert p.send_staging.num_free == p.send_staging.num_slots
            await eventually(lambda: is_told(decode))
            staging = decode.runtime.receive_staging
            if staging.num_free < staging.num_slots:
                (await decode.runtime.transport.recv()).slot.release()

    run_async(scenario())


def test_a_probe_fits_the_smaller_slots_of_the_decode_worker() -> None:
    async def scenario() -> None:
        async with workers() as (p, decode), decode.connected(p):
            slot_bytes = decode.runtime.receive_staging.slot_bytes
            p.send_staging = StagingPool(8, 4 * slot_bytes, torch.device("cpu"))
            peers = DecodePeers(p)
            await eventually(lambda: decode.client_id in p.server.peers)
            await peers.open(decode.client_id, decode.hello())
            await decode.runtime.transport.connect("prefill-0", p.addresses["loopback"], 5)
            count = 1 + peers_module.PROBE_IN_FLIGHT + peers_module.PROBE_PIECES
            async with acknowledging(decode, peers, count):
                await peers.probe(decode.client_id)
            assert p.links["decode-0"].gbps > 0

    run_async(scenario())


def test_a_way_by_which_nothing_crosses_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "PROBE_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with opened() as (p, decode, peers):
            await peers.probe(decode.client_id)
            assert p.send_staging.num_free == p.send_staging.num_slots
            assert "decode-0" not in p.links
            await eventually(lambda: is_told(decode))

    run_async(scenario())


@pytest.mark.parametrize("landed", [1, 3], ids=["tried", "being-measured"])
def test_a_way_that_is_only_slow_is_kept(monkeypatch: pytest.MonkeyPatch, landed: int) -> None:
    monkeypatch.setattr(peers_module, "PROBE_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with opened() as (p, decode, peers), acknowledging(decode, peers, landed):
            await peers.probe(decode.client_id)
            assert p.links["decode-0"].gbps == 0
            assert not is_told(decode)

    run_async(scenario())


def test_a_way_is_kept_while_others_hold_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "PROBE_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with opened() as (p, decode, peers):
            slots = [p.send_staging.try_acquire() for _ in range(p.send_staging.num_slots)]
            await peers.probe(decode.client_id)
            assert p.links["decode-0"].gbps == 0
            assert not is_told(decode)
            for slot in slots:
                if slot is not None:
                    slot.release()

    run_async(scenario())


def test_a_way_that_works_is_measured() -> None:
    async def scenario() -> None:
        async with opened() as (p, decode, peers), acknowledging(decode, peers, 100):
            await peers.probe(decode.client_id)
            assert p.links["decode-0"].gbps > 0

    run_async(scenario())
