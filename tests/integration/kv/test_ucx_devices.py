"""Where UCX is opened, and on which network device: only on the worker's own or a chosen one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, cast

import pytest
import torch

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.transfer.staging import make_staging
from pagewire.shared.transfer.transports.base import Transport
from pagewire.shared.transfer.transports.ucx_settings import ucx_settings
from pagewire.shared.worker import kv
from pagewire.tests.support.local_cluster import listening_sockets

if TYPE_CHECKING:
    from pagewire.shared.engine.execution.executor import BlockMoves

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what workers in containers listen on
OURS = "cuda_ipc,cuda_copy,tcp,self lo on lo"


def listening_addresses() -> set[str]:
    return {address for address, _ in listening_sockets([os.getpid()])}


def open_ucx(host: str, name: str = "ucx") -> Transport:
    return kv.open_transport(name, make_staging(1, 1000, CPU), cast("BlockMoves", None), host)


def test_ucx_listens_on_the_device_of_its_host_alone() -> None:
    before = listening_addresses()
    transport = open_ucx("127.0.0.1")
    transport.offer(1)
    opened = listening_addresses() - before
    transport.withdraw(1)
    transport.close()
    assert opened <= {"127.0.0.1"}


NOT_OURS = ["", "::", EVERYWHERE, "203.0.113.1", "2001:db8::1", "::1", "no.invalid", "a" * 99]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_ucx_is_kept_to_the_device_of_its_host(host: str) -> None:
    settings = ucx_settings(host, cuda=False)
    assert (settings["NET_DEVICES"], settings["TCP_AF_PRIO"]) == ("lo", "inet")


@pytest.mark.parametrize("host", NOT_OURS)
def test_ucx_by_name_never_listens_on_all_devices(host: str) -> None:
    before = listening_addresses()
    with pytest.raises(ConfigError, match=r"set UCX_NET_DEVICES.*or choose KV transport 'zmq'"):
        open_ucx(host)
    assert listening_addresses() <= before


def test_ucx_says_where_it_listens(caplog: pytest.LogCaptureFixture) -> None:
    open_ucx("localhost").close()
    assert "UCX listens on lo: anyone who reaches its TCP port there can end" in caplog.text


def settings_of(transport: str, network: str = "untrusted") -> WorkerSettings:
    return load_settings(
        WorkerSettings,
        {"cluster_secret": "a secret of many characters", "kv_transport": transport}
        | {"kv_network": network},
    )


def test_transports_by_device_and_network(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert kv.transports_to_open(settings_of("auto"), CPU) == ("zmq",)
    assert kv.transports_to_open(settings_of("auto", "private"), CPU) == ("zmq",)
    assert kv.transports_to_open(settings_of("auto"), gpu) == ("ipc", "zmq")
    assert kv.transports_to_open(settings_of("auto", "private"), gpu) == ("ipc", "ucx", "zmq")
    assert kv.transports_to_open(settings_of("ucx"), CPU) == ("ucx",)
    assert kv.transports_to_open(settings_of("zmq", "private"), gpu) == ("zmq",)
    monkeypatch.setattr(kv, "find_spec", lambda name: None)
    assert kv.transports_to_open(settings_of("auto", "private"), gpu) == ("ipc", "zmq")


def test_transports_that_are_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="KV transport 'nixl' is unknown"):
        open_ucx("127.0.0.1", "nixl")
    with pytest.raises(ConfigError, match="needs staging on a GPU: choose 'zmq' or 'ucx'"):
        open_ucx("127.0.0.1", "ipc")
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(ConfigError, match=r"choose KV transport 'zmq'.*pip install .*ucxx-cu13"):
        open_ucx("127.0.0.1")


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
        "import sys\n"
        "from pagewire.shared.transfer.transports.ucx_settings import listens_on, ucx_settings\n"
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
