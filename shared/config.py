"""Settings of the services, and the one reader of the environment.

Each field can be given as `PAGEWIRE_<NAME>` in the environment; the command line overrides it.
"""

from __future__ import annotations

import os
import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pagewire.shared.addresses import WILDCARDS
from pagewire.shared.errors import ConfigError
from pagewire.shared.setting_names import (
    PREFIX,
    check_environment,
    check_keywords,
    is_from_kubernetes,
)

SettingsT = TypeVar("SettingsT", bound="Settings")

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WorkerId = Annotated[str, Field(pattern=r"\A[A-Za-z0-9._:-]{1,64}\z")]


def _number_from_text(value: Any) -> Any:
    """Give what a `Literal` of numbers needs: the environment knows only text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _ids_from_text(value: Any) -> Any:
    """Return the ids in a comma-separated text."""
    if not isinstance(value, str):
        return value
    return [each.strip() for each in value.split(",") if each.strip()]


HostName = Annotated[str, Field(pattern=r"\A[A-Za-z0-9._:-]{1,255}\z")]
BlockSize = Annotated[Literal[16, 32, 64, 128], BeforeValidator(_number_from_text)]
Port = Annotated[int, Field(ge=0, le=65535)]
GenerationConfig = Literal["auto", "none"]


class Settings(BaseSettings):
    """Read from the environment."""

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
        """Prefer keywords to the environment, and leave out what describes a Kubernetes Service."""
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = {
                name: value
                for name, value in env_settings.env_vars.items()
                if not is_from_kubernetes(name.upper().removeprefix(PREFIX), value or "")
            }
        return init_settings, env_settings


class ClusterSettings(Settings):
    """What every service of one cluster must be told alike.

    Attributes:
        cluster_secret: keys of the control channel and of block hashes derive from it.
        redis_url: `redis://[:password@]host:port/db` or `unix:///path/to/socket`.
        host: address that this service's sockets listen on.
        advertise_host: name or address that others reach it by; None takes `host`, or where that
            is all addresses (0.0.0.0, ::) this machine's own on the way to Redis.
        lease_s: a worker whose card was not renewed for this long is dead.
        heartbeat_s: how often cards are renewed and peers are pinged.
        log_level: of the standard library's logging.
    """

    cluster_secret: SecretStr = Field(
        default_factory=lambda: SecretStr(secrets.token_hex(32)), min_length=8
    )
    redis_url: str = "redis://127.0.0.1:6379/0"
    host: str = "127.0.0.1"
    advertise_host: HostName | None = None
    lease_s: Seconds = 5.0
    heartbeat_s: Seconds = 1.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

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


class EngineSettings(Settings):
    """The engine of a worker or of the offline `LLM`.

    Attributes:
        model: a local Hugging Face directory, a hub id, or "demo" for the model in the package.
        device: `auto` takes CUDA where there is a GPU.
        dtype: of weights, activations and KV cache; `auto` takes the checkpoint's.
        load_format: `dummy` gives random weights, for benchmarks of a shape.
        kernels: backend; `auto` takes Triton on CUDA and torch on the CPU.
        block_size: tokens in a KV block.
        num_blocks: of the KV pool; None sizes it by memory.
        gpu_memory_utilization: share of the GPU that weights, activations and pool may take.
        max_model_len: longest prompt plus answer; None takes the model's, or what the KV pool
            holds if that is less.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: of one step; longer prompts are prefilled in chunks.
        max_waiting: requests that may queue behind those running.
        enable_prefix_caching: reuse of blocks with equal content.
        cuda_graphs: replay decode steps, small prefill steps and moves of KV blocks as CUDA
            graphs (CUDA only).
    """

    model: str = "demo"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    kernels: Literal["auto", "triton", "torch"] = "auto"
    block_size: BlockSize = 16
    num_blocks: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=0.98)] = 0.85
    max_model_len: Positive | None = None
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 2048
    max_waiting: Positive = 1024
    enable_prefix_caching: bool = True
    cuda_graphs: bool = True

    @field_validator("max_model_len")
    @classmethod
    def _fits_the_blocks_asked_for(cls, value: int | None, info: ValidationInfo) -> int | None:
        num_blocks, block_size = info.data.get("num_blocks"), info.data.get("block_size")
        if value is None or num_blocks is None or block_size is None:
            return value
        if value > num_blocks * block_size:
            raise ValueError(
                f"at most {num_blocks * block_size}, which is what {num_blocks} KV blocks of "
                f"{block_size} tokens hold: lower it, or raise num_blocks to "
                f"{-(-value // block_size)}"
            )
        return value


class LLMSettings(EngineSettings):
    """The offline `LLM`.

    Attributes:
        generation_config: `auto` takes sampling defaults from the model's
            `generation_config.json`, `none` leaves them out.
    """

    generation_config: GenerationConfig = "auto"


class WorkerSettings(ClusterSettings, EngineSettings):
    """A prefill or decode service.

    Attributes:
        worker_id: stable name of the worker; a restart under the same name has a new epoch.
        control_port: of the ZeroMQ control socket; 0 takes a free one.
        metrics_port: of the worker's own HTTP `/metrics` and `/health`; 0 takes a free one.
        kv_transport: how KV blocks cross. `auto`: between the GPUs of one host by CUDA IPC, else by
            UCX where the KV network is private, else by ZeroMQ.
        kv_network: between the workers. `private`: no stranger reaches it, so that UCX may be used:
            anyone who reaches a UCX port can end the worker, and blocks cross unencrypted.
        staging_slots: KV segments that may be under way at once. A decode worker lends two or more
            to each prefill worker, so that it takes half as many links.
        staging_slot_bytes: upper bound of a segment's blocks, rounded down to whole ones; None
            picks it from the block's size, and bounds all slots by a share of the GPU's memory.
            Where workers differ, segments fit the smaller slots of the two.
        local_prefill_tokens: a decode worker computes up to this many uncached prompt tokens
            itself instead of sending them away.
        transfer_timeout_s: for a segment to be acknowledged; also for each step of opening a KV
            link.
        prefill_timeout_s: without a segment or the first token of a prefill job, after which the
            next prefill worker gets it, or with none left this decode worker.
        drain_timeout_s: for running requests to finish after SIGTERM.
    """

    worker_id: WorkerId = Field(default_factory=lambda: f"worker-{secrets.token_hex(4)}")
    control_port: Port = 0
    metrics_port: Port = 0
    kv_transport: Literal["auto", "ipc", "ucx", "zmq"] = "auto"
    kv_network: Literal["private", "untrusted"] = "untrusted"
    staging_slots: Annotated[int, Field(ge=2, le=256)] = 16
    staging_slot_bytes: Positive | None = None
    local_prefill_tokens: Annotated[int, Field(ge=0)] = 32
    transfer_timeout_s: Seconds = 10.0
    prefill_timeout_s: Seconds = 30.0
    drain_timeout_s: Seconds = 30.0


class RouterSettings(ClusterSettings):
    """The router.

    Attributes:
        model: as for the workers; the router reads only its tokenizer and configuration.
        served_model_name: under which clients ask for it; None takes the directory's or hub
            id's last part.
        generation_config: `auto` takes sampling defaults from the model's
            `generation_config.json`, `none` leaves them out.
        port: of the HTTP endpoint.
        policy: `prefix` places by cached prefix and load, `round_robin` in turn.
        max_queue: requests in the system at once; more are answered 429.
        request_timeout_s: without any token, after which a request fails.
        expected_workers: ids, separated by commas, of the workers that `/health` waits for after
            the router's start before it says ok; requests are served meanwhile.
    """

    model: str = "demo"
    served_model_name: str | None = None
    generation_config: GenerationConfig = "auto"
    port: Port = 8000
    policy: Literal["prefix", "round_robin"] = "prefix"
    max_queue: Positive = 1024
    request_timeout_s: Seconds = 300.0
    expected_workers: Annotated[
        tuple[WorkerId, ...], NoDecode, BeforeValidator(_ids_from_text)
    ] = ()


class ClientSettings(Settings):
    """The commands that talk to an endpoint.

    Attributes:
        url: of the endpoint, with or without `/v1`.
        api_key: sent as a bearer token.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: SecretStr | None = None


