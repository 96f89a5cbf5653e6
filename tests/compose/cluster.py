"""The cluster of docker-compose.yml, built and started as docs/compose.md says.

It runs under a project name and a port of its own, from a copy of the tree, whose `.env` is the
one that the page's commands make.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from pagewire.loadtest.sampler import blocks_of, parse_metrics
from pagewire.shared.metrics.pages import joined
from pagewire.tests.support.documents import ROOT, blocks
from pagewire.tests.support.local_cluster import free_port

BUILD_TIMEOUT_S = 1800.0
CALL_TIMEOUT_S = 180.0
HEALTHY_TIMEOUT_S = 180.0
WHEELS_PORT = 8765  # the same each time, since the builder's cache knows the URL
FOREIGN_IMAGES = {
    "REDIS_IMAGE": "redis:7.4-alpine",
    "GATEWAY_IMAGE": "haproxy:3.0-alpine",
    "PROMETHEUS_IMAGE": "prom/prometheus:v3.5.0",
}
STAND_IN = "pagewire-test-services"
_CLUSTER = """
import urllib.error, urllib.request
try:
    answer = urllib.request.urlopen("http://127.0.0.1:9000/cluster", timeout=10)
except urllib.error.HTTPError as error:  # 503: it is not ready
    answer = error
print(answer.read().decode())
"""
# By the names that Prometheus has for the routers and, from them, for all processes.
_SCRAPE = """
import json, urllib.request
def fetch(url):
    try:
        return urllib.request.urlopen(url, timeout=10).read().decode()
    except OSError:  # it has just ended
        return ""
found = json.loads(fetch("http://router:9000/sd"))
for each in found:
    each["page"] = fetch(f"http://{each['targets'][0]}/metrics")
print(json.dumps(found))
"""


def run(
    *command: str,
    timeout: float = CALL_TIMEOUT_S,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
) -> str:
    """Run a command; returns its output, fails with it."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        timeout=timeout,
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-8000:]}"
    return done.stdout


def succeeds(*command: str, timeout: float = CALL_TIMEOUT_S) -> bool:
    done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
    return done.returncode == 0


def compose_command() -> list[str]:
    """Return Compose 2, or 1.29 where that is what there is."""
    if succeeds("docker", "compose", "version"):
        return ["docker", "compose"]
    return ["docker-compose"]


