"""A rolling upgrade as docs/upgrade.md says, to images of a release with another protocol version.

All services are replaced, one kind after another, while clients ask.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.tests.compose.cluster import (
    FOREIGN_IMAGES,
    ComposeCluster,
    compose_cluster,
    run,
    succeeds,
)
from pagewire.tests.compose.load import TIMEOUT_S, Load
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.local_cluster import free_port

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

OURS = ("router", "prefill", "decode")
LATER = PROTOCOL_VERSION + 1
SWITCH_S = 5.0  # until a client that had the address of the other gateway has connected to it
# The image of a later release: of ours, all but the protocol version is the same.
LATER_IMAGE = f"""\
FROM pagewire-{{service}}:test
USER root
RUN file=$(python -c 'import pagewire; print(pagewire.__path__[0])')/shared/control/protocol.py \\
    && sed -i 's/^PROTOCOL_VERSION = .*/PROTOCOL_VERSION = {LATER}/' "$file" \\
    && grep -q '^PROTOCOL_VERSION = {LATER}$' "$file"
USER pagewire
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ComposeCluster]:
    with compose_cluster(prefill=2, decode=2) as running:
        running.wait_for_workers(4, 4)
        for service in OURS:
            _build(f"pagewire-{service}:test-later", LATER_IMAGE.format(service=service))
        yield running


@pytest.fixture(scope="module")
def load(cluster: ComposeCluster) -> Load:
    return Load.of_demo_model(cluster.url)


def _build(tag: str, text: str) -> None:
    command = ("docker", "build", "-q", "-t", tag, "-")
    done = subprocess.run(
        command, input=text, text=True, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _images(cluster: ComposeCluster) -> dict[str, set[str]]:
    """Return the images that run, service by service."""
    found: dict[str, set[str]] = {}
    for each in cluster.containers():
        service = each["Config"]["Labels"]["com.docker.compose.service"]
        found.setdefault(service, set()).add(each["Config"]["Image"])
    return found


def test_an_upgrade_to_another_protocol_loses_no_request(
    cluster: ComposeCluster, load: Load
) -> None:
    old = {service: cluster.names(service) for service in OURS}
    before = _images(cluster)
    settings = {"PAGEWIRE_TAG": "test-later"}
    for variable, image in FOREIGN_IMAGES.items():
        later = f"pagewire-{variable.lower().replace('_', '-')}:test-later"
        run("docker", "tag", cluster.settings.get(variable, image), later)
        settings[variable] = later

    def upgrade() -> None:
        cluster.set(**settings)
        # Workers of the later release come in addition. The routers leave them out.
        _add(cluster, old, prefill=4, decode=4)
        _wait_for_states(cluster, ["another version"] * 4 + ["ready"] * 4)
        assert cluster.health()["protocol"] == PROTOCOL_VERSION
        # Its routers are ready, since their workers are there.
        _add(cluster, old, router=4)
        for service in OURS:
            for name in old[service]:
                run("docker", "stop", name, timeout=400)
                run("docker", "rm", name)
        cluster.wait_for_workers(4, 4)
        cluster.compose("up", "-d", "--no-deps", "redis")
        cluster.wait_healthy(*cluster.names("redis"))
        cluster.wait_for_workers(4, 4)
        _replace_gateway(cluster, load)

    outcome = run_async(load.during(upgrade, fresh=True), 800)
    print(outcome)
    assert outcome.failures == []
    assert outcome.answered > 20
    assert outcome.slowest_s < TIMEOUT_S
    after = _images(cluster)
    assert all(len(images) == 1 and images != before[name] for name, images in after.items())
    assert after.keys() == before.keys()
    assert cluster.health()["protocol"] == LATER
    assert run_async(load.all_once(), 240) == load.answers


def _wait_for_states(cluster: ComposeCluster, expected: list[str]) -> None:
    deadline = time.monotonic() + 60
    while (seen := sorted(each["state"] for each in cluster.health()["services"])) != expected:
        assert time.monotonic() < deadline, f"{seen}\n{cluster.logs()}"
        time.sleep(0.5)


def _add(cluster: ComposeCluster, old: dict[str, list[str]], **sizes: int) -> None:
    """Start more containers of some services, of the images that are set now."""
    scale = [word for service, n in sizes.items() for word in ("--scale", f"{service}={n}")]
    cluster.compose("up", "-d", "--no-deps", "--no-recreate", *scale, *sizes)
    for service in sizes:
        cluster.wait_healthy(*(set(cluster.names(service)) - set(old[service])))


def _replace_gateway(cluster: ComposeCluster, load: Load) -> None:
    """Send requests to another gateway meanwhile, as a load balancer in front of both does."""
    port, name = free_port(), f"{cluster.project}-second-gateway"
    publish = ("-p", f"127.0.0.1:{port}:8000")
    try:
        cluster.compose("run", "-d", "--no-deps", "--name", name, *publish, "gateway")
        cluster.wait_healthy(name)
        load.url = f"http://127.0.0.1:{port}"
        time.sleep(SWITCH_S)
        cluster.compose("up", "-d", "--no-deps", "gateway", timeout=400)
        cluster.wait_healthy(*(set(cluster.names("gateway")) - {name}))
        load.url = cluster.url
        time.sleep(SWITCH_S)
        run("docker", "stop", name, timeout=400)  # once its connections have ended
    finally:
        succeeds("docker", "rm", "-f", name)
