"""Health and metrics."""

import asyncio
import re
import time

import msgspec
import pytest

from pagewire.services.cli.client.snapshot import fetch_snapshot
from pagewire.services.router.cluster.worker_links import WorkerLink
from pagewire.shared.cluster.redis_client import cluster_tag
from pagewire.shared.cluster.worker_record import WorkerLoad
from pagewire.shared.control.protocol import PROTOCOL_VERSION, ControlMessage
from pagewire.tests.support.aio import eventually, run_async, until_returns
from pagewire.tests.support.documents import ROOT
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker, fake_prefill_worker, link
from pagewire.tests.support.live_router import (
    ANSWER,
    MODEL,
    SECRET,
    TEXT,
    LiveRouter,
    live_router,
    with_worker,
)
from pagewire.tests.support.worker_records import client_of, record


def test_without_workers_health_is_red_and_requests_say_when_to_come_back(redis_url):
    async def main() -> None:
        async with live_router(redis_url) as router:
            assert (await router.http.get("/health")).status_code == 200  # it is alive
            health = await router.cluster()
            assert health.status_code == 503
            assert health.json()["status"] == "no decode worker"
            assert health.json()["services"] == []
            ready = await router.http.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "no decode worker"})
            for stream in (False, True):
                response = await router.chat(stream=stream)
                assert response.status_code == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert response.json()["error"]["code"] == "no_worker_available"
            assert (await router.http.get("/v1/models")).status_code == 200
            async with FakeDecodeWorker(redis_url, SECRET, answer=ANSWER):
                await router.ready()
                ready = await router.http.get("/ready")
                assert (ready.status_code, ready.json()) == (200, {"status": "ok"})
                assert (await router.chat()).status_code == 200

    run_async(main())


def test_health_is_red_until_the_expected_workers_are_there(redis_url):
    async def main() -> None:
        names = ("decode-0", "prefill-0")
        links = [link("decode-0", 1.5)]
        async with (
            live_router(redis_url, expected_workers=names) as router,
            FakeDecodeWorker(redis_url, SECRET, "decode-0", answer=ANSWER),
        ):
            await router.ready()
            alive = await router.http.get("/health")
            assert (alive.status_code, alive.json()["status"]) == (200, "starting")
            assert (await router.http.get("/ready")).status_code == 503
            health = await router.cluster()
            assert (health.status_code, health.json()["status"]) == (503, "starting")
            assert health.json()["waiting_for"] == ["prefill-0"]
            assert (await router.chat()).status_code == 200  # it serves meanwhile
            async with fake_prefill_worker(redis_url, SECRET, "prefill-0", links=links):
                await eventually(lambda: router.service.describe_cluster()["status"] == "ok")
            await eventually(lambda: len(router.service.members.directory.workers()) == 1)
            assert (await router.http.get("/ready")).status_code == 200  # it can serve

    run_async(main())


def test_health_names_workers_and_their_links(redis_url):
    async def main() -> None:
        async with (
            live_router(redis_url) as router,
            FakeDecodeWorker(redis_url, SECRET, "decode-0", links=[link("prefill-1", 2.5)]),
            fake_prefill_worker(
                redis_url, SECRET, "prefill-0", links=[link("decode-0", 1.5), link("gone")]
            ),
            fake_prefill_worker(redis_url, SECRET, "prefill-1"),
        ):
            await router.ready()
            await eventually(lambda: len(router.service.members.directory.workers()) == 3)
            body = (await router.cluster()).json()
        assert body["status"] == "ok"
        assert body["model"] == MODEL
        prefill, other, decode = body["services"]
        assert (prefill["id"], prefill["role"], prefill["links"]) == ("prefill-0", "prefill", [])
        [back] = other["links"]
        assert (back["peer"], back["gb_per_s"]) == ("decode-0", 2.5)
        assert prefill["missing_links"] == other["missing_links"] == []
        assert decode["missing_links"] == ["prefill-1"]
        assert (decode["id"], decode["state"], decode["epoch"]) == ("decode-0", "ready", 1)
        assert decode["kv_transports"] == ["zmq"]
        [found] = decode["links"]
        assert found == {"peer": "prefill-0", "transport": "zmq", "gb_per_s": 1.5, "bytes": 0}

    run_async(main())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_that_died_is_unreachable_while_its_record_stays(redis_url, role):
    async def main() -> None:
        async with (
            live_router(redis_url) as router,
            FakeDecodeWorker(redis_url, SECRET, f"{role}-0", role=role) as worker,
        ):

            async def states() -> list[str]:
                return [each["state"] for each in (await router.cluster()).json()["services"]]

            await until_returns(states, ["ready"])
            await worker.die()
            await until_returns(states, ["unreachable"])

    run_async(main())