class ComposeCluster:
    """A project of Compose, of this test run alone.

    Attributes:
        url: of the gateway.
        network: the one between the services.
        settings: what this machine sets in its .env.
    """

    def __init__(self, tree: Path, settings: dict[str, str]) -> None:
        self._tree = tree
        self.settings = settings
        self.project = f"pagewire-test-{os.getpid()}"
        self.network = f"{self.project}_cluster"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._env = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": self.project,
            "PAGEWIRE_PORT": str(self.port),
            "PAGEWIRE_TAG": "test",
            **settings,
        }

    def set(self, **settings: str) -> None:
        """Change settings of `.env`, for what is started from now on."""
        self._env |= settings

    def compose(self, *arguments: str, timeout: float = CALL_TIMEOUT_S) -> str:
        command = (*compose_command(), *arguments)
        return run(*command, timeout=timeout, env=self._env, cwd=self._tree)

    def start(self) -> None:
        """Build and start by the page's own commands."""
        (block,) = [block for block in blocks() if block.run == "docker"]
        code = block.code.replace("docker-compose ", f"{' '.join(compose_command())} ")
        command = ("bash", "-euo", "pipefail", "-c", code)
        run(*command, timeout=BUILD_TIMEOUT_S, env=self._env, cwd=self._tree)

    def containers(self, service: str | None = None) -> list[dict[str, Any]]:
        """Return what `docker inspect` says of the containers, of one service or of all."""
        filters = [f"label=com.docker.compose.project={self.project}"]
        if service:
            filters.append(f"label=com.docker.compose.service={service}")
        flags = [word for each in filters for word in ("--filter", each)]
        ids = run("docker", "ps", "-aq", *flags).split()
        found: list[dict[str, Any]] = json.loads(run("docker", "inspect", *ids)) if ids else []
        return sorted(found, key=lambda each: each["Name"])

    def names(self, service: str) -> list[str]:
        return [each["Name"].removeprefix("/") for each in self.containers(service)]

    def worker_id(self, name: str) -> str:
        """Return the id under which the worker in a container is known."""
        container = json.loads(run("docker", "inspect", name))[0]
        labels = container["Config"]["Labels"]
        return f"{labels['com.docker.compose.service']}-{container['Config']['Hostname']}"

    def wait_healthy(self, *names: str, timeout: float = HEALTHY_TIMEOUT_S) -> None:
        """Wait until Docker finds these containers healthy, or all of them."""
        deadline = time.monotonic() + timeout
        while True:
            states = {
                each["Name"].removeprefix("/"): each["State"]["Health"]["Status"]
                for each in self.containers()
            }
            watched = {name: states[name] for name in names or states}
            if set(watched.values()) == {"healthy"}:
                return
            assert time.monotonic() < deadline, f"{watched}\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60")

    def health(self) -> dict[str, Any]:
        """Return the cluster as an operator port describes it."""
        body: dict[str, Any] = self._in_router(_CLUSTER)
        return body

    def pages(self) -> list[dict[str, Any]]:
        """Return what `/sd` lists, each target with its page of metrics."""
        found: list[dict[str, Any]] = self._in_router(_SCRAPE)
        return found

    def _in_router(self, code: str) -> Any:
        """Return what some code prints as JSON in the container of a router that runs."""
        states = {each["Name"]: each["State"] for each in self.containers("router")}
        running = [name for name, each in states.items() if each["Running"] and not each["Paused"]]
        assert running, states
        return json.loads(run("docker", "exec", running[0].strip("/"), "python", "-c", code))

    def wait_for_workers(self, count: int, links: int, timeout: float = 60.0) -> None:
        """Wait until `count` workers are ready and `links` KV links between them measured."""
        deadline = time.monotonic() + timeout
        while True:
            services = self.health()["services"]
            ready = [each for each in services if each["state"] == "ready"]
            measured = sum(len(each["links"]) for each in services)
            if len(ready) == len(services) == count and measured == links:
                return
            assert time.monotonic() < deadline, f"{services}\n{self.logs()}"
            time.sleep(0.3)

    def wait_idle(self, workers: int, timeout: float = 40.0) -> None:
        """Wait until no worker's sequences hold a KV block."""
        deadline = time.monotonic() + timeout
        while True:
            text = joined((each["labels"], each["page"]) for each in self.pages())
            blocks = blocks_of(parse_metrics(text))
            used = {name: states["used"] for name, states in blocks.items()}
            if len(used) == workers and not any(used.values()):
                return
            assert time.monotonic() < deadline, f"blocks are still held: {used}\n{self.logs()}"
            time.sleep(0.3)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "5")


@contextmanager
def compose_cluster(**scale: int) -> Iterator[ComposeCluster]:
    """Build the images, start the cluster, wait until all is healthy, remove it at the end."""
    sizes = [word for service, n in scale.items() for word in ("--scale", f"{service}={n}")]
    with tempfile.TemporaryDirectory() as folder, build_settings() as settings:
        tree = Path(folder, "pagewire")
        _copy_tree(tree)
        cluster = ComposeCluster(tree, settings)
        try:
            cluster.start()
            cluster.compose("up", "-d", "--no-recreate", *sizes)
            cluster.wait_healthy()
            yield cluster
        finally:
            cluster.down()


def _copy_tree(target: Path) -> None:
    """Copy what git would: neither environments nor anybody's own .env."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


@contextmanager
def build_settings() -> Iterator[dict[str, str]]:
    """Return what a machine like this one sets in its .env."""
    settings = {}
    for variable, image in FOREIGN_IMAGES.items():
        if not _has_image(image):
            run("docker", "build", "-t", STAND_IN, "tests/compose", timeout=BUILD_TIMEOUT_S)
            settings[variable] = STAND_IN
    wheels = Path(os.environ.get("PIP_FIND_LINKS", ""))
    if not any(wheels.glob("torch-*.whl")):
        yield settings
        return
    # A machine that keeps a build of torch in a folder offers it to the builder, too.
    bridge = json.loads(run("docker", "network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]
    gateway = bridge.get("Gateway") or str(next(ip_network(bridge["Subnet"]).hosts()))
    settings |= {
        "PAGEWIRE_PIP_FIND_LINKS": f"http://{gateway}:{WHEELS_PORT}/",
        "PAGEWIRE_PIP_TRUSTED_HOST": gateway,
        "PAGEWIRE_TORCH_INDEX_URL": "",
    }
    with _file_server(gateway, wheels):
        yield settings


def _has_image(image: str) -> bool:
    return succeeds("docker", "image", "inspect", image) or succeeds(
        "docker", "pull", "-q", image, timeout=600
    )


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _file_server(host: str, folder: Path) -> Iterator[None]:
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer((host, WHEELS_PORT), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(10)


def has_engine() -> bool:
    """Whether there is anything to run these tests with."""
    return shutil.which("docker") is not None and succeeds("docker", "info")
