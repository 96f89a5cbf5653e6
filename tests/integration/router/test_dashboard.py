"""The dashboard of live routers: its document, its files, `pagewire top`, and a real browser."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack

import httpx
import pytest

from pagewire.services.router.dashboard.pages import FILES
from pagewire.shared.cluster.redis_client import connect_redis
from pagewire.shared.cluster.routers import RouterDirectory
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.browser import Browser, browser
from pagewire.tests.support.client_cluster import CLI, NOWHERE, Cluster, client_cluster, pagewire
from pagewire.tests.support.fake_decode_worker import (
    HEARTBEAT_S,
    LEASE_S,
    FakeDecodeWorker,
    fake_prefill_worker,
    link,
)
from pagewire.tests.support.live_router import ANSWER, MODEL, SECRET, LiveRouter, live_router

HOSTILE = "<img src=x onerror=document.title='owned'>"
MODEL_NAME = "<b>bold</b>&amp;"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with client_cluster() as found:
        yield found


def ask(cluster: Cluster, request_id: str) -> None:
    asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 3}
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json=asked, headers={"x-request-id": request_id}
    )
    assert answer.status_code == 200


async def document(router: LiveRouter) -> httpx.Response:
    return await router.http.get(f"{router.service.pages.operator_endpoint}/dashboard/data")


def test_each_router_shows_the_requests_and_numbers_of_all(redis_url: str) -> None:
    async def main() -> None:
        async with (
            # Its first token takes longer than the timings that it reports.
            FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, step_s=0.05),
            live_router(redis_url, router_id="router-0") as first,
            live_router(redis_url, router_id="router-1") as second,
        ):
            await first.ready()
            await second.ready()
            await eventually(lambda: first.service.members.routers.others())
            await eventually(lambda: second.service.members.routers.others())
            for router, name in ((first, "one"), (second, "two")):
                headers = {"x-request-id": name}
                asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 3}
                await router.http.post("/v1/completions", json=asked, headers=headers)
            for router in (first, second):
                found = (await document(router)).json()
                assert [each["id"] for each in found["requests"]] == ["two", "one"]
                assert [each["output_tokens"] for each in found["live"]] == [3, 3]
                assert [each["id"] for each in found["routers"]] == ["router-0", "router-1"]
                assert found["silent"] == []
            two = found["requests"][0]
            assert (two["workers"], two["output_tokens"]) == (["decode-0"], 3)
            names = [part["name"] for part in two["parts"]]
            assert names == ["queued", "prefill", "first token", "tokens"]
            whole = sum(part["seconds"] for part in two["parts"])
            assert whole == pytest.approx(two["duration_s"])

    run_async(main())


def test_a_document_of_all_routers_stalls_no_stream(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the certificates of authorities takes tens of milliseconds of the event loop."""
    loads: list[object] = []

    def load(_context: ssl.SSLContext, *arguments: object, **named: object) -> None:
        loads.append(arguments or named)

    async def main() -> None:
        async with (
            live_router(redis_url, router_id="router-0") as first,
            live_router(redis_url, router_id="router-1"),
        ):
            await eventually(lambda: first.service.members.routers.others())
            monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", load)
            assert (await document(first)).json()["silent"] == []

    run_async(main())
    assert loads == []


def test_a_router_that_does_not_answer_is_named_and_the_rest_is_shown(redis_url: str) -> None:
    async def nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        redis = await connect_redis(redis_url)
        other = RouterDirectory(redis, SECRET, "c", HEARTBEAT_S, LEASE_S, lambda: "ready")
        await other.start(f"http://127.0.0.1:{port}")
        async with server, live_router(redis_url, router_id="b") as router:
            await eventually(lambda: router.service.members.routers.others())
            found = (await document(router)).json()
            assert found["silent"] == ["c"]
            assert [each["id"] for each in found["live"]] == ["b"]
        await other.close()
        await redis.aclose()

    run_async(main())


