"""Settings of the services, and the one reader of the environment.

Each field can be given as `PAGEWIRE_<NAME>` in the environment; the command line overrides it.
Names, types, defaults and descriptions are here alone: the command line's options are made from
them, and tests compare `.env.example` and README with them.
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
from pagewire.shared.common_settings import (
    GENERATION_CONFIG,
    METRICS_PORT,
    MODEL_IMPL,
    REASONING_PARSER,
    REVISION,
    SPECIAL_TOKENS,
    TOOL_PARSER,
)
from pagewire.shared.errors import ConfigError
from pagewire.shared.setting_names import (
    PREFIX,
    check_environment,
    check_keywords,
    is_from_kubernetes,
)
from pagewire.shared.setting_texts import described, description

SettingsT = TypeVar("SettingsT", bound="Settings")

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ServiceId = Annotated[str, Field(pattern=r"\A[A-Za-z0-9._:-]{1,64}\z")]


def _number_from_text(value: Any) -> Any:
    """Give what a `Literal` of numbers needs: the environment knows only text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _ids_from_text(value: Any) -> Any:
    """Return the ids in a comma-separated text."""
    if not isinstance(value, str):
        return value
    return [each.strip() for each in value.split(",") if each.strip()]


ServiceIds = Annotated[tuple[ServiceId, ...], NoDecode, BeforeValidator(_ids_from_text)]
HostName = Annotated[str, Field(pattern=r"\A[A-Za-z0-9._:-]{1,255}\z")]
BlockSize = Annotated[Literal[16, 32, 64, 128], BeforeValidator(_number_from_text)]
Port = Annotated[int, Field(ge=0, le=65535)]
GenerationConfig = Literal["auto", "none"]
SpecialTokens = Literal["text", "tokens"]
# Names of rows in shared/tools/formats.py and reasoning.py, which a test compares.
ToolParserName = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "mistral_args", "pythonic"
]
ReasoningParserName = Literal["auto", "none", "think", "mistral"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["safetensors", "dummy"]
ModelImpl = Literal["auto", "pagewire", "transformers"]
Kernels = Literal["auto", "triton", "torch"]
KvTransport = Literal["auto", "ipc", "ucx", "zmq"]
KvNetwork = Literal["untrusted", "private"]
Policy = Literal["prefix", "round_robin"]
LogLevel = Literal["debug", "info", "warning", "error"]
Revision = Annotated[str, Field(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}\z")]


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
    """What must be the same for every service of one cluster."""

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
    )
    host: str = described("127.0.0.1", "Address to listen on.")
    advertise_host: HostName | None = described(
        None,
        "Name or address that other services reach this one by.",
        unset="`host`, or this machine's own address if that is all addresses",
    )
    lease_s: Seconds = described(
        5.0, "A worker whose record was not renewed for this many seconds is dead."
    )
    heartbeat_s: Seconds = described(
        1.0, "Seconds between renewals of worker records, and between pings."
    )
    drain_timeout_s: Seconds = described(
        300.0,
        "Seconds for running requests to finish after SIGTERM. Those that do not then end with an "
        "error, or migrate from a decode worker to another.",
    )
    log_level: LogLevel = described("info", "Level of the services' logs.")

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
    """The engine of a worker or of the offline `LLM`."""

    model: str = described(
        "demo", 'A Hugging Face directory, a hub id, or "demo" for the model in the package.'
    )
    revision: Revision | None = REVISION
    model_impl: ModelImpl = MODEL_IMPL
    device: Device = described("auto", "auto takes CUDA where there is a GPU.")
    dtype: Dtype = described(
        "auto", "Data type of weights and KV cache; auto takes the checkpoint's."
    )
    load_format: LoadFormat = described(
        "safetensors", "dummy: random weights, for benchmarks of a shape."
    )
    kernels: Kernels = described(
        "auto", "Kernels that run; auto takes Triton on CUDA and torch on the CPU."
    )
    block_size: BlockSize = described(
        16, "Tokens in a KV block, the same in all workers: 16, 32, 64 or 128."
    )
    num_blocks: Positive | None = described(
        None, "Blocks in a worker's KV pool.", unset="as many as fit into memory"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=0.98)] = described(
        0.85,
        "Share of the GPU's memory for weights, activations and KV pool; workers that "
        "`pagewire up` starts on one GPU divide the default.",
    )
    max_model_len: Positive | None = described(
        None,
        "Longest prompt plus answer, in tokens.",
        unset="the model's, or what the KV pool holds if that is less",
    )
    max_num_seqs: Positive = described(256, "Sequences that run at once.")
    max_num_batched_tokens: Positive = described(
        2048, "Tokens of one step; longer prompts run in chunks."
    )
    max_waiting: Positive = described(1024, "Sequences that may wait for those that run.")
    enable_prefix_caching: bool = described(True, "Reuse blocks with equal content.")
    cuda_graphs: bool = described(
        True,
        "Replay decode steps, small prefill steps and copies of KV blocks as CUDA graphs.",
    )

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
    """The offline `LLM`."""

    generation_config: GenerationConfig = GENERATION_CONFIG
    special_tokens_in_messages: SpecialTokens = SPECIAL_TOKENS
    tool_parser: ToolParserName = TOOL_PARSER
    reasoning_parser: ReasoningParserName = REASONING_PARSER


