"""A decode worker's links to prefill workers that are slow, silent, strange, restarted or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from pagewire.services.decode.prefill_links import PrefillLink, PrefillLinks
from pagewire.shared.channel import ControlClient
from pagewire.shared.errors import ChannelError
from pagewire.shared.protocol import ControlMessage, KvHello, KvReady, KvWelcome, ProbeDone
from pagewire.shared.registry import WorkerCard, WorkerDirectory
from pagewire.shared.transfer.base import KvTransport
from pagewire.shared.transfer.loopback import LoopbackHub
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.cards import registry_at
from pagewire.tests.support.kv_runtimes import TRANSFER_TIMEOUT_S, KvRuntime, kv_runtime
from pagewire.tests.support.redis_server import RedisServer

SOON_S = TRANSFER_TIMEOUT_S / 3


@dataclass
class Directory:
    """The cards there are."""

    cards: list[WorkerCard] = field(default_factory=list)

    def workers(self, role: str) -> list[WorkerCard]:
        return [card for card in self.cards if card.role == role]


@dataclass
class Prefill:
    """A prefill worker's side: notes what comes, and says hello back if it is to."""

    runtime: KvRuntime
    transport: str = "loopback"
    answers: bool = True
    received: list[ControlMessage] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runtime.on_message = self.on_message
        self.runtime.on_peer_lost = self.lost.append

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        self.received.append(message)
        if isinstance(message, KvHello):
            self.peers.append(peer_id)
            if self.answers:
                self.welcome(peer_id)

    def welcome(self, peer_id: str) -> None:
        self.runtime.server.post(
            peer_id,
            KvWelcome(
                worker_id=self.runtime.worker_id,
                epoch=self.runtime.epoch,
                transport=self.transport,
                address=self.runtime.addresses["loopback"],
            ),
        )


@dataclass
class Decode:
    """The links under test, and what they reported."""

    runtime: KvRuntime
    directory: Directory = field(default_factory=Directory)
    lost: list[PrefillLink] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = PrefillLinks(
            self.runtime, self.directory, lambda link, message: None, self.lost.append
        )

    def is_linked(self, worker_id: str, epoch: int = 1) -> bool:
        link = self.links.get(worker_id)
        return link is not None and link.epoch == epoch


@asynccontextmanager
async def decoding(hub: LoopbackHub) -> AsyncIterator[Decode]:
    async with kv_runtime("decode-0", hub) as runtime:
        decode = Decode(runtime)
        runtime.tasks.spawn(decode.links.keep_open(), "keeping links")
        try:
            yield decode
        finally:
            decode.links.close()


@asynccontextmanager
async def prefilling(
    hub: LoopbackHub, worker_id: str = "prefill-0", epoch: int = 1
) -> AsyncIterator[Prefill]:
    async with kv_runtime(worker_id, hub, epoch) as runtime:
        yield Prefill(runtime)


def test_a_silent_worker_delays_no_link_to_another() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d, prefilling(hub) as mute, prefilling(hub, "prefill-1") as p:
            mute.answers = False
            d.directory.cards = [mute.runtime.card(), p.runtime.card()]
            await eventually(lambda: d.is_linked("prefill-1"), timeout=SOON_S)
            assert d.links.usable() == [d.links.get("prefill-1")]
            await eventually(lambda: mute.peers, timeout=SOON_S)  # its handshake may take longer
            assert len(mute.peers) == 1  # one attempt at a time

    run_async(scenario())


def test_a_worker_that_dies_before_its_welcome_is_tried_again_at_once() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d:
            async with prefilling(hub) as mute:
                mute.answers = False
                d.directory.cards = [mute.runtime.card()]
                await eventually(lambda: mute.peers)
            async with prefilling(hub) as p:
                d.directory.cards = [p.runtime.card()]
                await eventually(lambda: d.is_linked("prefill-0"), timeout=SOON_S)

    run_async(scenario())


def test_a_transport_that_nobody_asked_for_ends_one_attempt_only() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d, prefilling(hub) as p:
            p.transport = "carrier pigeon"
            d.directory.cards = [p.runtime.card()]
            await eventually(lambda: len(p.peers) > 1)
            p.transport = "loopback"
            await eventually(lambda: d.is_linked("prefill-0"))

    run_async(scenario())


def test_a_restarted_worker_loses_the_old_link_and_its_jobs() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d, prefilling(hub) as old, prefilling(hub, epoch=2) as new:
            d.directory.cards = [old.runtime.card()]
            await eventually(lambda: d.is_linked("prefill-0"))
            first = d.links.get("prefill-0")
            d.directory.cards = [new.runtime.card()]  # the old process hangs, say
            await eventually(lambda: d.is_linked("prefill-0", epoch=2))
            assert d.lost == [first]
            await eventually(lambda: len(old.lost) == 1)
            assert d.runtime.connected == ["prefill-0"]

    run_async(scenario())


