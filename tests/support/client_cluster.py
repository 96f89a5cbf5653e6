"""A router with a scripted decode worker, in a thread, and commands that are run against it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from typer.testing import CliRunner, Result

from pagewire.services.cli.main import app
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker, fake_prefill_worker, link
from pagewire.tests.support.live_router import SECRET, live_router
from pagewire.tests.support.redis_server import RedisServer

CLI = [sys.executable, "-P", "-m", "pagewire.services.cli.main"]
TEXT = " a list of names"
ANSWER = Tokenizer.from_dir(demo_model_path()).encode(TEXT, add_special_tokens=False)
NOWHERE = "http://127.0.0.1:9"


@dataclass
class Cluster:
    """A router and its worker, which live in a thread."""

    url: str = ""
    operator_url: str = ""
    worker: FakeDecodeWorker | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    stop: asyncio.Event | None = None
    loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, redis_url: str, **settings: Any) -> None:
        self.stop, self.loop = asyncio.Event(), asyncio.get_running_loop()
        decode = FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, step_s=0.02)
        prefill = fake_prefill_worker(redis_url, SECRET, "prefill-0", links=[link("decode-0", 1.5)])
        async with live_router(redis_url, **settings) as router, prefill, decode:
            decode.cached_tokens = 3
            await router.ready()
            self.url, self.worker = router.url, decode
            self.operator_url = router.service.pages.operator_endpoint
            self.ready.set()
            await self.stop.wait()


@contextmanager
def client_cluster(**settings: Any) -> Iterator[Cluster]:
    """Run a cluster until the context ends; `settings` are the router's."""
    found = Cluster()
    with RedisServer() as server:
        thread = threading.Thread(target=lambda: asyncio.run(found.serve(server.url, **settings)))
        thread.start()
        assert found.ready.wait(20)
        try:
            yield found
        finally:
            found.loop.call_soon_threadsafe(found.stop.set)
            thread.join(20)


def pagewire(*arguments: str, stdin: str = "", **env: str) -> Result:
    """Run a command in this process, which saves the imports of one of its own."""
    env = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", **env}
    return CliRunner().invoke(app, arguments, input=stdin, env=env, prog_name="pagewire")
