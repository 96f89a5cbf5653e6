"""The cluster of docker-compose.yml: built, scaled, killed, cut off, restarted under load."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from pagewire.tests.compose.cluster import (
    ComposeCluster,
    compose_cluster,
    compose_command,
    run,
    succeeds,
)
from pagewire.tests.compose.load import MODEL, TIMEOUT_S, Load, Outcome
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.documents import ROOT

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

WORKERS, LINKS = 4, 4
CUT_OFF_S = 20.0
MAX_THIEVES = 8
SECRETS = {"PAGEWIRE_CLUSTER_SECRET": "only to be looked at", "REDIS_PASSWORD": "likewise"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ComposeCluster]:
    with compose_cluster(prefill=2, decode=2) as running:
        running.wait_for_workers(WORKERS, LINKS)
        yield running


@pytest.fixture(scope="module")
def load(cluster: ComposeCluster) -> Load:
    return Load.of_demo_model(cluster.url)


def _config(
    *files: str, env: dict[str, str], profile: str | None = None
) -> subprocess.CompletedProcess[str]:
    flags = [word for name in files for word in ("-f", name)]
    flags += [] if profile is None else ["--profile", profile]
    command = [*compose_command(), "--env-file", ".env.example", *flags, "config"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PAGEWIRE_", "REDIS_"))}
    return subprocess.run(
        command, cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("missing", SECRETS)
def test_a_missing_secret_is_asked_for(missing: str) -> None:
    env = {name: value for name, value in SECRETS.items() if name != missing}
    done = _config("docker-compose.yml", env=env)
    assert done.returncode != 0
    assert ".env.example" in done.stdout + done.stderr


def test_the_gpu_override_fits() -> None:
    done = _config("docker-compose.yml", "docker-compose.gpu.yml", env=SECRETS)
    assert done.returncode == 0, done.stderr
    assert "nvidia" in done.stdout


def test_the_profile_watch_adds_three_services_that_can_do_little() -> None:
    done = _config("docker-compose.yml", env=SECRETS, profile="watch")
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    for name in ("prometheus", "alertmanager", "grafana"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["user"] not in ("", "0", "root")
    assert "ports" not in services["prometheus"]
    assert "ports" not in services["alertmanager"]
    assert "127.0.0.1" in str(services["grafana"]["ports"])


def test_each_knob_of_the_example_is_one_of_the_compose_files() -> None:
    files = ("docker-compose.yml", "docker-compose.gpu.yml")
    text = "".join((ROOT / name).read_text() for name in files)
    example = (ROOT / ".env.example").read_text()
    knobs = set(re.findall(r"^# ([A-Z_]+)=", example, re.MULTILINE))
    known = set(re.findall(r"\$\{([A-Z_]+)[:?}-]|^ +([A-Z_]+):$", text, re.MULTILINE))
    assert knobs == {name for pair in known for name in pair if name}


def test_containers_can_do_little(cluster: ComposeCluster) -> None:
    published = []
    for container in cluster.containers():
        name, host = container["Name"], container["HostConfig"]
        service = container["Config"]["Labels"]["com.docker.compose.service"]
        if host["PortBindings"]:
            published.append(service)
        assert container["Config"]["User"] not in ("", "root", "0"), name
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert not host["Privileged"], name
        assert host["RestartPolicy"]["Name"] == "unless-stopped", name
        assert container["State"]["Health"]["Status"] == "healthy", name
    assert published == ["gateway"]
    networks = json.loads(run("docker", "network", "inspect", cluster.network))
    assert networks[0]["Internal"]


def test_containers_have_bounds(cluster: ComposeCluster) -> None:
    """Workers' memory has none: it is the model's."""
    gib = 1 << 30
    memory = {"redis": gib, "gateway": 2 * gib, "router": 8 * gib, "prefill": 0, "decode": 0}
    for container in cluster.containers():
        name, host = container["Name"], container["HostConfig"]
        service = container["Config"]["Labels"]["com.docker.compose.service"]
        assert host["Memory"] == memory[service], name
        assert host["PidsLimit"] == 4096, name
        log = {"Type": "json-file", "Config": {"max-size": "50m", "max-file": "4"}}
        assert host["LogConfig"] == log, name


def test_a_workers_memory_can_be_bounded() -> None:
    done = _config("docker-compose.yml", env=SECRETS | {"WORKER_MEMORY": "48g"})
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"mem_limit: '?(?:48g|51539607552)'?", done.stdout)) == 2


def test_compiled_kernels_outlive_their_worker(cluster: ComposeCluster) -> None:
    """All workers write to one volume, which the next ones find; nothing else can be written."""
    one, other = cluster.names("prefill")[0], cluster.names("decode")[0]
    write = 'mkdir -p "$TRITON_CACHE_DIR" && echo compiled > "$TRITON_CACHE_DIR/kernel"'
    run("docker", "exec", one, "sh", "-c", write)
    read = run("docker", "exec", other, "sh", "-c", 'cat "$TRITON_CACHE_DIR/kernel"')
    assert read.strip() == "compiled"
    assert succeeds("docker", "exec", one, "sh", "-c", 'test -n "$TORCHINDUCTOR_CACHE_DIR"')
    assert not succeeds("docker", "exec", one, "sh", "-c", "touch /run/pagewire/file")


def test_operators_find_all_metrics_inside_and_clients_find_none(cluster: ComposeCluster) -> None:
    found = cluster.pages()
    roles = sorted(each["labels"]["role"] for each in found)
    assert roles == ["decode", "decode", "prefill", "prefill", "router", "router"]
    assert all("process_open_fds" in each["page"] for each in found)
    for path in ("/metrics", "/cluster", "/sd"):
        assert httpx.get(f"{cluster.url}{path}", timeout=10).status_code == 404


def test_prometheus_reads_all_processes_and_evaluates_all_rules(cluster: ComposeCluster) -> None:
    def ask(path: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:9090/api/v1/{path}"
        answer = json.loads(run("docker", "exec", name, "wget", "-q", "-O", "-", url))
        data: dict[str, Any] = answer["data"]
        return data

    try:
        cluster.compose("--profile", "watch", "up", "-d", "--no-deps", "prometheus")
        [name] = cluster.names("prometheus")
        cluster.wait_healthy(name)
        deadline = time.monotonic() + 60
        while True:
            values = [each["value"][1] for each in ask("query?query=up")["result"]]
            groups = ask("rules")["groups"]
            health = {rule["health"] for group in groups for rule in group["rules"]}
            if values == ["1"] * (WORKERS + 3) and health == {"ok"}:
                return
            assert time.monotonic() < deadline, (values, health)
            time.sleep(1)
    finally:
        cluster.compose("--profile", "watch", "rm", "-s", "-f", "prometheus")


def test_each_image_can_send_spans(cluster: ComposeCluster) -> None:
    code = "from pagewire.shared.base.tracing import open_tracing as o; assert o(U, 'router', 'a')"
    code = code.replace("U", "'http://127.0.0.1:4318'")
    for service in ("router", "prefill", "decode"):
        run("docker", "exec", cluster.names(service)[0], "python", "-c", code)


def test_the_router_has_no_torch_and_the_redis_wants_its_password(cluster: ComposeCluster) -> None:
    router, redis = cluster.names("router")[0], cluster.names("redis")[0]
    assert succeeds(
        "docker", "exec", router, "python", "-c", "import pagewire.services.router.main"
    )
    assert not succeeds("docker", "exec", router, "python", "-c", "import torch")
    refused = run("docker", "exec", "-e", "REDISCLI_AUTH=", redis, "redis-cli", "ping")
    assert "NOAUTH" in refused


def test_ucx_by_name_listens_on_the_internal_network_alone(cluster: ComposeCluster) -> None:
    names = {role: f"{cluster.project}-ucx-{role}" for role in ("prefill", "decode")}
    try:
        for role, name in names.items():
            cluster.compose("run", "-d", "--name", name, "-e", "PAGEWIRE_KV_TRANSPORT=ucx", role)
        for name in names.values():
            cluster.wait_healthy(name)
        decode = names["decode"]
        own = socket.inet_aton(_address(decode, cluster.network))[::-1].hex().upper()
        deadline = time.monotonic() + 60
        while own not in (listening := _listening(decode)):  # once it has a link by UCX
            assert time.monotonic() < deadline, run("docker", "logs", decode)
            time.sleep(0.5)
        # The control socket, the KV links' socket and metrics, but no UCX.
        assert listening.count("00000000") == 3
        assert "UCX listens on eth0" in run("docker", "logs", decode)
    finally:
        run("docker", "rm", "-f", *names.values())
        cluster.wait_for_workers(WORKERS, LINKS)


def _listening(container: str) -> list[str]:
    """Return the IPv4 addresses that a container listens on, in hexadecimal, one a socket."""
    rows = run("docker", "exec", container, "cat", "/proc/net/tcp").splitlines()[1:]
    fields = [row.split() for row in rows]
    return [each[1].partition(":")[0] for each in fields if each[3] == "0A"]


def test_tokens_equal_one_process(cluster: ComposeCluster, load: Load) -> None:
    answers = run_async(load.all_once(), 240)
    assert [i for i, (a, b) in enumerate(zip(answers, load.answers, strict=True)) if a != b] == []
    cluster.wait_idle(WORKERS)


def test_the_openai_client_chats(cluster: ComposeCluster) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is a lambda?"}]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=60) as client:
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24)
    assert answer.choices[0].message.content


def test_the_load_tests_users_are_all_served(cluster: ComposeCluster, tmp_path: Path) -> None:
    options = ("--host", cluster.url, "--rates", "4", "--stage-s", "10", "--out", str(tmp_path))
    print(run(sys.executable, "-P", "-m", "pagewire.loadtest.compare", *options))
    assert list(tmp_path.glob("*/report.html"))
    cluster.wait_idle(WORKERS)


def _suffer(cluster: ComposeCluster, load: Load, trouble: Callable[[], None]) -> Outcome:
    """Make trouble under load; afterwards all must be as before."""
    outcome = run_async(load.during(trouble), 500)
    print(outcome)
    assert outcome.slowest_s < TIMEOUT_S
    assert outcome.answered > 20
    cluster.wait_healthy()
    cluster.wait_for_workers(WORKERS, LINKS)
    assert run_async(load.all_once(), 240) == load.answers
    cluster.wait_idle(WORKERS)
    return outcome


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_killed_container_costs_no_request(
    cluster: ComposeCluster, load: Load, service: str
) -> None:
    name = cluster.names(service)[0]
    epoch = _epoch(cluster, name)

    def kill() -> None:
        # All processes but the init process, which ends with its child: Docker starts it again.
        succeeds("docker", "exec", name, "sh", "-c", "kill -9 -1")
        deadline = time.monotonic() + 60
        while _epoch(cluster, name) in (None, epoch):
            assert time.monotonic() < deadline, cluster.logs()
            time.sleep(0.5)

    assert _suffer(cluster, load, kill).failures == []


def _epoch(cluster: ComposeCluster, name: str) -> int | None:
    worker_id = cluster.worker_id(name)
    services = {each["id"]: each for each in cluster.health()["services"]}
    return services.get(worker_id, {}).get("epoch")


def test_containers_cut_off_for_a_while_cost_no_request(
    cluster: ComposeCluster, load: Load
) -> None:
    """One comes back under its address; that of the other one belongs to somebody else by then."""
    network = cluster.network
    names = [cluster.names(service)[1] for service in ("prefill", "decode")]
    before = [_address(name, network) for name in names]
    thieves: list[str] = []

    def cut_off() -> None:
        for name in names:
            run("docker", "network", "disconnect", network, name)
        try:
            # Docker gives out the lowest address that is free.
            while before[1] not in (_address(thief, network) for thief in thieves):
                assert len(thieves) < MAX_THIEVES
                command = ("--network", network, "--entrypoint", "sleep", "pagewire-router:test")
                thieves.append(run("docker", "run", "-d", *command, "600").split()[-1])
            time.sleep(CUT_OFF_S)
        finally:
            for thief in thieves:
                if _address(thief, network) == before[0]:
                    run("docker", "rm", "-f", thief)
            for name in names:
                run("docker", "network", "connect", network, name)
        time.sleep(10)

    try:
        outcome = _suffer(cluster, load, cut_off)
        assert _address(names[1], network) != before[1]
    finally:
        for thief in thieves:
            succeeds("docker", "rm", "-f", thief)
    assert outcome.failures == []


def _address(name: str, network: str) -> str:
    container = json.loads(run("docker", "inspect", name))[0]
    address: str = container["NetworkSettings"]["Networks"][network]["IPAddress"]
    return address


def test_a_rolling_restart_of_everything_loses_no_request(
    cluster: ComposeCluster, load: Load
) -> None:
    def restart_all() -> None:
        for service in ("redis", "prefill", "decode", "router"):
            for name in cluster.names(service):
                run("docker", "restart", name)
                cluster.wait_healthy(name)
                cluster.wait_for_workers(WORKERS, LINKS)
        # It alone has the port: its new process takes over before the old one has gone.
        cluster.compose("kill", "-s", "USR2", "gateway")
        time.sleep(3)
        cluster.wait_healthy(*cluster.names("gateway"))

    assert _suffer(cluster, load, restart_all).failures == []


def test_scaling_down_loses_no_request(cluster: ComposeCluster, load: Load) -> None:
    def scale_down_and_up() -> None:
        up = ("up", "-d", "--no-recreate")
        cluster.compose(*up, "--scale", "prefill=1", "--scale", "decode=1")
        cluster.wait_for_workers(2, 1)
        cluster.compose(*up, "--scale", "prefill=2", "--scale", "decode=2")
        cluster.wait_healthy()

    assert _suffer(cluster, load, scale_down_and_up).failures == []
