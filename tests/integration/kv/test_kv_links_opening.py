"""A decode worker's links to prefill workers that are slow, silent, restarted, shaky or gone."""

from __future__ import annotations

import asyncio
import time

import pytest

from pagewire.shared.base.errors import TransferError
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_by_hand import kv_link_by_hand, prefill_by_hand
from pagewire.tests.support.kv_router import router_of
from pagewire.tests.support.kv_services import Times, decode_worker, prefill_worker

SOON_S = 8.0  # less than any time-out of the workers
SHORT_TIMES = Times(transfer_s=0.5)
BOTH = ("loopback", "zmq")
ALWAYS = 1 << 30


def test_a_link_is_tested_and_measured() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d:
            await d.link_to(p)
            [link] = p.sender.links
            assert (link.peer, link.transport) == ("decode-0", "zmq")
            await eventually(lambda: link.gb_per_s > 0)
            assert list(d.links.open_epochs) == ["prefill-0"]

    run_async(scenario())


def test_a_silent_worker_delays_no_link_to_another() -> None:
    async def scenario() -> None:
        async with (
            prefill_by_hand("prefill-1") as mute,
            prefill_worker() as p,
            decode_worker() as d,
        ):
            d.records = [mute.record(), p.record()]
            await eventually(d.is_linked, SOON_S)
            await eventually(lambda: mute.hellos, SOON_S)
            assert len(mute.hellos) == 1  # one attempt at a time
            assert not d.is_linked("prefill-1")

    run_async(scenario())


def test_a_worker_that_ends_before_its_welcome_is_tried_again_at_once() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d:
            async with prefill_by_hand() as mute:
                d.records = [mute.record()]
                await eventually(lambda: mute.hellos)
            d.records = [p.record()]
            await eventually(d.is_linked, SOON_S)

    run_async(scenario())


def test_a_restarted_worker_gets_a_new_link_and_loses_the_old_one() -> None:
    async def scenario() -> None:
        async with (
            prefill_worker() as old,
            prefill_worker(epoch=2) as new,
            decode_worker() as d,
            router_of(d) as router,
        ):
            await d.link_to(old)
            d.records = [new.record()]  # the old process hangs, say
            await eventually(lambda: d.is_linked(epoch=2))
            await eventually(lambda: not len(old.sender.links))
            assert (len(new.sender.links), len(d.receiver.links)) == (1, 1)
            router.generate()
            await router.answer()
            assert new.core.stats.prompt_tokens_computed

    run_async(scenario())


def test_a_new_life_does_not_wait_for_the_end_of_an_attempt_at_the_old_one() -> None:
    async def scenario() -> None:
        async with (
            prefill_by_hand() as old,
            prefill_worker(epoch=2) as new,
            decode_worker() as d,
        ):
            d.records = [old.record()]
            await eventually(lambda: old.hellos)
            d.records = [new.record()]
            await eventually(lambda: d.is_linked(epoch=2), SOON_S)
            assert len(d.receiver.links) == 1

    run_async(scenario())


