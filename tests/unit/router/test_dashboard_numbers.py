"""What the dashboard and `pagewire top` compute: parts of a request's time, rates, quantiles."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pagewire.services.cli.client.snapshot import (
    SHORTEST_INTERVAL_S,
    WINDOW_S,
    Snapshot,
    Window,
    between,
    link_bytes,
)
from pagewire.services.cli.client.top_view import render
from pagewire.services.router.dashboard.cluster_data import ClusterData
from pagewire.services.router.dashboard.recent_requests import RecentRequests, is_shown, parts_of
from pagewire.shared.base.errors import ProtocolError
from pagewire.shared.control.protocol import Timings
from pagewire.shared.metrics.live import (
    MAX_REQUESTS,
    MAX_WORKERS_SHOWN,
    Histogram,
    LivePage,
    RouterLive,
    decode_live,
    newest,
)
from pagewire.tests.support.aio import run_async

FIELDS = {"path": "/v1/completions", "status": 200, "outcome": "ok", "duration_s": 1.0}


def parts(*arguments: Any) -> dict[str, float]:
    return {part.name: round(part.seconds, 6) for part in parts_of(*arguments)}


def test_parts_make_up_the_whole_time() -> None:
    said = Timings(wait_s=0.04, queue_s=0.06, prefill_s=0.2, transfer_s=0.05)
    assert parts(1.0, 0.4, said) == {
        "queued": 0.1,
        "prefill": 0.2,
        "first token": 0.1,
        "transfer": 0.05,
        "tokens": 0.55,
    }
    assert parts(1.0, 0.4, None) == {"first token": 0.4, "tokens": 0.6}
    assert parts(1.0, None, None) == {"no token": 1.0}


@pytest.mark.parametrize("ttft", [0.0, 0.3, 1.0, 2.0])
def test_clocks_of_several_hosts_make_no_part_negative_or_too_long(ttft: float) -> None:
    said = Timings(queue_s=0.5, prefill_s=5.0, transfer_s=9.0)
    found = parts_of(1.0, ttft, said)
    assert all(part.seconds >= 0 for part in found)
    assert sum(part.seconds for part in found) == pytest.approx(1.0)


def test_the_ring_is_bounded_and_the_newest_comes_first() -> None:
    ring = RecentRequests("m")
    for number in range(MAX_REQUESTS + 5):
        ring.note(f"r{number}", FIELDS | {"workers": ["w"] * 99}, None, float(number))
    found = ring.newest_first()
    assert len(found) == MAX_REQUESTS
    assert [each.id for each in found[:2]] == ["r104", "r103"]
    assert len(found[0].workers) == MAX_WORKERS_SHOWN
    page = LivePage(router=RouterLive(id="r", epoch=1), requests=found)
    assert decode_live(msgspec.json.encode(page)) == page


def test_what_asks_for_no_answer_or_has_no_key_pushes_nothing_out() -> None:
    assert is_shown("POST", "/v1/completions", 429)
    assert not is_shown("GET", "/v1/models", 200)
    assert not is_shown("POST", "/v1/completions", 401)
    assert not is_shown("OPTIONS", "/v1/completions", 200)
    assert not is_shown("GET", "/v1/completions", 405)


def test_requests_of_several_routers_are_merged_by_time() -> None:
    pages = []
    for name, first in (("a", 0), ("b", 1)):
        ring = RecentRequests("m")
        for number in range(first, 160, 2):
            ring.note(f"{name}{number}", FIELDS, None, float(number))
        router = RouterLive(id=name, epoch=1)
        pages.append(LivePage(router=router, requests=ring.newest_first()))
    found = newest(pages)
    assert [each.id for each in found[:3]] == ["b159", "a158", "b157"]
    assert len(found) == MAX_REQUESTS


def test_who_asks_at_the_shortest_interval_gets_a_new_document_each_time() -> None:
    """A document may take longer than the next one, so half of the interval is enough."""

    async def main() -> None:
        ring, now = RecentRequests("m"), 0.0

        def own() -> LivePage:
            return LivePage(router=RouterLive(id="r", epoch=1), requests=ring.newest_first())

        data = ClusterData(lambda: {"model": "m"}, own, list, lambda: now)
        first = await data.body()
        ring.note("one", FIELDS, None, 1.0)
        assert await data.body() is first  # many browsers cost no more than one
        now += SHORTEST_INTERVAL_S / 2
        later = msgspec.json.decode(await data.body())
        assert [each["id"] for each in later["requests"]] == ["one"]

    run_async(main())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"router": {"id": "", "epoch": 1}}',
        b'{"router": {"id": "r", "epoch": 1, "ttft": {"bounds": [1.0], "counts": [1]}}}',
        b'{"router": {"id": "r", "epoch": 1, "ttft": {"counts": [1]}}}',
    ],
)
def test_what_is_not_a_routers_page_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a router's numbers"):
        decode_live(body)


def test_quantiles_are_those_of_histogram_quantile() -> None:
    values = Histogram([1.0, 2.0, 4.0], [2, 4, 2, 0])
    assert values.quantile(0.5) == 1.5
    assert values.quantile(0.25) == 1.0
    assert values.quantile(0.875) == 3.0
    assert Histogram([1.0, 2.0], [0, 0, 5]).quantile(0.5) == 2.0
    assert Histogram([1.0], [0, 0]).quantile(0.5) is None
    assert Histogram().quantile(0.5) is None


def test_what_was_added_since_and_by_another() -> None:
    old, new = Histogram([1.0], [1, 2]), Histogram([1.0], [4, 2])
    assert new.since(old) == Histogram([1.0], [3, 0])
    assert new.since(Histogram([2.0], [9, 9])) == new
    assert Histogram().plus(new) == new
    assert old.plus(new) == Histogram([1.0], [5, 4])


def snapshot(at: float, epoch: int = 1, sent: int = 0, tokens: int = 0) -> Snapshot:
    router = {"id": "r", "epoch": epoch, "output_tokens": tokens, "prompt_tokens": 2 * tokens}
    router |= {"cached_tokens": tokens, "running": 1}
    link = {"peer": "p", "transport": "zmq", "bytes": sent}
    load = {"used_blocks": 16, "cached_blocks": 16, "total_blocks": 64}
    services = [
        {"id": "p", "role": "prefill", "epoch": 1},
        {"id": "d[bold]", "role": "decode", "epoch": epoch, "links": [link], "load": load},
    ]
    request = FIELDS | {"id": "x\x1b[2J", "ended_at": 1.0, "model": "m", "ttft_s": 0.5}
    request["parts"] = [{"name": "first token", "seconds": 0.5}, {"name": "new", "seconds": 0.5}]
    body = {"status": "ok", "model": "m", "at": at, "live": [router], "services": services}
    return msgspec.convert(body | {"requests": [request], "silent": ["r2"]}, Snapshot)


def test_two_documents_give_rates() -> None:
    found = between(snapshot(10.0), snapshot(12.0, sent=1000, tokens=50))
    assert (found.output, found.prompt, found.cached_share) == (25.0, 50.0, 0.5)
    assert (found.transfer, found.running) == (500.0, 1)
    same = between(snapshot(10.0), snapshot(10.0))
    assert (same.output, same.transfer) == (None, None)


def test_the_window_is_bounded_whatever_a_routers_clock_does() -> None:
    now = 0.0
    window = Window(lambda: now)
    first = snapshot(5000.0)
    assert window.add(first) is first
    for step in range(1, 200):
        now = step / 2
        found = snapshot(1000.0 + now, tokens=step)  # set back by more than an hour
        before = window.add(found)
        assert len(window) <= 2 * WINDOW_S + 2
    assert between(before, found).output == pytest.approx(2.0)
    assert found.at - before.at == WINDOW_S


def test_a_router_or_worker_that_was_started_again_counts_from_its_next_document() -> None:
    before, now = snapshot(10.0, 1, 9000, 90), snapshot(12.0, 2, 10, 5)
    assert between(before, now).output == 0.0
    assert link_bytes(before, now) == {}


def shown(width: int, lines: int | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(render(snapshot(10.0), snapshot(12.0, sent=3000, tokens=50), lines))
    return out.getvalue()


def test_the_terminal_shows_it_all_and_nothing_that_a_terminal_obeys() -> None:
    text = shown(120)
    assert "25 generated/s, 50 prompt tokens/s, 50% of them cached" in text
    assert "without the numbers of r2" in text
    assert "d[bold]" in text
    assert "\x1b" not in text
    assert "■ first token ■ new" in text
    [row] = [line for line in text.splitlines() if line.startswith("d[bold]")]
    assert (row.count("█"), row.count("░"), row.split()[-1]) == (12, 12, "25%")
    assert "1.5 kB/s" in text
    assert max(map(len, text.splitlines())) <= 120
    assert len(shown(120, 5).splitlines()) >= 14


def large_cluster(size: int, **more: Any) -> Snapshot:
    """As many workers of each role, all linked with all, and as many requests as a document has."""
    load = {"used_blocks": 16, "cached_blocks": 16, "total_blocks": 64, "running": 1}
    services: list[dict[str, Any]] = [
        {"id": f"prefill-{number}", "role": "prefill", "epoch": 1, "load": load}
        for number in range(size)
    ]
    services += [
        {
            "id": f"decode-{number}",
            "role": "decode",
            "epoch": 1,
            "load": load | {"running": number},
            "state": "unreachable" if number == 1 else "ready",
            "links": [{"peer": f"prefill-{peer}", "transport": "zmq"} for peer in range(size)],
        }
        for number in range(size)
    ]
    counts = {"prompt_tokens": 12_345, "cached_tokens": 12_288, "output_tokens": 1_024}
    requests = [
        FIELDS
        | {"id": f"{number:032x}", "ended_at": 1.0, "model": "m", "ttft_s": 0.25, "key": "alice"}
        | counts
        | {"duration_s": 12.5, "parts": [{"name": "tokens", "seconds": 12.5}]}
        for number in range(MAX_REQUESTS)
    ]
    body = {"status": "ok", "model": "m", "at": 1.0, "services": services, "requests": requests}
    return msgspec.convert(body | more, Snapshot)


def drawn(found: Snapshot, width: int, lines: int | None) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(render(found, found, lines))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_request_is_one_line_and_its_bar_gives_way_to_its_numbers(width: int) -> None:
    rows = drawn(large_cluster(1), width, 40)
    at = next(number for number, row in enumerate(rows) if row.startswith("ended"))
    names = "ended id key status prompt cached output TTFT time"
    assert rows[at].split() == names.split()
    assert len(rows[at + 1 :]) >= 20
    for number, row in enumerate(rows[at + 1 :]):
        *words, bar = row.split()
        assert words[2:] == ["alice", "ok", "12,345", "12,288", "1,024", "250", "ms", "12.50", "s"]
        assert words[1].rstrip("…") in f"{number:032x}"
        assert set(bar) == {"█"}
        assert len(bar) <= 24


def test_a_narrow_terminal_breaks_no_line_of_a_table() -> None:
    for width in (20, 40, 60):
        rows = drawn(large_cluster(2), width, 60)
        assert max(map(len, rows)) <= width
        assert sum(row.startswith(("prefill", "decode", "pre", "dec")) for row in rows) >= 4


@pytest.mark.parametrize("lines", [24, 40, 60])
def test_many_workers_and_links_leave_room_for_requests(lines: int) -> None:
    found = large_cluster(20)
    rows = drawn(found, 120, lines)
    assert len(rows) <= lines
    workers = [row for row in rows if "unreachable" in row or "ready" in row]
    # What needs a look comes first, then what has most to do.
    assert [row.split()[0] for row in workers[:2]] == ["decode-1", "decode-19"]
    hidden = [int(row.split()[1].replace(",", "")) for row in rows if row.startswith("and ")]
    links = sum(" zmq " in row for row in rows)
    assert hidden == [40 - len(workers), 400 - links]
    assert links >= 1
    assert sum(" alice " in row for row in rows) >= (lines - 14) // 3
    everything = drawn(found, 120, None)
    assert sum(" zmq " in row for row in everything) == 400


def test_the_terminal_says_that_redis_is_away() -> None:
    found = large_cluster(0, redis="down")
    assert "Redis does not answer" in drawn(found, 80, 24)
    assert "Redis does not answer" not in drawn(large_cluster(0), 80, 24)
