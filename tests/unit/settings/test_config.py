import math
import os
from typing import Any

import pytest

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.settings.base import ClusterSettings
from pagewire.shared.settings.config import RouterSettings, WorkerSettings, load_settings

KINDS = [ClusterSettings, WorkerSettings, RouterSettings]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PAGEWIRE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_defaults_are_valid(kind: type[ClusterSettings]) -> None:
    settings = load_settings(kind, {})
    assert settings.host == "127.0.0.1"
    assert settings.heartbeat_s * 2 <= settings.lease_s


def test_a_secret_that_was_made_up_is_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_settings(WorkerSettings, {}).warn_without_secret()
    assert caplog.text.count("PAGEWIRE_CLUSTER_SECRET is not set") == 1
    monkeypatch.setenv("PAGEWIRE_CLUSTER_SECRET", "that of all services")
    load_settings(WorkerSettings, {}).warn_without_secret()
    assert caplog.text.count("PAGEWIRE_CLUSTER_SECRET is not set") == 1


def test_the_command_line_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_PORT", "9001")
    monkeypatch.setenv("PAGEWIRE_MODEL", "from-environment")
    settings = load_settings(RouterSettings, {"port": 9002, "model": None})
    assert (settings.port, settings.model) == (9002, "from-environment")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("block_size", "32", 32),
        ("num_blocks", "100", 100),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enable_prefix_caching", "false", False),
        ("kv_transport", "zmq", "zmq"),
        ("lease_s", "2.5", 2.5),
        ("worker_id", "prefill-0.a:b_c", "prefill-0.a:b_c"),
    ],
)
def test_each_kind_of_field_reads_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(f"PAGEWIRE_{name.upper()}", text)
    assert getattr(load_settings(WorkerSettings, {}), name) == value


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("served_model_name", "b,a, b", ("b", "a")),
        ("served_model_name", " ", ()),
        ("cors_origins", "https://Chat.Example.com", ("https://chat.example.com",)),
        ("cors_origins", "https://a.b:443,HTTP://a.b:80", ("https://a.b", "http://a.b")),
        ("cors_origins", "http://a.b:443 http://[::1]:80", ("http://a.b:443", "http://[::1]")),
        ("cors_origins", "app://localhost:80,*", ("app://localhost:80", "*")),
        (
            "allowed_hosts",
            "chat.example.com, ::1,10.0.0.7",
            ("chat.example.com", "::1", "10.0.0.7"),
        ),
        ("allowed_hosts", "*", ("*",)),
    ],
)
def test_lists_have_each_value_once_and_origins_as_browsers_send_them(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, values: tuple[str, ...]
) -> None:
    monkeypatch.setenv(f"PAGEWIRE_{name.upper()}", text)
    assert getattr(load_settings(RouterSettings, {}), name) == values


@pytest.mark.parametrize("text", ["team=0.05, a=b@c=1", "team = 0.05,a=b@c=1.0,"])
def test_objectives_of_keys_are_read_by_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PAGEWIRE_SLO_GAP_S_OF_KEYS", text)
    settings = load_settings(RouterSettings, {})
    assert settings.slo_gap_s_of_keys == {"team": 0.05, "a=b@c": 1.0}


BAD_VALUES = [
    ("slo_gap_s", 0),
    ("slo_gap_s", 3601),
    ("slo_gap_s_of_keys", "team"),
    ("slo_gap_s_of_keys", "0.05"),
    ("slo_gap_s_of_keys", "=0.05"),
    ("slo_gap_s_of_keys", "team=fast"),
    ("slo_gap_s_of_keys", "team=0"),
    ("slo_gap_s_of_keys", "team=1,other=2, team=3"),
    ("cors_origins", "https://a.b/"),
    ("cors_origins", "https://*.example.com"),
    ("cors_origins", "a.b"),
    ("allowed_hosts", "chat.example.com:8000"),
    ("allowed_hosts", "https://chat.example.com"),
    ("allowed_hosts", "*.example.com"),
    ("allowed_hosts", "[::1]"),
    ("served_model_name", "größer"),
    ("served_model_name", " , "),
    ("cors_origins", ","),
    ("advertise_host", "::"),
    ("advertise_host", "two words"),
    ("port", 65536),
    ("port", -1),
    ("port", "http"),
    ("max_queue", 0),
    ("policy", "random"),
    ("log_level", "loud"),
    ("lease_s", 0),
    ("lease_s", -1),
    ("lease_s", math.nan),
    ("lease_s", math.inf),
    ("block_size", 17),
    ("block_size", "17"),
    ("gpu_memory_utilization", 1.5),
    ("staging_slots", 1),
    ("worker_id", ""),
    ("worker_id", "x" * 65),
    ("worker_id", "with space"),
    ("worker_id", "line\nbreak"),
    ("cluster_secret", ""),
    ("cluster_secret", "short"),
]


@pytest.mark.parametrize(
    ("name", "value"), BAD_VALUES, ids=[f"{name}={value!r:.12}" for name, value in BAD_VALUES]
)
def test_a_wrong_value_is_one_line_that_names_it(name: str, value: Any) -> None:
    kind = RouterSettings if name in RouterSettings.model_fields else WorkerSettings
    with pytest.raises(ConfigError, match=f"PAGEWIRE_{name.upper()}") as caught:
        load_settings(kind, {name: value})
    assert "\n" not in str(caught.value)


def test_a_secret_never_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CLUSTER_SECRET", "hush-hu")
    with pytest.raises(ConfigError) as caught:
        load_settings(ClusterSettings, {})
    assert "hush" not in str(caught.value)
    monkeypatch.setenv("PAGEWIRE_CLUSTER_SECRET", "hush-hush-hush")
    settings = load_settings(ClusterSettings, {})
    assert "hush" not in repr(settings)
    assert settings.cluster_secret.get_secret_value() == "hush-hush-hush"


def test_secrets_and_worker_ids_are_made_up_where_none_is_given() -> None:
    one, two = load_settings(WorkerSettings, {}), load_settings(WorkerSettings, {})
    assert one.cluster_secret != two.cluster_secret
    assert one.worker_id != two.worker_id


@pytest.mark.parametrize(
    "overrides",
    [{"heartbeat_s": 3.0}, {"lease_s": 1.0}, {"heartbeat_s": 2.0, "lease_s": 2.0}],
    ids=["heartbeat", "lease", "both"],
)
def test_a_lease_must_outlast_two_heartbeats(overrides: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="half of lease_s") as caught:
        load_settings(ClusterSettings, overrides)
    assert "value error" not in str(caught.value).lower()


@pytest.mark.parametrize(
    "overrides",
    [{"prefill_timeout_s": 19.0}, {"step_timeout_s": 30.0}],
    ids=["prefill", "step"],
)
def test_a_worker_that_hangs_is_noticed_before_its_jobs_move_on(
    overrides: dict[str, float],
) -> None:
    with pytest.raises(ConfigError, match=r"prefill_timeout_s .* twice step_timeout_s"):
        load_settings(WorkerSettings, overrides)


def test_settings_do_not_change_once_read() -> None:
    settings = load_settings(ClusterSettings, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.host = "0.0.0.0"  # noqa: S104 - never listened on