# All services may share an environment; each reads only its own settings.
_ALL_FIELDS = {
    field
    for kind in (LLMSettings, WorkerSettings, RouterSettings, ClientSettings)
    for field in kind.model_fields
}


def threads_are_chosen() -> bool:
    """Whether the environment sets how many threads torch's operations get on the CPU."""
    return any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def load_settings(kind: type[SettingsT], overrides: dict[str, Any]) -> SettingsT:
    """Read settings from the environment, with the command line's values on top.

    Args:
        kind: the settings class of a service.
        overrides: values by field name; None means "not given".

    Raises:
        ConfigError: a name is unknown or misspelt, or a value is out of range; one line that
            names it and what is right.
    """
    check_keywords(overrides.keys(), kind.model_fields.keys())
    check_environment(os.environ, _ALL_FIELDS)
    try:
        return kind(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        given = "what it is" if field == "cluster_secret" else repr(first["input"])
        rule = first["msg"].removeprefix("Value error, ")
        if first["type"] == "too_short":  # what pydantic says of a secret's characters
            rule = rule.replace("item", "character")
        raise ConfigError(
            f"setting {field} (PAGEWIRE_{field.upper()}) cannot be {given}: "
            f"{rule[0].lower()}{rule[1:]}"
        ) from None if field == "cluster_secret" else exc