def test_files_may_load_nothing_from_elsewhere_and_clients_reach_none(cluster: Cluster) -> None:
    paths = ["", "/data", *(f"/{name}" for name in FILES if name != "page.html")]
    for path in paths:
        answer = httpx.get(f"{cluster.operator_url}/dashboard{path}")
        policy = answer.headers["content-security-policy"]
        assert (answer.status_code, "default-src 'none'" in policy) == (200, True)
        assert "unsafe" not in policy
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "") or path == "/data"
        assert httpx.get(f"{cluster.url}/dashboard{path}").status_code == 404


def test_top_prints_once_where_there_is_no_terminal(cluster: Cluster) -> None:
    ask(cluster, "seen-by-top")
    done = pagewire("top", "--operator-url", cluster.operator_url, "--interval", "0.2")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.count("seen-by-top") == 1
    rows = [line.split()[:3] for line in done.stdout.splitlines()]
    assert ["decode-0", "decode", "ready"] in rows
    assert ["prefill-0", "decode-0", "zmq"] in rows


def test_top_on_a_terminal_ends_with_ctrl_c(cluster: Cluster) -> None:
    command = [*CLI, "top", "--operator-url", cluster.operator_url, "--interval", "0.2"]
    # `script` gives it a terminal. `exec` leaves no shell that Ctrl-C would end with another code.
    with subprocess.Popen(
        ["script", "-qefc", " ".join(["exec", *command]), "/dev/null"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        seen = b""
        while seen.count(b"decode-0") < 3:
            part = process.stdout.read1(1 << 16)
            assert part, seen
            seen += part
        process.stdin.write(b"\x03")
        process.stdin.flush()
        rest = process.stdout.read()
        assert process.wait(10) == 0, rest
    assert b"Traceback" not in rest


@pytest.mark.parametrize("command", ["top", "status --watch"])
def test_a_terminal_that_cannot_be_redrawn_gets_lines(cluster: Cluster, command: str) -> None:
    words = [*CLI, *command.split(), *(["0.2"] if "watch" in command else [])]
    line = " ".join(["exec", "env", "TERM=dumb", *words, "--operator-url", cluster.operator_url])
    with subprocess.Popen(
        ["script", "-qefc", line, "/dev/null"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        seen = b""
        while seen.count(b"decode-0") < (4 if "watch" in command else 1):
            part = process.stdout.read1(1 << 16)
            assert part, seen
            seen += part
        if "watch" in command:
            process.stdin.write(b"\x03")
            process.stdin.flush()
        seen += process.stdout.read()
        assert process.wait(10) == 0, seen
    assert b"\x1b" not in seen


def test_top_where_nobody_is(cluster: Cluster) -> None:
    done = pagewire("top", "--operator-url", NOWHERE)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no Pagewire router answers operators" in done.stderr


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_workers_and_requests(cluster: Cluster, page: Browser, scheme: str) -> None:
    ask(cluster, f"first-{scheme}")
    page.show(f"{cluster.operator_url}/dashboard", scheme=scheme)
    page.wait_for(f"document.body.innerText.includes('first-{scheme}')")
    ask(cluster, f"second-{scheme}")  # comes without a reload
    page.wait_for(f"document.body.innerText.includes('second-{scheme}')")
    workers = page.text("#workers")
    assert "decode-0" in workers
    assert "prefill-0" in workers
    assert "1.5 GB/s" in page.text("#links")
    bars = "[...document.querySelectorAll('#requests tbody tr:first-child .bar i')]"
    assert page.evaluate(f"{bars}.reduce((sum, each) => sum + each.offsetWidth, 0)") > 50
    assert page.evaluate("document.querySelectorAll('#tiles svg').length") == 6
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == {"light": "rgb(246, 247, 248)", "dark": "rgb(20, 23, 26)"}[scheme]
    assert page.complaints == []


@pytest.mark.browser
def test_a_page_that_is_hidden_and_shown_asks_once_at_a_time(
    cluster: Cluster, page: Browser
) -> None:
    page.show(f"{cluster.operator_url}/dashboard")
    page.wait_for("document.documentElement.dataset.shown")
    page.evaluate("""
        (() => {
          const real = window.fetch;
          Object.assign(window, { asked: 0, open: 0, most: 0 });
          window.fetch = async (...all) => {
            window.asked += 1;
            window.most = Math.max(window.most, ++window.open);
            await new Promise((done) => setTimeout(done, 300));
            try { return await real(...all); } finally { window.open -= 1; }
          };
          for (let shown = 0; shown < 5; shown += 1) {
            document.dispatchEvent(new Event("visibilitychange"));
          }
        })()
    """)
    page.wait_for("window.asked >= 2")
    assert page.evaluate("window.most") == 1


@pytest.mark.browser
def test_a_narrow_window_scrolls_tables_and_not_the_page(cluster: Cluster, page: Browser) -> None:
    ask(cluster, "a-request-with-a-rather-long-name-of-its-own" * 2)
    page.show(f"{cluster.operator_url}/dashboard", width=360, height=700)
    page.wait_for("document.querySelectorAll('#requests tbody tr').length")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
def test_many_workers_and_links_leave_requests_in_sight(redis_url: str, page: Browser) -> None:
    names = [f"prefill-{number}" for number in range(40)]
    table = "document.getElementById('workers')"

    async def main() -> None:
        async with AsyncExitStack() as stack:
            links = [link(name) for name in names]
            decode = FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, links=links)
            await stack.enter_async_context(decode)
            for name in names:
                await stack.enter_async_context(fake_prefill_worker(redis_url, SECRET, name))
            router = await stack.enter_async_context(live_router(redis_url))
            await router.ready()
            await eventually(lambda: len(router.service.members.directory.workers()) == 41)
            url = f"{router.service.pages.operator_endpoint}/dashboard"
            await asyncio.to_thread(page.show, url, height=900)
            rows = "document.querySelectorAll('#workers tbody tr, #links tbody tr').length == 81"
            await asyncio.to_thread(page.wait_for, rows)
            assert "41 ready" in await asyncio.to_thread(page.text, "#states")
            top = "document.getElementById('requests').getBoundingClientRect().top"
            assert await asyncio.to_thread(page.evaluate, f"{top} < 2 * innerHeight")
            # Where one has scrolled to stays, with the next document, too.
            scroll = f"{table}.parentElement.scrollTop"
            await asyncio.to_thread(page.evaluate, f"{scroll} = 300")
            await asyncio.to_thread(page.evaluate, f"{table}.rows[1].id = 'old'")
            await asyncio.to_thread(page.wait_for, "!document.getElementById('old')")
            assert await asyncio.to_thread(page.evaluate, scroll) == 300

    run_async(main(), 100)


@pytest.mark.browser
def test_names_that_look_like_html_are_text(redis_url: str, page: Browser) -> None:
    async def main() -> None:
        async with (
            live_router(redis_url, served_model_name=MODEL_NAME) as router,
            FakeDecodeWorker(redis_url, SECRET, answer=ANSWER),
            fake_prefill_worker(redis_url, SECRET, HOSTILE),
        ):
            await router.ready()
            await eventually(lambda: len(router.service.members.directory.workers()) == 2)
            url = f"{router.service.pages.operator_endpoint}/dashboard"
            await asyncio.to_thread(page.show, url)
            ready = "document.querySelectorAll('#workers tbody tr').length == 2"
            await asyncio.to_thread(page.wait_for, ready)
            assert HOSTILE in await asyncio.to_thread(page.text, "#workers")
            assert await asyncio.to_thread(page.text, "#model") == MODEL_NAME
            images = await asyncio.to_thread(page.evaluate, "document.images.length")
            assert images == 0
            title = await asyncio.to_thread(page.evaluate, "document.title")
            assert title == f"Pagewire · {MODEL_NAME}"
            assert page.complaints == []

    run_async(main(), 60)


@pytest.mark.browser
def test_the_page_says_that_nobody_answers_and_goes_on(redis_url: str, page: Browser) -> None:
    async def main() -> None:
        async with live_router(redis_url) as router:
            url = f"{router.service.pages.operator_endpoint}/dashboard"
            await asyncio.to_thread(page.show, url)
            await asyncio.to_thread(page.wait_for, "document.documentElement.dataset.shown")
        says = "document.getElementById('notice').textContent.startsWith('No answer')"
        await asyncio.to_thread(page.wait_for, says)

    run_async(main(), 60)