def test_health_names_workers_of_another_release(redis_url):
    later = PROTOCOL_VERSION + 1

    async def main() -> None:
        async with (
            live_router(redis_url) as router,
            FakeDecodeWorker(redis_url, SECRET, "decode-0", protocol=later, epoch=7),
            fake_prefill_worker(redis_url, SECRET, "prefill-0"),
        ):
            await eventually(lambda: router.service.members.directory.others)
            await eventually(lambda: router.service.members.prefill_links.get("prefill-0"))
            response = await router.cluster()
            assert response.status_code == 503
            assert (await router.http.get("/ready")).status_code == 503
            body = response.json()
            assert body["protocol"] == PROTOCOL_VERSION
            [prefill, decode] = body["services"]
            assert prefill["state"] == "ready"
            assert (decode["id"], decode["role"], decode["epoch"]) == ("decode-0", "decode", 7)
            assert (decode["state"], decode["protocol"]) == ("another version", later)
            # Prometheus finds it, too, so that its release shows.
            names = [each["labels"]["instance"] for each in await router.targets()]
            assert names[:2] == ["decode-0", "prefill-0"]
            assert (await router.complete(prompt="Hi")).status_code == 503
            shown = await fetch_snapshot(router.http, router.service.pages.operator_endpoint)
            assert not shown.ok
            assert [each.state for each in shown.services] == ["ready", "another version"]

    run_async(main())


def test_metrics_show_requests_and_workers(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt="Hi", max_tokens=10))
        label = f'{{model_name="{MODEL}"}}'
        await eventually(lambda: router.service.dispatcher.admission.num_waiting == 1)
        assert await router.metric(f"vllm:num_requests_waiting{label}") == 1
        worker.hold.set()
        assert (await pending).status_code == 200
        assert await router.metric(f"vllm:num_requests_waiting{label}") == 0
        assert await router.metric(f"vllm:time_to_first_token_seconds_count{label}") == 1
        assert await router.metric(f"vllm:inter_token_latency_seconds_count{label}") == 9
        assert await router.metric(f"vllm:generation_tokens_total{label}") == 10
        assert await router.metric("pagewire_redis_up") == 1
        ready = 'pagewire_workers{state="ready",worker_role="decode"}'
        assert await router.metric(ready) == 1

    with_worker(redis_url, scenario)


