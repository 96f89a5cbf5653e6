"""Where UCX is opened, and on which network device: only on the worker's own or a chosen one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pagewire.shared import transfer
from pagewire.shared.errors import ConfigError
from pagewire.shared.transfer import (
    StagingPool,
    available_transports,
    create_transport,
    transports_to_open,
)
from pagewire.shared.kv.carriers.ucx_settings import ucx_settings
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.listening import listening_sockets
from pagewire.tests.support.transports import PATIENCE_S, network

pytestmark = pytest.mark.timeout(60)

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what workers in containers listen on
OURS = "cuda_ipc,cuda_copy,tcp,self lo on lo"


def listening_addresses() -> set[str]:
    return {str(address) for address, _ in listening_sockets([os.getpid()])}


def test_ucx_listens_on_the_device_of_its_host_alone() -> None:
    async def scenario() -> set[str]:
        before = listening_addresses()
        async with network("ucx") as net:
            await net.pair()
            return listening_addresses() - before

    assert run_async(scenario()) <= {"127.0.0.1"}


NOT_OURS = ["", "::", EVERYWHERE, "203.0.113.1", "2001:db8::1", "no-such-host.invalid", "a" * 99]


@pytest.mark.parametrize(
    ("host", "version"),
    [("127.0.0.1", "inet"), ("127.0.0.2", "inet"), ("localhost", "inet"), ("::1", "inet6")],
)
def test_ucx_is_kept_to_the_device_of_its_host(host: str, version: str) -> None:
    settings = ucx_settings(host, cuda=False)
    assert (settings["NET_DEVICES"], settings["TCP_AF_PRIO"]) == ("lo", version)


@pytest.mark.parametrize("host", NOT_OURS)
def test_ucx_by_name_never_listens_on_all_devices(host: str) -> None:
    async def scenario() -> None:
        staging = StagingPool(1, 1000, torch.device("cpu"))
        transport = create_transport("ucx", "w", staging, host=host)
        before = listening_addresses()
        with pytest.raises(ConfigError, match=r"set UCX_NET_DEVICES.*or choose KV transport 'zmq'"):
            await transport.start(PATIENCE_S)
        assert listening_addresses() <= before
        await transport.close()

    run_async(scenario())


@pytest.mark.parametrize("host", [EVERYWHERE, "::", ""])
def test_where_a_worker_listens_on_all_ucx_takes_its_own_address(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> set[str]:
        before = listening_addresses()
        staging = StagingPool(1, 1000, torch.device("cpu"))
        transport = create_transport("ucx", "w", staging, host=host, advertise_host="localhost")
        await transport.start(PATIENCE_S)
        opened = listening_addresses() - before
        await transport.close()
        return opened

    assert run_async(scenario()) <= {"127.0.0.1"}
    assert "UCX listens on lo: anyone who reaches its TCP port there can end" in caplog.text


def test_ucx_is_opened_between_gpus_or_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    here = "127.0.0.1"
    assert transports_to_open("auto", cpu, here) == ("zmq",)
    assert transports_to_open("auto", gpu, here) == ("ucx", "zmq")
    assert transports_to_open("auto", gpu, EVERYWHERE, "localhost") == ("ucx", "zmq")
    assert transports_to_open("ucx", cpu, here) == ("ucx",)
    assert transports_to_open("zmq", gpu, here) == ("zmq",)
    assert caplog.text == ""
    assert transports_to_open("auto", gpu, EVERYWHERE, "203.0.113.1") == ("zmq",)
    assert "KV blocks cross by ZeroMQ" in caplog.text
    assert "set UCX_NET_DEVICES" in caplog.text
    monkeypatch.setattr(transfer, "find_spec", lambda name: None)
    assert transports_to_open("auto", gpu, here) == ("zmq",)


def test_creating_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = StagingPool(1, 1000, torch.device("cpu"))
    assert available_transports() == ("ucx", "zmq")
    assert [create_transport(name, "w", staging).name for name in ("ucx", "zmq")] == ["ucx", "zmq"]
    monkeypatch.setattr(transfer, "find_spec", lambda name: None)
    assert available_transports() == ("zmq",)
    with pytest.raises(ConfigError, match=r"choose 'zmq'.*pip install .*ucxx-cu13"):
        create_transport("ucx", "w", staging)
    with pytest.raises(ConfigError, match="KV transport 'nixl' is unknown"):
        create_transport("nixl", "w", staging)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, OURS),
        ("UCX_TLS=all", "None None on all network devices"),
        ("UCX_NET_DEVICES=eth7", "cuda_ipc,cuda_copy,tcp,self None on eth7"),
    ],
)
def test_transports_and_devices_in_the_environment_stay(
    variable: str | None, expected: str
) -> None:
    host = "203.0.113.1" if variable else "127.0.0.1"
    code = (
        "import sys, pagewire.shared.transfer\n"
        "from pagewire.shared.kv.carriers.ucx_settings import listens_on, ucx_settings\n"
        f"settings = ucx_settings({host!r}, cuda=True)\n"
        "print(settings.get('TLS'), settings.get('NET_DEVICES'), listens_on(settings))\n"
        "print('ucxx' in sys.modules)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=env | dict([variable.split("=")] if variable else []),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == [expected, "False"]
