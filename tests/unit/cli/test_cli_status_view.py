"""What `pagewire status` makes of the router's document."""

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pagewire.services.cli.client.snapshot import Snapshot
from pagewire.services.cli.client.status import render, status_json
from pagewire.services.cli.terminal import print_whole

URL = "http://h:1"
SERVICES: list[dict[str, Any]] = [
    {"id": "prefill-0", "role": "prefill", "state": "draining"},
    {
        "id": "decode-0",
        "role": "decode",
        "links": [{"peer": "prefill-0", "transport": "ucx", "gb_per_s": 1.25, "bytes": 64}],
        "load": {"running": 2, "waiting": 1, "used_blocks": 16, "total_blocks": 64},
    },
]
LIVE = {"id": "router-0", "epoch": 1, "running": 3, "cached_tokens": 50, "output_tokens": 50}


def snapshot(prompt: int = 200, at: float = 1.0, **fields: Any) -> Snapshot:
    live = [LIVE | {"prompt_tokens": prompt}]
    document = {"status": "ok", "model": "demo", "services": SERVICES, "live": live, "at": at}
    return msgspec.convert(document | fields, Snapshot)


def shown(found: Snapshot, before: Snapshot | None = None) -> str:
    console = Console(width=80, record=True, quiet=False, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(render(URL, before or found, found))
    return captured.get()


def test_tables_are_whole_on_a_narrow_terminal() -> None:
    out = io.StringIO()
    console = Console(width=30, file=out)
    print_whole(console, render(URL, snapshot(), snapshot()))
    assert shown(snapshot()).split() == out.getvalue().split()
    assert console.width == 30


def test_a_document_becomes_one_status() -> None:
    body = status_json(URL, snapshot())
    assert (body["url"], body["ok"], body["redis_up"]) == (URL, True, True)
    assert body["requests"] == {"running": 3, "waiting": 0}
    assert body["tokens"] == {"prompt": 200, "generated": 50, "prefix_hit_rate": 0.25}
    prefill, decode = body["workers"]
    assert (decode["running"], decode["waiting"], decode["kv_used"]) == (2, 1, 0.25)
    assert decode["kv_blocks"] == {"free": 0, "cached": 0, "used": 16, "total": 64}
    assert decode["links"] == SERVICES[1]["links"]
    assert (prefill["running"], prefill["kv_blocks"], prefill["kv_used"]) == (None, {}, None)


def test_routers_numbers_are_added_up() -> None:
    other = LIVE | {"id": "router-1", "prompt_tokens": 800, "waiting": 7}
    body = status_json(URL, snapshot(live=[LIVE | {"prompt_tokens": 200}, other]))
    assert body["requests"] == {"running": 6, "waiting": 7}
    assert body["tokens"] == {"prompt": 1000, "generated": 100, "prefix_hit_rate": 0.1}


def test_view_fits_a_terminal_and_shows_all() -> None:
    text = shown(snapshot(prompt=1000))
    assert max(map(len, text.splitlines())) <= 80
    assert max(len(line.rstrip()) for line in text.splitlines()[4:]) <= 64  # the tables
    rows = [line.split() for line in text.splitlines()]
    assert ["prefill-0", "prefill", "draining", "-", "-", "-", "-", "-", "-"] in rows
    assert ["decode-0", "decode", "ready", "2", "1", "0", "25.0%", "0.0%", "64"] in rows
    assert ["prefill-0", "decode-0", "ucx", "1.25"] in rows
    assert "Redis up" in text
    assert "1,000 prompt tokens (5% of them cached), 50 generated" in text


def test_a_context_that_was_cut_is_announced() -> None:
    service = {"id": "decode-0", "role": "decode", "max_model_len": 32, "full_model_len": 4096}
    found = snapshot(services=[service])
    assert "context of decode-0: 32 tokens of 4,096" in " ".join(shown(found).split())
    assert status_json(URL, found)["workers"][0]["max_model_len"] == 32
    assert "context" not in shown(snapshot())


def test_two_snapshots_give_a_speed() -> None:
    text = shown(snapshot(prompt=800, at=3.0), before=snapshot())
    assert "now 300 prompt and 0 generated tokens/s" in text
    assert "tokens/s" not in shown(snapshot())


def test_what_a_restarted_router_had_counted_is_no_speed() -> None:
    restarted = snapshot(prompt=10, at=3.0, live=[LIVE | {"epoch": 2, "prompt_tokens": 10}])
    assert "now 0 prompt and 0 generated tokens/s" in shown(restarted, before=snapshot())


@pytest.mark.parametrize(("redis", "is_up"), [("up", True), ("down", False)])
def test_it_says_whether_redis_answers(redis: str, is_up: bool) -> None:
    found = snapshot(redis=redis)
    assert status_json(URL, found)["redis_up"] is is_up
    assert f"Redis {redis}" in shown(found)


def test_a_pool_without_blocks_has_no_shares() -> None:
    found = snapshot(services=[SERVICES[1] | {"load": {"running": 1}}])
    assert ["decode-0", "decode", "ready", "1", "0", "0", "-", "-", "0"] in [
        line.split() for line in shown(found).splitlines()
    ]
    assert status_json(URL, found)["workers"][0]["kv_used"] is None


def test_a_cluster_that_cannot_serve_says_so() -> None:
    found = snapshot(status="no decode worker", services=[], live=[])
    assert "not ready: no decode worker" in shown(found)
    assert status_json(URL, found)["problem"] == "no decode worker"