def test_a_new_run_does_not_wait_for_the_end_of_an_attempt_at_the_old() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d, prefilling(hub) as old, prefilling(hub, epoch=2) as new:
            old.answers = False
            d.directory.cards = [old.runtime.card()]
            await eventually(lambda: old.peers)
            d.directory.cards = [new.runtime.card()]
            await eventually(lambda: d.is_linked("prefill-0", epoch=2), timeout=SOON_S)

    run_async(scenario())


def test_another_run_than_the_cards_is_not_linked_to() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d, prefilling(hub, epoch=2) as p:
            d.directory.cards = [p.runtime.card(epoch=1)]
            await eventually(lambda: d.runtime.tasks and not d.links.usable())
            d.directory.cards = [p.runtime.card()]
            await eventually(lambda: d.is_linked("prefill-0", epoch=2))
            assert len(p.peers) == 1  # the earlier attempts ended before the handshake
            assert d.lost == []

    run_async(scenario())


def test_a_connection_that_ends_during_the_handshake_leaves_no_kv_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_ready(monkeypatch)

    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d, prefilling(hub) as p:
            d.directory.cards = [p.runtime.card()]
            await eventually(lambda: len(p.peers) > 1)
            d.directory.cards = []
            await eventually(lambda: not d.runtime.connected)
            assert d.links.usable() == []

    run_async(scenario())


def fail_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is always gone when the KV way is open."""
    module = "pagewire.services.decode.prefill_links.ControlClient.post"
    post: Callable[..., None] = PrefillLinks.__init__.__globals__["ControlClient"].post

    def posts(client: object, message: ControlMessage) -> None:
        if isinstance(message, KvReady):
            raise ChannelError("gone")
        post(client, message)

    monkeypatch.setattr(module, posts)


def test_a_worker_of_another_release_is_named_once_and_not_asked(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with (
            registry_at(redis_server.url) as registry,
            decoding(hub) as d,
            prefilling(hub) as p,
        ):
            directory = WorkerDirectory(registry, poll_s=0.05)
            await directory.start()

            def linked() -> bool:
                d.directory.cards = list(directory.workers())
                return d.is_linked("prefill-0")

            await registry.publish(p.runtime.card(protocol=1))
            await eventually(lambda: directory.others)
            assert not linked()
            await asyncio.sleep(3 * d.runtime.settings.heartbeat_s)
            assert p.peers == []
            await registry.publish(p.runtime.card())
            await eventually(linked)
            await directory.close()

    run_async(scenario())
    said = [record.message for record in caplog.records if "same release" in record.message]
    assert len(said) == 1
    assert "'prefill-0', which speaks protocol version 1" in said[0]


def test_closing_ends_attempts_too() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with prefilling(hub) as mute:
            mute.answers = False
            async with decoding(hub) as d:
                d.directory.cards = [mute.runtime.card()]
                await eventually(lambda: mute.peers)
            await eventually(lambda: len(mute.lost) == 1)
            assert d.lost == []

    run_async(scenario(), timeout=SOON_S + 5)


def test_where_nothing_crosses_by_any_transport_they_are_tried_in_turns() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d, prefilling(hub) as p:
            d.runtime.addresses = {"other": b"", **d.runtime.addresses}
            d.directory.cards = [p.runtime.card()]
            link = PrefillLink("prefill-0", 1, cast(ControlClient, None))
            offered = []
            for name in ("other", "loopback", "other", "loopback"):
                link.transport = cast(KvTransport, SimpleNamespace(name=name))
                d.links._leave_out(link)
                offered.append(list(d.links._hello(link).addresses))
            assert offered == [["loopback"], ["other"], ["loopback"], ["other"]]

    run_async(scenario())


def test_a_lost_link_is_reported_once_and_made_anew() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        async with decoding(hub) as d, prefilling(hub) as p:
            d.directory.cards = [p.runtime.card()]
            await eventually(lambda: d.is_linked("prefill-0"))
            first = d.links.get("prefill-0")
            p.runtime.server.post(
                p.peers[0], KvWelcome(worker_id="prefill-0", epoch=1, error="nothing crosses")
            )
            await eventually(lambda: d.lost == [first])
            await eventually(lambda: d.is_linked("prefill-0"))
            assert first is not None
            assert not first.post(ProbeDone(probe_id="p", piece=0))

    run_async(scenario())
