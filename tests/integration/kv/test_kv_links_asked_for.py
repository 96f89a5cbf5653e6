"""What a prefill worker answers to decode workers that ask for links, and how links end there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from pagewire.shared.kv.kv_layout import CachedToken, CacheGroup
from pagewire.shared.kv.packing import packed_bytes
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_by_hand import decode_by_hand
from pagewire.tests.support.kv_router import prompt_of, router_of
from pagewire.tests.support.kv_services import Times, decode_worker, prefill_worker
from pagewire.tests.support.kv_sides import IDENTITY, LAYOUT, hello

SMALLEST = packed_bytes(LAYOUT, 1)


@pytest.mark.parametrize(
    ("what", "field", "value"),
    [
        ("model_identity", "block_size", 8),
        ("model_identity", "fingerprint", "another"),
        ("model_identity", "weight_version", 1),
        ("model_identity", "dtype", "float16"),
        ("model_identity", "kv_format", "fp8"),
        ("model_identity", "batch_invariant", True),
        ("model_identity", "ranks", 2),
        ("layout", "layers_per_block", 4),
        ("layout", "token", CachedToken(1, 2, 1)),
        ("layout", "dtype", "bfloat16"),
        ("layout", "groups", (CacheGroup((0,)), CacheGroup((1,), 8))),
    ],
)
def test_a_link_is_refused_by_the_name_of_what_differs(
    what: str, field: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The layout of a worker of the same model counts, and the model of one with this layout."""
    usual = {"model_identity": IDENTITY, "layout": LAYOUT}[what]
    other: Any = {what: msgspec.structs.replace(usual, **{field: value})}

    async def scenario() -> None:
        async with (
            prefill_worker() as p,
            decode_worker() as same,
            decode_worker("decode-1", **other) as d,
        ):
            await same.link_to(p)
            d.records = [p.record()]
            await eventually(lambda: "no link to prefill-0" in caplog.text)
            await asyncio.sleep(4 * d.times.heartbeat_s)  # it asks again and again
            assert same.is_linked() and not d.is_linked()
        [said] = [r.message for r in caplog.records if "no KV link to decode-1" in r.message]
        theirs = getattr(usual, field)
        assert said.endswith(f"decode-1 has {field} {value}, the prefill worker {theirs}")

    caplog.set_level("WARNING")
    run_async(scenario())


def test_ranks_whose_parts_do_not_fit_are_refused_by_both_layouts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = msgspec.structs.replace(LAYOUT, ranks=2)

    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker("decode-1", layout=other) as d:
            d.records = [p.record()]
            await eventually(lambda: "no link to prefill-0" in caplog.text)

    caplog.set_level("WARNING")
    run_async(scenario())
    [said] = [r.message for r in caplog.records if "no KV link to decode-1" in r.message]
    heads = LAYOUT.token.heads
    assert said.endswith(
        f"decode-1 has {heads} KV heads on each of 2 ranks, the prefill worker {heads} on each of "
        "1: choose the same --tensor-parallel-size"
    )


def test_a_worker_whose_blocks_do_not_fit_is_a_line_on_each_side_not_one_an_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = msgspec.structs.replace(LAYOUT, dtype="bfloat16")

    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker("decode-1", layout=other) as d:
            d.records = [p.record()]
            await eventually(lambda: len(attempts()) > 5)

    def attempts() -> list[str]:
        return [each.message for each in caplog.records if each.message.startswith("no link to")]

    caplog.set_level("DEBUG", logger="pagewire")
    run_async(scenario())
    lines = [each.message for each in caplog.records if each.levelname in ("INFO", "WARNING")]
    assert sorted(line.partition(":")[0] for line in lines if "decode-1" in line) == [
        "control client decode-1 is gone",
        "no KV link to decode-1",
        attempts()[0].partition(":")[0],
    ]


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("side", ["decode-0", "the prefill worker"])
def test_a_block_must_fit_a_slot_of_both_workers(side: str, missing: int) -> None:
    """With ranks, a block may take more than with this worker's own number of them."""

    async def scenario() -> None:
        async with prefill_worker() as p, decode_by_hand(p) as decode:
            size = {"slot_bytes": SMALLEST - missing} if side == "decode-0" else {}
            if not size:
                p.sender.staging.slot_bytes = SMALLEST - missing
            error = await decode.say_hello(**size)
            wanted = (
                f"a staging slot of {side} has {SMALLEST - 1} bytes, and a block between the two "
                f"workers takes {SMALLEST}: raise PAGEWIRE_STAGING_SLOT_BYTES there"
            )
            assert error == (wanted if missing else None)
            assert len(p.sender.links) == 1 - missing

    run_async(scenario())


