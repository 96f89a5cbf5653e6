"""A router in the test's own event loop, on a real port."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from pagewire.services.router.http.connection.direct_writer import DirectWritesProtocol
from pagewire.services.router.http.server.app import create_app
from pagewire.services.router.service import RouterService
from pagewire.shared.http.bounded_protocol import protocol_factory
from pagewire.shared.http.server import HttpServer
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.settings.config import RouterSettings
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import HEARTBEAT_S, LEASE_S, FakeDecodeWorker

SECRET = "the cluster's secret"
MODEL = "pagewire-demo"
TOKENIZER = Tokenizer.from_dir(demo_model_path())
TEXT = " The café by the river — 東京 🌍 — was open."
ANSWER = TOKENIZER.encode(TEXT, add_special_tokens=False)
TLS = ssl.create_default_context()  # each client of httpx would read all certificates again


@dataclass
class LiveRouter:
    """A running router and a client of it."""

    service: RouterService
    url: str
    http: httpx.AsyncClient

    async def ready(self, workers: int = 1) -> "LiveRouter":
        """Wait until the router can use this many decode workers."""
        await eventually(lambda: len(self.service.selector.decode_records()) == workers)
        return self

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, **body})

    async def chat(self, text: str = "Hello", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages, **body}
        )

    async def metrics_page(self) -> str:
        """Return all of its /metrics."""
        return (await self.http.get(f"{self.service.pages.metrics_endpoint}/metrics")).text

    async def cluster(self) -> httpx.Response:
        """Ask its operator port for the cluster's state."""
        return await self.http.get(f"{self.service.pages.operator_endpoint}/cluster")

    async def targets(self) -> list[dict[str, Any]]:
        """Return the metrics endpoints that its operator port lists."""
        found: list[dict[str, Any]] = (
            await self.http.get(f"{self.service.pages.operator_endpoint}/sd")
        ).json()
        return found

    async def metric(self, sample: str) -> float:
        """Return the value of a sample in /metrics, named as there."""
        text = await self.metrics_page()
        lines = [line for line in text.splitlines() if line.startswith(sample + " ")]
        assert len(lines) == 1, (sample, text)
        return float(lines[0].rpartition(" ")[2])


@asynccontextmanager
async def live_router(
    redis_url: str, *, port: int = 0, **settings: Any
) -> AsyncIterator[LiveRouter]:
    """Run a router until the context ends; port 0 is any free one. `settings` are the router's."""
    chosen = RouterSettings(
        **(
            {
                "cluster_secret": SECRET,
                "redis_url": redis_url,
                "heartbeat_s": HEARTBEAT_S,
                "lease_s": LEASE_S,
                "served_model_name": MODEL,
                "operator_port": 0,
            }
            | settings
        )
    )
    service = await RouterService.connect(chosen)
    # asyncio sets TCP_NODELAY where the protocol is named; the real router's uvloop always does.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((chosen.host, port))
    config = uvicorn.Config(
        create_app(service, listener),
        http=protocol_factory(
            DirectWritesProtocol, service.connections, chosen.trust_proxy_protocol
        ),
        log_config=None,
        lifespan="on",
        ws="none",
    )
    server = HttpServer(config, service.connections)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        await eventually(lambda: server.started or task.done())
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=TLS) as http:
            yield LiveRouter(service, url, http)
    finally:
        server.should_exit = True
        await asyncio.wait([task], timeout=10)
        task.result()


async def _with_worker(
    redis_url: str,
    scenario: Callable[[LiveRouter, FakeDecodeWorker], Awaitable[None]],
    settings: dict[str, Any],
) -> None:
    async with (
        live_router(redis_url, **settings) as router,
        FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, step_s=0.002) as worker,
    ):
        await router.ready()
        await scenario(router, worker)
        await eventually(lambda: worker.active == 0)  # it learns of an end by a message
        dispatcher = router.service.dispatcher
        assert (
            dispatcher.admission.num_running,
            dispatcher.admission.num_waiting,
        ) == (0, 0)


def with_worker(
    redis_url: str,
    scenario: Callable[[LiveRouter, FakeDecodeWorker], Awaitable[None]],
    **settings: Any,
) -> None:
    """Run a scenario with a router and one worker that answers `TEXT`; nothing may be left."""
    run_async(_with_worker(redis_url, scenario, settings), timeout=100)