def test_another_life_than_the_records_is_not_linked_to(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with prefill_worker(epoch=2) as p, decode_worker() as d:
            d.records = [p.record(epoch=1)]
            await eventually(lambda: "now belongs to another worker" in caplog.text)
            d.records = [p.record(worker_id="prefill-9")]
            await eventually(lambda: "no link to prefill-9" in caplog.text)
            assert not d.links.open_epochs
            await d.link_to(p)

    run_async(scenario())


@pytest.mark.parametrize("endpoint", ["", "nonsense", "tcp://no-such-host.invalid:5", "tcp://[::1"])
def test_a_worker_whose_endpoint_is_nonsense_is_one_warning(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with prefill_worker("prefill-1") as p, decode_worker() as d:
            nowhere = p.record(worker_id="prefill-0", endpoint=endpoint)
            d.records = [nowhere, p.record()]
            await eventually(lambda: "no link to prefill-0" in caplog.text)
            await eventually(lambda: d.is_linked("prefill-1"))

    run_async(scenario())
    warnings = [r for r in caplog.records if "no link to prefill-0" in r.message]
    assert len([r for r in warnings if r.levelname == "WARNING"]) == 1
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "corrupt"])
def test_where_a_transport_brings_nothing_the_next_is_taken(
    is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    times = Times(transfer_s=2.0)

    async def scenario() -> None:
        async with (
            prefill_worker(transports=BOTH, times=times) as p,
            decode_worker(transports=BOTH, times=times) as d,
        ):
            transport = p.side.transport
            transport.loses, transport.num_corrupt = is_lost, 0 if is_lost else ALWAYS
            await d.link_to(p)
            assert [link.transport for link in p.sender.links] == ["zmq"]
            assert transport.num_sent == 1
            await asyncio.sleep(4 * d.times.heartbeat_s)  # it is not tried alongside the other
            assert transport.num_sent == 1

    run_async(scenario())
    assert "no link to prefill-0" in caplog.text


def test_a_restarted_worker_may_use_a_transport_that_failed_before() -> None:
    async def scenario() -> None:
        async with (
            prefill_worker(transports=BOTH) as old,
            prefill_worker(transports=BOTH, epoch=2) as new,
            decode_worker(transports=BOTH) as d,
        ):
            old.side.transport.num_corrupt = ALWAYS
            await d.link_to(old)
            assert [link.transport for link in old.sender.links] == ["zmq"]
            await d.link_to(new)
            assert [link.transport for link in new.sender.links] == ["loopback"]

    run_async(scenario())


def test_a_lost_kv_link_is_opened_again() -> None:
    async def scenario() -> None:
        async with prefill_by_hand() as by_hand, decode_worker() as d:
            d.records = [by_hand.record()]
            for count in (1, 2):
                await eventually(lambda: len(by_hand.hellos) == count)  # noqa: B023
                with kv_link_by_hand(by_hand.hellos[-1][1]) as link:
                    await link.granted()
                    link.pass_test()
                    await eventually(d.is_linked)
                    link.break_rules()
                    await eventually(lambda: not d.is_linked())
            assert d.metric("kv_link_faults_total", kind="lost") == 2

    run_async(scenario())


def test_a_prefill_worker_that_ends_its_link_gets_another() -> None:
    async def scenario() -> None:
        async with prefill_by_hand() as by_hand, decode_worker() as d:
            d.records = [by_hand.record()]
            await eventually(lambda: by_hand.hellos)
            with kv_link_by_hand(by_hand.hellos[0][1]) as link:
                await link.granted()
                link.pass_test()
                await eventually(d.is_linked)
                by_hand.refuse("nothing crosses any more")
                await eventually(lambda: len(by_hand.hellos) == 2)
            assert not d.is_linked()
            # The new connection's hello may arrive before the end of the old connection is noticed.
            await eventually(lambda: len(by_hand.server.lost) == 1)

    run_async(scenario())


def test_a_transport_that_was_not_offered_ends_one_attempt_only() -> None:
    async def scenario() -> None:
        async with prefill_by_hand() as by_hand, decode_worker() as d:
            d.records = [by_hand.record()]
            await eventually(lambda: by_hand.hellos)
            with kv_link_by_hand(by_hand.hellos[0][1], "transport pigeon"):
                await eventually(lambda: len(by_hand.hellos) == 2)
            assert not d.is_linked()

    run_async(scenario())


def test_closing_ends_attempts_too() -> None:
    async def scenario() -> None:
        async with prefill_by_hand() as mute:
            async with decode_worker() as d:
                d.records = [mute.record()]
                await eventually(lambda: mute.hellos)
            await eventually(lambda: mute.server.lost)

    run_async(scenario(), timeout=SOON_S + 5)


@pytest.mark.parametrize("others", [(), ("zmq",)], ids=["only one", "the only common one"])
def test_a_transport_that_failed_for_a_while_is_tried_again(others: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with (
            prefill_worker(transports=("loopback",)) as p,
            decode_worker(transports=(*others, "loopback")) as d,
        ):
            p.side.transport.num_corrupt = ALWAYS
            d.records = [p.record()]
            await eventually(lambda: p.side.transport.num_sent > 1)
            p.side.transport.num_corrupt = 0
            await d.link_to(p)

    run_async(scenario())


def test_a_transport_that_failed_is_offered_again_where_no_other_can_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_link: int) -> bytes:
        raise TransferError("the wire is cut")

    async def scenario() -> None:
        async with prefill_worker(transports=BOTH) as p, decode_worker(transports=BOTH) as d:
            p.side.transport.num_corrupt = 1
            d.side.transports["zmq"].offer = refuse
            await d.link_to(p)
            assert [link.transport for link in p.sender.links] == ["loopback"]

    run_async(scenario())
    assert "no transport for prefill-0 (loopback: its test failed: " in caplog.text
    assert "; zmq: the wire is cut)" in caplog.text


def test_a_lost_control_connection_is_not_the_transports_fault() -> None:
    async def scenario() -> None:
        async with decode_worker(transports=BOTH) as d:
            for _ in range(2):
                async with prefill_by_hand() as by_hand:
                    d.records = [by_hand.record()]
                    await eventually(lambda: by_hand.hellos)
                    with kv_link_by_hand(by_hand.hellos[0][1], "loopback") as link:
                        await link.granted()  # and nothing is sent
                assert list(by_hand.hellos[0][1].transports) == ["loopback", "zmq"]

    run_async(scenario())


def test_a_link_without_credits_is_not_the_transports_fault() -> None:
    async def scenario() -> None:
        async with (
            prefill_by_hand("prefill-0") as greedy,
            prefill_by_hand("prefill-1") as other,
            decode_worker(transports=BOTH, times=SHORT_TIMES) as d,
        ):
            d.records = [greedy.record()]
            await eventually(lambda: greedy.hellos)
            with kv_link_by_hand(greedy.hellos[0][1]) as link:
                await link.granted()
                link.pass_test()  # it has all credits, and returns none
                await eventually(d.is_linked)
                d.records = [greedy.record(), other.record()]
                await eventually(lambda: other.hellos)
                with kv_link_by_hand(other.hellos[0][1], "loopback"):
                    await eventually(lambda: len(other.hellos) == 2)
                assert list(other.hellos[1][1].transports) == ["loopback", "zmq"]

    run_async(scenario())


def test_a_link_that_ends_as_soon_as_it_is_tested_is_not_kept() -> None:
    async def scenario() -> None:
        async with prefill_by_hand() as by_hand, decode_worker() as d:
            d.records = [by_hand.record()]
            await eventually(lambda: by_hand.hellos)
            with kv_link_by_hand(by_hand.hellos[0][1]) as link:
                await link.granted()
                # From here on the loop does not run: it hears of the test and of the end at once.
                link.pass_test()
                link.break_rules()
                time.sleep(0.2)  # noqa: ASYNC251 - see above
                await eventually(lambda: len(by_hand.hellos) > 1)
            assert not d.is_linked()

    run_async(scenario())


def test_a_link_that_is_tested_at_the_last_moment_is_kept() -> None:
    async def scenario() -> None:
        async with prefill_by_hand() as by_hand, decode_worker(times=Times(transfer_s=1.0)) as d:
            d.records = [by_hand.record()]
            await eventually(lambda: by_hand.hellos)
            with kv_link_by_hand(by_hand.hellos[0][1]) as link:
                await link.granted()
                # The loop does not run: it hears of the test when the time is over, too.
                link.pass_test()
                time.sleep(1.2)  # noqa: ASYNC251 - see above
                await asyncio.sleep(2 * d.times.heartbeat_s)
                assert d.is_linked()
                assert len(by_hand.hellos) == 1

    run_async(scenario())


def test_a_busy_engine_leaves_no_link_of_an_attempt_that_was_given_up() -> None:
    async def scenario() -> None:
        async with prefill_by_hand() as mute, decode_worker(times=SHORT_TIMES) as d:
            with d.stuck():
                d.records = [mute.record()]
                await asyncio.sleep(2 * SHORT_TIMES.transfer_s)
                d.records = []
                await asyncio.sleep(2 * SHORT_TIMES.transfer_s)
            await d.engine.call(lambda _core: None, 5)
            await eventually(lambda: not len(d.receiver.links))

    run_async(scenario())


def test_the_engine_says_at_once_what_the_system_refuses(caplog: pytest.LogCaptureFixture) -> None:
    def open_file(_core: object) -> None:
        raise OSError("too many open files")

    async def scenario() -> None:
        async with decode_worker() as d:
            with pytest.raises(TransferError, match="OSError: too many open files"):
                await d.engine.call(open_file, 20)

    run_async(scenario())
    assert "too many open files" in caplog.text


def test_a_prompt_whose_blocks_never_arrive_intact_is_computed_here_at_once() -> None:
    async def scenario() -> None:
        async with (
            prefill_worker() as p,
            decode_worker() as d,
            router_of(d) as router,
        ):
            await d.link_to(p)
            p.side.transport.num_corrupt = ALWAYS
            start = time.monotonic()
            router.generate()
            await router.answer()
            assert time.monotonic() - start < SOON_S
            assert d.local_prefills("failed") == 1
            await eventually(lambda: not p.service.num_active)

    run_async(scenario())
