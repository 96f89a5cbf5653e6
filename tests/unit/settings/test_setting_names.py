"""Names of settings: near misses are refused, other unknown ones reported."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import pytest

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.settings.config import (
    EngineSettings,
    LLMSettings,
    RouterSettings,
    WorkerSettings,
    load_settings,
)
from pagewire.tests.support.documents import ROOT


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("PAGEWIRE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("max_len", "max_model_len"),
        ("blocksize", "block_size"),
        ("Model", "model"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_name(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{given} is not a setting; did you mean {meant}"):
        load_settings(LLMSettings, {given: 1})


def test_a_keyword_like_no_other_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match=r"xyzzy is not a setting; there are .*block_size"):
        load_settings(EngineSettings, {"xyzzy": None})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PAGEWIRE_MODL", "PAGEWIRE_MODEL"),
        ("PAGEWIRE_GPU_MEMORY_UTILISATION", "PAGEWIRE_GPU_MEMORY_UTILIZATION"),
        ("PAGEWIRE_MAX_MODEL_LENGTH", "PAGEWIRE_MAX_MODEL_LEN"),
        ("PAGEWIRE_NUM_BLOCK", "PAGEWIRE_NUM_BLOCKS"),
        ("PAGEWIRE_BLOCKSIZE", "PAGEWIRE_BLOCK_SIZE"),
        ("PAGEWIRE_PREFILL_TIMEOUT", "PAGEWIRE_PREFILL_TIMEOUT_S"),
        ("PAGEWIRE_GPU", "PAGEWIRE_GPUS"),
        ("PAGEWIRE_APIKEY", "PAGEWIRE_API_KEY"),
        ("pagewire_modl", "PAGEWIRE_MODEL"),
    ],
)
@pytest.mark.parametrize("kind", [RouterSettings, WorkerSettings, LLMSettings])
def test_a_near_miss_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=rf"{name} is not a setting; did you mean {meant}\?"):
        load_settings(kind, {})


def test_other_unknown_names_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        f"PAGEWIRE_{name}"
        for name in ("HOME", "VERSION", "NAMESPACE", "IMAGE", "LOG_DIR", "MODEL_NAME", "ENV")
    ]
    for name in names:
        monkeypatch.setenv(name, "1")
    for _ in range(2):
        load_settings(RouterSettings, {})
        load_settings(WorkerSettings, {})
    assert sorted(record.getMessage().split()[0] for record in caplog.records) == sorted(names)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


KUBERNETES = {
    "PAGEWIRE_SERVICE_HOST": "10.0.0.1",
    "PAGEWIRE_SERVICE_PORT": "8000",
    "PAGEWIRE_SERVICE_PORT_HTTP": "8000",
    "PAGEWIRE_PORT": "tcp://10.0.0.1:8000",
    "PAGEWIRE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "PAGEWIRE_PORT_8000_TCP_PROTO": "tcp",
    "PAGEWIRE_PORT_8000_TCP_PORT": "8000",
    "PAGEWIRE_PORT_8000_TCP_ADDR": "10.0.0.1",
    "PAGEWIRE_ROUTER_SERVICE_HOST": "10.0.0.2",
    "PAGEWIRE_ROUTER_SERVICE_PORT": "8000",
    "PAGEWIRE_ROUTER_PORT": "tcp://10.0.0.2:8000",
    "PAGEWIRE_ROUTER_PORT_8000_TCP": "tcp://10.0.0.2:8000",
    "PAGEWIRE_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.2",
    "PAGEWIRE_METRICS_PORT": "tcp://10.0.0.3:9100",  # of a Service pagewire-metrics
    "PAGEWIRE_CONTROL_PORT": "udp://10.0.0.4:9100",
    "PAGEWIRE_MODEL_SERVICE_HOST": "10.0.0.5",
}


def test_what_kubernetes_injects_for_a_service_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name, value)
    assert load_settings(RouterSettings, {}).port == RouterSettings.model_fields["port"].default
    worker = load_settings(WorkerSettings, {})
    assert (worker.control_port, worker.metrics_port) == (0, 0)
    assert not caplog.records


def test_a_port_that_is_a_number_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_PORT", "9001")
    assert load_settings(RouterSettings, {}).port == 9001
    monkeypatch.setenv("PAGEWIRE_PORT", "http://10.0.0.1")
    with pytest.raises(ConfigError, match="PAGEWIRE_PORT"):
        load_settings(RouterSettings, {})


def test_all_names_of_the_compose_files_are_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = [".env.example", "docker-compose.yml", "docker-compose.gpu.yml"]
    files += ["services/container_start.sh"]
    text = "".join((ROOT / file).read_text() for file in files)
    names = set(re.findall(r"PAGEWIRE_[A-Z_]+[A-Z]", text))
    assert {"PAGEWIRE_BIND", "PAGEWIRE_MODELS", "PAGEWIRE_GPU_LOCKS"} < names
    fields = WorkerSettings.model_fields | RouterSettings.model_fields
    for name in names - {f"PAGEWIRE_{field.upper()}" for field in fields}:
        monkeypatch.setenv(name, "something")
    monkeypatch.setenv("PAGEWIRE_URL", "http://127.0.0.1:8000")
    monkeypatch.setenv("PAGEWIRE_TEST_SOMETHING", "1")
    load_settings(RouterSettings, {})
    assert not caplog.records
