"""What `pagewire status` makes of the router's pages."""

import io

import msgspec
from rich.console import Console

from pagewire.services.cli.client import cluster_status
from pagewire.services.cli.client.cluster_status import ClusterStatus, build_status
from pagewire.services.cli.client.status import render
from pagewire.services.cli.cluster_view import ClusterView
from pagewire.services.cli.terminal import print_whole
from pagewire.shared.cluster.worker_record import WorkerLoad
from pagewire.shared.metrics.load import KV_BLOCKS, load_families

VIEW = {
    "status": "ok",
    "model": "demo",
    "services": [
        {"id": "prefill-0", "role": "prefill", "state": "draining"},
        {
            "id": "decode-0",
            "role": "decode",
            "links": [{"peer": "prefill-0", "transport": "ucx", "gb_per_s": 1.25, "bytes": 64}],
        },
    ],
}
METRICS = """\
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="demo"} %(prompt)d
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="demo"} 50.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{model_name="demo"} 200.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{model_name="demo"} 50.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="demo"} 3.0
# TYPE pagewire_redis_up gauge
pagewire_redis_up 1.0
# TYPE pagewire_kv_blocks gauge
pagewire_kv_blocks{role="decode",state="used",worker="decode-0"} 16.0
pagewire_kv_blocks{role="decode",state="total",worker="decode-0"} 64.0
pagewire_kv_blocks{role="decode",state="total",worker="decode-9"} 64.0
# TYPE pagewire_requests_running gauge
pagewire_requests_running{role="decode",worker="decode-0"} 2.0
"""


def snapshot(prompt: int = 1000, at: float = 1.0, metrics: str = METRICS) -> ClusterStatus:
    text = metrics % {"prompt": prompt} if "%(" in metrics else metrics
    return build_status("http://h:1", msgspec.convert(VIEW, ClusterView), text, at)


def shown(found: ClusterStatus, before: ClusterStatus | None = None) -> str:
    console = Console(width=80, record=True, quiet=False, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(render(found, before))
    return captured.get()


def test_what_is_shown_of_a_worker_is_what_workers_show() -> None:
    families = {family.name for family in load_families(WorkerLoad())}
    assert families == {KV_BLOCKS, *cluster_status.WORKER_SAMPLES}


def test_tables_are_whole_on_a_narrow_terminal() -> None:
    out = io.StringIO()
    console = Console(width=30, file=out)
    print_whole(console, render(snapshot()))
    assert shown(snapshot()).split() == out.getvalue().split()
    assert console.width == 30


def test_pages_become_one_status() -> None:
    found = snapshot()
    prefill, decode = found.workers
    assert (decode.running, decode.waiting) == (2.0, None)
    assert (decode.share("used"), decode.share("cached"), prefill.share("used")) == (0.25, 0, None)
    assert found.prefix_hit_rate == 0.25
    body = found.as_json()
    assert body["redis_up"] is True
    assert body["requests"] == {"running": 3.0, "waiting": None}
    assert body["workers"][1]["links"] == VIEW["services"][1]["links"]


def test_view_fits_a_terminal_and_shows_all() -> None:
    text = shown(snapshot())
    assert max(map(len, text.splitlines())) <= 80
    assert max(len(line.rstrip()) for line in text.splitlines()[4:]) <= 64  # the tables
    rows = [line.split() for line in text.splitlines()]
    assert ["prefill-0", "prefill", "draining", "-", "-", "-", "-", "-", "-"] in rows
    assert ["decode-0", "decode", "ready", "2", "-", "-", "25.0%", "0.0%", "64"] in rows
    assert ["prefill-0", "decode-0", "ucx", "1.25"] in rows
    assert "Redis up" in text
    assert "1,000 prompt tokens (25% of them cached), 50 generated" in text


def test_a_context_that_was_cut_is_announced() -> None:
    service = {"id": "decode-0", "role": "decode", "max_model_len": 32, "full_model_len": 4096}
    view = msgspec.convert({"status": "ok", "model": "demo", "services": [service]}, ClusterView)
    found = build_status("http://h:1", view, "", 1.0)
    assert "context of decode-0: 32 tokens of 4,096" in " ".join(shown(found).split())
    assert found.as_json()["workers"][0]["max_model_len"] == 32
    assert "context" not in shown(snapshot())


def test_two_snapshots_give_a_speed() -> None:
    text = shown(snapshot(prompt=1600, at=3.0), before=snapshot())
    assert "now 300 prompt and 0 generated tokens/s" in text


def test_a_restarted_router_has_no_speed() -> None:
    assert "tokens/s" not in shown(snapshot(prompt=10, at=3.0), before=snapshot())


def test_without_metrics_workers_are_still_shown() -> None:
    for metrics in ("", "}} no metrics {{", "<html>"):
        found = snapshot(metrics=metrics)
        assert [worker.service.id for worker in found.workers] == ["prefill-0", "decode-0"]
        assert found.as_json()["redis_up"] is None
        assert "Redis unknown" in shown(found)


def test_a_cluster_that_cannot_serve_says_so() -> None:
    status = {"status": "no decode worker", "model": "demo", "services": []}
    view = msgspec.convert(status, ClusterView)
    assert "no decode worker" in shown(build_status("http://h:1", view, "", 1.0))
