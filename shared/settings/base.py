"""What all settings have in common: where values come from, and what a cluster's services share."""

from __future__ import annotations

import logging
import os
import secrets
from typing import Annotated

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pagewire.shared.base.addresses import WILDCARDS
from pagewire.shared.settings.common import RESTARTS
from pagewire.shared.settings.names import PREFIX, is_from_kubernetes
from pagewire.shared.settings.texts import MAIN, NETWORK, described
from pagewire.shared.settings.types import (
    AllowedHosts,
    HostName,
    LogFormat,
    LogLevel,
    OtlpEndpoint,
    Seconds,
)

logger = logging.getLogger(__name__)


class Settings(BaseSettings):
    """Base of settings that are read from the environment."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, validate_default=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Prefer keywords to the environment; ignore the variables that Kubernetes Services set."""
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = {
                name: value
                for name, value in env_settings.env_vars.items()
                if not is_from_kubernetes(name.upper().removeprefix(PREFIX), value or "")
            }
        return init_settings, env_settings


class ClusterSettings(Settings):
    """Settings that must be the same for every service of a cluster."""

    cluster_secret: SecretStr = described(
        lambda: SecretStr(secrets.token_hex(32)),
        "Keys of the control channel and of block hashes derive from it; the same in all services.",
        unset="random",
        min_length=8,
    )
    redis_url: str = described(
        "redis://127.0.0.1:6379/0",
        "Redis with prefix index and worker records: redis://[:password@]host:port/db or "
        "unix:///path.",
        panel=NETWORK,
    )
    host: str = described("127.0.0.1", "Address to listen on.", panel=NETWORK)
    advertise_host: HostName | None = described(
        None,
        "Name or address that other services reach this one by.",
        unset="`host`, or this machine's own address if that is all addresses",
    )
    allowed_hosts: AllowedHosts | None = described(
        None,
        "Names, separated by commas, by which clients reach HTTP ports that listen on the loopback "
        "address, besides localhost and loopback addresses, such as host.docker.internal; * allows "
        "all. Ports that listen on other addresses take any name.",
        unset="none",
        panel=NETWORK,
    )
    lease_s: Seconds = described(
        5.0, "A worker whose record was not renewed for this many seconds is dead."
    )
    heartbeat_s: Seconds = described(
        1.0, "Seconds between renewals of worker records, and between pings."
    )
    drain_timeout_s: Seconds = described(
        300.0,
        "Seconds for running requests to finish after SIGTERM. After that, a router's end with an "
        "error, and a decode worker's migrate to another one.",
        panel=NETWORK,
    )
    log_level: LogLevel = described("info", "Level of the services' logs.", panel=MAIN)
    restarts: Annotated[int, Field(ge=0)] = RESTARTS
    log_format: LogFormat = described(
        "text", "Form of the services' log lines; json: each line is a JSON object.", panel=MAIN
    )

    otlp_endpoint: OtlpEndpoint | None = described(
        lambda: os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None,
        "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as "
        "http://127.0.0.1:4318; each service sends it the spans of requests. Needs the extra "
        "`otel`.",
        unset="OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of this service's HTTP ports, besides local ones; "*" stands for all."""
        return (*(self.allowed_hosts or ()), self.host, self.advertise_host or self.host)

    def warn_without_secret(self) -> None:
        """Warn if the secret was made up, so that no other service has it."""
        if "cluster_secret" not in self.model_fields_set:
            logger.warning(
                "PAGEWIRE_CLUSTER_SECRET is not set, so this process has made one up: services "
                "that are started one by one find each other only if all have the same"
            )

    @field_validator("advertise_host")
    @classmethod
    def _leads_somewhere(cls, value: str | None) -> str | None:
        if value in WILDCARDS:
            raise ValueError("a name or address that others reach this service by")
        return value

    @field_validator("heartbeat_s")
    @classmethod
    def _lease_outlasts_two_heartbeats(cls, value: float, info: ValidationInfo) -> float:
        lease_s = info.data.get("lease_s")
        if lease_s is not None and value > lease_s / 2:
            raise ValueError(f"at most half of lease_s, which is {lease_s:g}")
        return value
