"""Jobs and the links that their messages cross: lost links, late reports, silent networks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagewire.shared.transfer.job_messages import Prefill
from pagewire.tests.support.aio import eventually, run_async, until_one_ends
from pagewire.tests.support.kv_by_hand import (
    KvLinkByHand,
    PrefillByHand,
    kv_link_by_hand,
    prefill_by_hand,
)
from pagewire.tests.support.kv_router import Router, prompt_of, router_of
from pagewire.tests.support.kv_services import (
    Times,
    Worker,
    decode_worker,
    prefill_worker,
)
from pagewire.tests.support.kv_sides import HOST

NAMES = ("a", "b", "c")
_CHUNK = 1 << 16


class StallingRelay:
    """Passes bytes on, both ways.

    Attributes:
        endpoint: address to connect to.
        flows: while it is cleared, nothing is passed on; connections stay open.
    """

    endpoint: str

    def __init__(self) -> None:
        self.flows = asyncio.Event()
        self.flows.set()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self.flows.wait()
            target.write(data)

    async def serve(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay one connection."""
        there, onward = await asyncio.open_connection(HOST, port)
        try:
            await until_one_ends(self._copy(reader, onward), self._copy(there, writer))
        finally:
            for each in (onward, writer):
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()


@asynccontextmanager
async def stalling_relay(endpoint: str) -> AsyncIterator[StallingRelay]:
    """Relay connections to a port of this machine."""
    relay, connections = StallingRelay(), set[asyncio.Task[None]]()
    port = int(endpoint.rpartition(":")[2])

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.ensure_future(relay.serve(port, reader, writer)))

    server = await asyncio.start_server(accept, HOST, 0)
    relay.endpoint = f"tcp://{HOST}:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


@asynccontextmanager
async def linked_by_hand(
    d: Worker, p: PrefillByHand, *others: Worker
) -> AsyncIterator[KvLinkByHand]:
    """Link a decode worker to a worker that the test plays, and to real ones."""
    d.records = [p.record(), *(other.record() for other in others)]
    await eventually(lambda: p.hellos)
    with kv_link_by_hand(p.hellos[-1][1]) as link:
        await link.granted()
        link.pass_test()
        names = [p.worker_id, *(other.identity.worker_id for other in others)]
        await eventually(
            lambda: link.gives_credits_back() and all(d.is_linked(name) for name in names)
        )
        yield link


async def begin_two(router: Router, link: KvLinkByHand) -> None:
    """Have two jobs at a worker that has sampled the first token of one of them."""
    for number, name in enumerate(NAMES[:2]):
        router.generate(name, prompt_of(9, first=number), workers=("p",))
    await eventually(lambda: len(link.tickets()) == 2)
    link.done(link.tickets()[0].job_id, router.expected("a")[0])
    await router.first_token("a")


def test_a_new_job_that_finds_its_link_lost_takes_those_before_it_along() -> None:
    async def scenario() -> None:
        async with (
            prefill_by_hand("p") as p,
            prefill_worker("q") as q,
            decode_worker(num_blocks=64, times=Times(prefill_s=3.0)) as d,
            router_of(d) as router,
        ):
            async with linked_by_hand(d, p, q) as link:
                await begin_two(router, link)
            d.device.has_run = False  # the plan that brings the new job has rows of others
            router.generate("local", prompt_of(9, first=6), workers=())
            await eventually(lambda: d.device.batches)
            router.generate("c", prompt_of(9, first=4), workers=("p",))
            d.device.has_run = True
            for name in ("local", *NAMES):
                await router.answer(name)
            assert len(q.taken(Prefill)) == 3
            assert [router.prefilled_by(name) for name in NAMES] == ["p", "q", "q"]

    run_async(scenario())


def test_without_another_worker_they_are_computed_here() -> None:
    async def scenario() -> None:
        async with (
            prefill_by_hand("p") as p,
            decode_worker(num_blocks=64, times=Times(prefill_s=3.0)) as d,
            router_of(d) as router,
        ):
            async with linked_by_hand(d, p) as link:
                await begin_two(router, link)
            router.generate("c", prompt_of(9, first=4), workers=("p",))
            for name in NAMES:
                await router.answer(name)
            assert d.local_prefills("failed") == 3
            assert [router.prefilled_by(name) for name in NAMES] == ["p", None, None]

    run_async(scenario())


def test_a_worker_that_breaks_the_rules_loses_its_jobs() -> None:
    async def scenario() -> None:
        async with (
            prefill_by_hand("p") as p,
            prefill_worker("q") as q,
            decode_worker(num_blocks=64, times=Times(prefill_s=3.0)) as d,
            router_of(d) as router,
            linked_by_hand(d, p, q) as link,
        ):
            await begin_two(router, link)
            link.break_rules()
            for name in NAMES[:2]:
                await router.answer(name)
            assert len(q.taken(Prefill)) == 2

    run_async(scenario())


def test_what_is_reported_of_a_job_that_was_given_up_counts_for_nothing() -> None:
    async def scenario() -> None:
        async with (
            prefill_by_hand("p") as p,
            prefill_worker("q") as q,
            decode_worker() as d,
            router_of(d) as router,
            linked_by_hand(d, p, q) as link,
        ):
            q.device.has_moved = False
            router.generate(workers=("p",))
            await eventually(link.tickets)
            [given_up] = link.tickets()
            link.fail(given_up.job_id)
            await router.first_token()
            [present] = q.taken(Prefill)
            for ticket in (given_up, present):
                link.done(ticket.job_id, 1)
                link.fail(ticket.job_id)
            strays = d.receiver.stats.strays
            await asyncio.sleep(0.1)
            q.device.has_moved = True
            await router.answer()
            assert router.prefilled_by() == "q"
            assert (d.is_linked("p"), d.receiver.stats.strays) == (True, strays)
            assert not d.local_prefills("failed")

    run_async(scenario())


def test_a_link_that_nothing_comes_through_is_replaced() -> None:
    times = Times(transfer_s=0.5, prefill_s=1.0)

    async def scenario() -> None:
        async with (
            prefill_worker(times=times) as p,
            decode_worker(times=times) as d,
            router_of(d) as router,
            stalling_relay(d.receiver.socket.endpoint) as relay,
        ):
            direct, d.receiver.socket.endpoint = d.receiver.socket.endpoint, relay.endpoint
            await d.link_to(p)
            d.receiver.socket.endpoint = direct
            [silent] = d.tested_links
            relay.flows.clear()
            router.generate("first")
            await router.answer("first")
            assert router.prefilled_by("first") is None
            await eventually(lambda: d.is_linked() and silent not in d.tested_links)
            router.generate("second", prompt_of(9, first=2))
            await router.answer("second")
            assert router.prefilled_by("second") == "prefill-0"

    run_async(scenario())


def test_a_link_of_idle_or_busy_engines_is_kept() -> None:
    times = Times(transfer_s=1.0)

    async def scenario() -> None:
        async with prefill_worker(times=times) as p, decode_worker(times=times) as d:
            await d.link_to(p)
            links = d.tested_links
            await asyncio.sleep(2 * times.transfer_s)
            with p.stuck(), d.stuck():
                await asyncio.sleep(2 * times.transfer_s)
            async with router_of(d) as router:
                router.generate()
                await router.answer()
                assert router.prefilled_by() == "prefill-0"
            assert d.tested_links == links

    run_async(scenario())
