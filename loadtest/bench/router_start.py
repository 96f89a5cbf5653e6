"""Starts what the router's benches need: Redis, a model's tokenizer, a router."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from pagewire.loadtest import cluster
from pagewire.loadtest.bench.clusters import late_port
from pagewire.loadtest.bench.router_client import MAX_STREAMS, MODEL, TOKEN_CHARS, Script
from pagewire.loadtest.bench.router_relay import HOST
from pagewire.loadtest.bench.router_stubs import MAX_MODEL_LEN
from pagewire.loadtest.cluster import BenchError
from pagewire.services.cli.up.redis_process import find_server, server_spec, wait_until_answering
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer

CYCLE = 64  # tokens of the script
START_TIMEOUT_S = 60.0


def write_model(folder: Path) -> Script:
    """Write the files of the demo model that a router reads; returns the tokens of streams.

    The context is long. The tokens of streams have texts of one length, a space and letters, so
    that a text shows its tokens.
    """
    source = demo_model_path()
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.from_dir(folder)
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    words = [
        (token, text)
        for token, text in enumerate(texts)
        if len(text) == TOKEN_CHARS and text[0] == " " and text[1:].isascii() and text[1:].isalpha()
    ][:CYCLE]
    return Script([token for token, _ in words], "".join(text for _, text in words))


def start_router(
    stack: ExitStack,
    log: Path,
    redis_url: str,
    secret: str,
    workers: Sequence[str],
    program: str = cluster.PROGRAM,
) -> tuple[int, int]:
    """Start a router and wait until it serves; returns its port and process id.

    Args:
        stack: stops it.
        log: the router's log; the model is in the folder `model` next to it.
        redis_url: URL of the cluster's Redis.
        secret: the cluster's secret.
        workers: ids of the workers for which it waits.
        program: the module that is `pagewire`.

    Raises:
        BenchError: it does not start.
    """
    port = late_port()
    env = {
        **os.environ,
        "PAGEWIRE_CLUSTER_SECRET": secret,
        "PAGEWIRE_EXPECTED_WORKERS": ",".join(workers),
    }
    command = [sys.executable, "-P", "-m", program, "router", "--host", HOST, "--port", str(port)]
    command += ["--model", str(log.parent / "model"), "--served-model-name", MODEL]
    command += ["--redis-url", redis_url, "--max-queue", str(MAX_STREAMS), "--operator-port", "0"]
    process = stack.enter_context(cluster.server(command, log, env))
    url = f"http://{HOST}:{port}/ready"
    cluster.wait_ready(process, log, partial(cluster.answers, url), START_TIMEOUT_S)
    return port, process.pid


def start_redis(folder: Path, stack: ExitStack) -> str:
    """Start a Redis server as `pagewire up` does; returns its URL.

    Raises:
        BenchError: none is installed, or it does not start.
    """
    program = find_server()
    if program is None:
        raise BenchError("no redis-server is installed; `make redis` installs one")
    spec, url = server_spec(program, folder)
    stack.enter_context(cluster.server(spec.argv, folder / "redis.log"))
    asyncio.run(wait_until_answering(url, START_TIMEOUT_S))
    return url