@pytest.mark.parametrize(
    "endpoint",
    ["", "nonsense", "tcp://no-such-host.invalid:5", "tcp://[::1", "🐍"],
)
def test_an_endpoint_that_is_none_is_refused_by_name(endpoint: str) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_by_hand(p) as decode:
            assert repr(endpoint) in (await decode.say_hello(endpoint=endpoint) or "")
            assert not len(p.sender.links)
            assert await decode.say_hello(link=2) is None  # the connection goes on

    run_async(scenario())


def test_an_endpoint_where_nobody_listens_costs_others_nothing() -> None:
    async def scenario() -> None:
        async with (
            prefill_worker() as p,
            decode_worker("decode-1") as d,
            router_of(d) as router,
        ):
            async with decode_by_hand(p) as decode:
                assert await decode.say_hello() is None  # nobody knows yet
                await d.link_to(p)
                router.generate()
                await router.answer()
                assert len(p.sender.links) == 2
            await eventually(lambda: len(p.sender.links) == 1)

    run_async(scenario())


def test_a_worker_without_a_common_transport_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_by_hand(p) as decode:
            error = await decode.say_hello(transports={"pigeon": b"coo"})
            assert "pigeon: this worker does not have it" in (error or "")

    run_async(scenario())


def test_a_second_hello_replaces_the_first_link() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_by_hand(p) as decode:
            for number in (1, 2):
                assert await decode.say_hello(link=number) is None
                await p.engine.call(lambda _core: None, 5)
                assert len(p.sender.links) == 1

    run_async(scenario())


def test_a_decode_worker_that_leaves_right_after_its_hello_is_forgotten() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p:
            for _ in range(5):
                async with decode_by_hand(p) as decode:
                    decode.connection.control.post(hello(endpoint="tcp://localhost:1"))
            await eventually(lambda: not p.server.peers)
            await asyncio.sleep(0.1)
            await p.engine.call(lambda _core: None, 5)
            assert not len(p.sender.links)

    run_async(scenario())


def test_one_prefill_worker_more_than_fits_is_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(prefill_worker(f"prefill-{n}")) for n in range(9)
            ]
            d = await stack.enter_async_context(decode_worker(slots=16))
            router = await stack.enter_async_context(router_of(d))
            await d.link_to(*workers[:8])
            links = d.links.open_epochs
            d.records.append(workers[8].record())
            await eventually(lambda: "no link to prefill-8" in caplog.text)
            for n in range(9):  # named or not, the ninth gets no job
                router.generate(f"r{n}", prompt_of(9, first=n), (f"prefill-{n}",))
                await router.answer(f"r{n}")
            assert [router.prefilled_by(f"r{n}") for n in range(8)] == [
                f"prefill-{n}" for n in range(8)
            ]
            assert d.links.open_epochs == links
            d.records = [worker.record() for worker in workers[1:]]
            workers[0].must_be_idle = False
            await workers[0].server.close()
            await eventually(lambda: d.is_linked("prefill-8"))

    run_async(scenario())
    [said] = [r.message for r in caplog.records if "no link to prefill-8" in r.message]
    assert "8 KV links are open" in said and "PAGEWIRE_STAGING_SLOTS" in said


def test_a_busy_engine_leaves_no_link_that_nobody_waits_for() -> None:
    async def scenario() -> None:
        async with prefill_worker(times=Times(transfer_s=0.2)) as p, decode_by_hand(p) as decode:
            with p.stuck():
                assert "the engine is busy" in (await decode.say_hello() or "")
            await p.engine.call(lambda _core: None, 5)
            assert not len(p.sender.links)

    run_async(scenario())


def test_a_link_is_tested_although_another_ones_segments_fill_the_senders_staging() -> None:
    async def scenario() -> None:
        async with (
            prefill_worker(slots=1) as p,
            decode_worker("decode-0") as first,
            decode_worker("decode-1") as second,
            router_of(first) as router,
        ):
            await first.link_to(p)
            p.device.has_moved = False
            router.generate()
            await eventually(lambda: not p.side.slots.num_idle)
            second.records = [p.record()]
            await eventually(lambda: len(p.sender.links) == 2)
            await asyncio.sleep(0.2)  # the new link gets its credits
            p.device.has_moved = True
            await eventually(lambda: second.is_linked())
            await router.answer()

    run_async(scenario())