def test_an_answer_that_ends_at_a_stop_string_has_its_workers_times(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.step_s = 0.05  # longer than the times that it reports
        stop = TEXT[len(TEXT) // 2 :][:3]
        answer = await router.complete(prompt="Hi", stop=[stop], max_tokens=100)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert answer.json()["usage"]["completion_tokens"] < len(worker.answer)
        of_model = f'{{model_name="{MODEL}"}}'
        name = "vllm:request_prefill_time_seconds_sum"
        assert await router.metric(f"{name}{of_model}") == pytest.approx(0.02)
        [shown] = router.service.recent.newest_first()
        assert {"queued", "prefill"} <= {part.name for part in shown.parts}

    with_worker(redis_url, scenario)


def test_the_time_to_place_a_request_ends_before_its_worker_can_begin(redis_url, monkeypatch):
    slow_s = 0.2
    post = WorkerLink.post

    def post_slowly(link: WorkerLink, message: ControlMessage) -> None:
        post(link, message)
        time.sleep(slow_s)  # the process does not run

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        monkeypatch.setattr(WorkerLink, "post", post_slowly)
        timings = (await router.complete(prompt="Hi", timings=True)).json()["timings"]
        [choice] = timings["choices"]
        assert 0 < choice["placed_ms"] < timings["first_token_ms"] - 1000 * slow_s

    with_worker(redis_url, scenario)


def test_each_request_for_an_answer_counts_once_by_its_outcome(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async def counts() -> dict[str, float]:
            page = await router.metrics_page()
            found = re.findall(
                r'^pagewire_requests_total{outcome="(\w+)"} (.*)$', page, re.MULTILINE
            )
            return {outcome: float(value) for outcome, value in found}

        nothing = dict.fromkeys(("answered", "refused", "invalid", "failed", "gone"), 0)
        assert await counts() == nothing
        assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200
        assert (await router.complete(prompt="Hi", max_tokens=2, stream=True)).status_code == 200
        assert (await router.complete(prompt="Hi", max_tokens=-2)).status_code == 400
        assert (await router.http.get("/v1/models/other")).status_code == 404  # none
        worker.hold.clear()
        pending = [asyncio.create_task(router.complete(prompt="Hi")) for _ in range(4)]
        await eventually(lambda: router.service.dispatcher.admission.num_waiting == 4)
        assert (await router.complete(prompt="Hi")).status_code == 429
        pending[0].cancel()
        await eventually(lambda: router.service.dispatcher.admission.num_waiting == 3)
        worker.hold.set()
        assert {(await each).status_code for each in pending[1:]} == {200}
        expected = nothing | {"answered": 5, "invalid": 1, "refused": 1, "gone": 1}
        for _ in range(100):
            if (found := await counts()) == expected:
                break
            await asyncio.sleep(0.02)
        assert found == expected

    with_worker(redis_url, scenario, max_queue=4)


def test_the_documents_list_the_metrics_that_have_vllms_names(redis_url):
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    present, absent = re.search(
        r"metrics have vLLM's names, (.*?)\n\n.* stay empty, (.*?)\n$", page, re.DOTALL
    ).groups()

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        page = await router.metrics_page()
        names = re.findall(r"^# TYPE (vllm:\w+)", page, re.MULTILINE)
        families = {name for name in names if not name.endswith("_created")}  # off in a process
        families.add("vllm:num_preemptions_total")  # of workers
        assert set(re.findall(r"vllm:\w+", present)) == families
        assert families.isdisjoint(re.findall(r"vllm:\w+", absent))

    with_worker(redis_url, scenario)


def test_a_forged_worker_record_is_neither_used_nor_listed(redis_url):
    """Somebody who may write to Redis has no worker, nor an address that Prometheus would ask."""
    asked: list[int] = []

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(1)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        here = f"127.0.0.1:{port}"
        ends = {"endpoint": f"tcp://{here}", "metrics_endpoint": f"http://{here}"}
        async with server, client_of(redis_url) as redis:
            for worker_id in ("decode-0", "decode-1"):  # one that there is, and another
                forged = msgspec.msgpack.encode(record(worker_id, epoch=2**62, **ends))
                prefix = f"pagewire:{cluster_tag(SECRET)}:worker"
                await redis.set(f"{prefix}:{worker_id}", forged)
                await redis.sadd(f"{prefix}s", worker_id)
            name = 'pagewire_router_ignored_worker_records_total{reason="unsealed"}'
            for _ in range(500):
                if await router.metric(name):
                    break
                await asyncio.sleep(0.01)
            assert {each.worker_id for each in router.service.members.directory.workers()} == {
                "decode-0"
            }
            assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200
            targets = [each["targets"] for each in await router.targets()]
            assert [here] not in targets
        assert asked == []

    with_worker(redis_url, scenario)


def test_clients_learn_neither_metrics_nor_the_cluster(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for path in ("/metrics", "/cluster", "/sd"):
            assert (await router.http.get(path)).status_code == 404
        assert (await router.http.get("/health")).json() == {"status": "ok", "model": MODEL}
        answer = await router.http.get(f"{router.service.pages.operator_endpoint}/metrics")
        assert (answer.status_code, "/sd lists" in answer.text) == (404, True)
        answer = await router.http.get(f"{router.service.pages.operator_endpoint}/v1/models")
        assert answer.status_code == 404

    with_worker(redis_url, scenario)


def test_the_share_of_used_blocks_is_what_the_records_say(redis_url):
    share = f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}}'

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        assert await router.metric(share) == 0
        worker.put_record(load=WorkerLoad(used_blocks=16, total_blocks=64))
        directory = router.service.members.directory
        await eventually(lambda: directory.get("decode-0").load.used_blocks == 16)
        assert await router.metric(share) == 0.25
        (service,) = (await router.cluster()).json()["services"]
        assert service["load"]["used_blocks"] == 16

    with_worker(redis_url, scenario)


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:70000", "http://[::1", "http://xn--\u2028.com", "elsewhere", ""]
)
def test_a_worker_whose_metrics_address_is_nonsense_is_not_listed(redis_url, endpoint):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        assert [each["labels"]["role"] for each in await router.targets()] == ["decode", "router"]
        worker.put_record(metrics_endpoint=endpoint)
        directory = router.service.members.directory
        await eventually(lambda: directory.get("decode-0").metrics_endpoint == endpoint)
        assert [each["labels"]["role"] for each in await router.targets()] == ["router"]

    with_worker(redis_url, scenario)