class WorkerSettings(ClusterSettings, EngineSettings):
    """A prefill or decode service."""

    worker_id: ServiceId = described(
        lambda: f"worker-{secrets.token_hex(4)}",
        "Stable name of this worker; a restart under the same name has a new epoch.",
        unset="a random one",
    )
    control_port: Port = described(0, "Port of the control socket; 0 takes a free one.")
    metrics_port: Port = METRICS_PORT
    kv_transport: KvTransport = described(
        "auto",
        "How KV blocks are sent. auto: between GPUs ipc (CUDA IPC, one host), then ucx if the KV "
        "network is private; otherwise zmq, which is encrypted.",
    )
    kv_network: KvNetwork = described(
        "untrusted",
        "private: auto may take UCX, which is not encrypted. Anyone who reaches a UCX port can "
        "end the worker.",
    )
    # A decode worker lends two or more to each prefill worker, so that it takes half as many links.
    staging_slots: Annotated[int, Field(ge=2, le=256)] = described(
        16, "KV segments in flight at once; a decode worker takes half as many links."
    )
    # Where workers differ, segments fit the smaller staging slots of the two.
    staging_slot_bytes: Positive | None = described(
        None,
        "Largest KV segment, in bytes, rounded down to whole blocks.",
        unset="by the block's size and the GPU's memory",
    )
    local_prefill_tokens: Annotated[int, Field(ge=0)] = described(
        32, "A decode worker computes up to this many uncached prompt tokens itself."
    )
    transfer_timeout_s: Seconds = described(
        10.0,
        "Seconds for a KV segment to be acknowledged, for a KV link to answer, and for each step "
        "of opening one.",
    )
    prefill_timeout_s: Seconds = described(
        30.0,
        "Seconds without a segment or a first token of a prefill job, after which another worker "
        "gets it.",
    )


class RouterSettings(ClusterSettings):
    """The router."""

    # Of the model, the router reads only its tokenizer and configuration.
    model: str = described(
        EngineSettings.model_fields["model"].default, description(EngineSettings, "model")
    )
    revision: Revision | None = REVISION
    model_impl: ModelImpl = MODEL_IMPL
    served_model_name: str | None = described(
        None,
        "The name that clients ask for.",
        unset="the last part of the model's directory or hub id",
    )
    generation_config: GenerationConfig = GENERATION_CONFIG
    special_tokens_in_messages: SpecialTokens = SPECIAL_TOKENS
    tool_parser: ToolParserName = TOOL_PARSER
    reasoning_parser: ReasoningParserName = REASONING_PARSER
    router_id: ServiceId = described(
        lambda: f"router-{secrets.token_hex(4)}",
        "Name of this router, and the label `router` of its metrics; no two have the same.",
        unset="a random one",
    )
    port: Port = described(8000, "Port of the HTTP endpoint.")
    fd: Annotated[int, Field(ge=3)] | None = described(
        None,
        "File descriptor of a bound TCP socket to accept connections from, instead of host and "
        "port. Several routers can have the same socket.",
        unset="none",
    )
    # The HTTP endpoint has /metrics and /health, too. This port is for the other routers, since one
    # socket may be that of several.
    metrics_port: Port = METRICS_PORT
    policy: Policy = described(
        "prefix", "prefix places requests by cached prefix and load; round_robin, in turn."
    )
    max_queue: Positive = described(
        1024, "Requests in one router process at once; more are answered 429."
    )
    max_connections: Positive | None = described(
        None,
        "Open connections of one router. Those that wait for their clients make room for new "
        "ones; if all are served, new ones are answered 503.",
        unset="what the limit of open files allows",
    )
    trust_proxy_protocol: bool = described(
        False,
        "Take the client's address from a PROXY protocol v2 header in front of a connection's "
        "first request; only for a router that clients reach through a gateway alone.",
    )
    request_timeout_s: Seconds = described(
        300.0, "A request without any token for this many seconds fails."
    )
    expected_workers: ServiceIds = described(
        (),
        "Ids, separated by commas, of the workers that /health waits for after the start "
        "before it says ok; requests are served meanwhile.",
    )


class ClientSettings(Settings):
    """The commands that talk to an endpoint."""

    url: str = described("http://127.0.0.1:8000", "URL of the endpoint, with or without /v1.")
    api_key: SecretStr | None = described(None, "Sent as a bearer token.", unset="none")


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
