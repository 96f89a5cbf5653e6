"""`pagewire doctor` as a user runs it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.services.cli.doctor.command import check_keys, check_port, check_redis
from pagewire.shared.settings.config import RouterSettings, load_settings
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.client_cluster import CLI, Cluster, client_cluster, pagewire
from pagewire.tests.support.openai_server import OpenAIServer, openai_server
from pagewire.tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with client_cluster() as found:
        yield found


@pytest.fixture
def old() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


@pytest.mark.parametrize("chosen", ["auto", "ucx"])
def test_doctor_is_right_about_this_machine(redis_server: RedisServer, chosen: str) -> None:
    import torch

    env = {"PAGEWIRE_REDIS_URL": redis_server.url, "PAGEWIRE_KV_TRANSPORT": chosen}
    done = pagewire("doctor", "--port", "0", **env)
    assert done.exit_code == 0, done.stdout + done.stderr
    lines = {line[5:15].strip(): line for line in done.stdout.splitlines()}
    assert torch.__version__ in lines["torch"]
    assert ("no GPU here" in lines["CUDA"]) is not torch.cuda.is_available()
    is_used = chosen == "ucx"
    assert ("a payload has crossed" in lines["UCX"]) is is_used
    assert ("not used" in lines["UCX"]) is not is_used
    by_ipc = torch.cuda.is_available() and chosen == "auto"
    assert ("not used" in lines["CUDA IPC"]) is not by_ipc
    assert f"answers at {redis_server.url}" in lines["Redis"]
    assert all(line.startswith("ok ") for name, line in lines.items() if name in ("UCX", "Redis"))
    assert "can run the demo" in done.stdout


def test_doctor_finds_a_redis_that_does_not_answer() -> None:
    settings = load_settings(RouterSettings, {"redis_url": "redis://:secret@127.0.0.1:9/0"})
    found = run_async(check_redis(settings))
    assert found.level == "fail"
    assert "127.0.0.1:9" in found.detail
    assert "secret" not in found.detail


@pytest.mark.parametrize(
    ("host", "text", "level", "said"),
    [
        ("127.0.0.1", None, "ok", "none"),
        ("10.0.0.1", None, "warn", "anybody who reaches 10.0.0.1"),
        ("10.0.0.1", "a: key-of-a-1\nb: key-of-b-1", "ok", "2 are valid"),
        ("127.0.0.1", "key-of-a-1", "fail", "line 1 is not NAME: KEY"),
    ],
)
def test_doctor_looks_at_the_keys(
    tmp_path: Path, host: str, text: str | None, level: str, said: str
) -> None:
    file = None if text is None else tmp_path / "keys"
    if file is not None and text is not None:
        file.write_text(text)
    found = check_keys(load_settings(RouterSettings, {"host": host, "api_key_file": file}))
    assert (found.level, said in found.detail) == (level, True), found


def test_doctor_names_a_free_port_where_one_is_taken(cluster: Cluster, old: OpenAIServer) -> None:
    for url, part in ((cluster.url, "by a Pagewire that serves"), (old.url, "in use")):
        settings = load_settings(RouterSettings, {"port": int(url.rpartition(":")[2])})
        found = run_async(check_port(settings))
        assert found.level == "warn"
        assert part in found.detail
        assert "pagewire up --port " in found.advice


def test_doctor_ends_with_a_command_that_works(cluster: Cluster, redis_server: RedisServer) -> None:
    port = cluster.url.rpartition(":")[2]
    done = pagewire("doctor", "--port", port, PAGEWIRE_REDIS_URL=redis_server.url)
    assert done.exit_code == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    advice = next(line.partition("-> ")[2] for line in lines if "-> pagewire up --port " in line)
    assert lines[-1].endswith(f": {advice.strip()}")


def test_probe_says_where_ucx_does_not_start_in_a_second_process() -> None:
    """As where the GPU's memory is full."""
    code = "import sys; sys.argv[1:] = ['ucx']; sys.executable = '/bin/false'; "
    code += "from pagewire.services.cli.doctor.probe import main; main()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, timeout=60)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "UCX does not start in a second process" in found["error"]


def test_doctor_ends_where_nothing_can_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*CLI, "doctor"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode != 0


def test_doctor_knows_the_machines_addresses() -> None:
    found = run_async(check_port(load_settings(RouterSettings, {"host": "203.0.113.7"})))
    assert (found.level, found.advice) == ("fail", "pagewire up --host 127.0.0.1")
