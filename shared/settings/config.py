"""Settings of the services, and the one reader of the environment.

Each field can be given as `PAGEWIRE_<NAME>` in the environment; the command line overrides it.
Names, types, defaults and descriptions are only here and in three modules that this one imports:
`base.py` has the settings of all services, `common.py` those of several, `keys.py` those of API
keys. The command line's options are made from them; tests compare `.env.example` and
docs/configuration.md with them.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator

from pagewire.shared.base.addresses import usual_operator_port
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.settings.base import ClusterSettings, Settings
from pagewire.shared.settings.common import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    METRICS_PORT,
    MODEL_IMPL,
    OPERATOR_FD,
    OPERATOR_PORT,
    OPERATOR_URL,
    REASONING_PARSER,
    RESPONSES_BYTES,
    RESPONSES_REDIS_URL,
    REVISION,
    SERVED_MODEL_NAME,
    SPECIAL_TOKENS,
    TOOL_PARSER,
)
from pagewire.shared.settings.keys import KeySettings
from pagewire.shared.settings.names import (
    check_environment,
    check_keywords,
)
from pagewire.shared.settings.texts import ENGINE, MAIN, NETWORK, described, description
from pagewire.shared.settings.types import (
    BlockSize,
    Device,
    Dtype,
    Gap,
    GenerationConfig,
    Kernels,
    KvCacheDtype,
    KvNetwork,
    KvTransport,
    LoadFormat,
    ModelImpl,
    ModelNames,
    Origins,
    Policy,
    Port,
    Positive,
    Quantization,
    ReasoningParserName,
    Revision,
    Seconds,
    Seed,
    ServiceId,
    ServiceIds,
    SpecialTokens,
    TensorParallelSize,
    ToolParserName,
)

SettingsT = TypeVar("SettingsT", bound="Settings")


class EngineSettings(Settings):
    """The engine of a worker or of the offline `LLM`."""

    model: str = described(
        "demo",
        'A Hugging Face directory, a hub id, or "demo" for the model in the package.',
        panel=MAIN,
    )
    revision: Revision | None = REVISION
    model_impl: ModelImpl = MODEL_IMPL
    device: Device = described("auto", "auto takes CUDA where there is a GPU.", panel=ENGINE)
    dtype: Dtype = described(
        "auto", "Data type of weights and activations; auto takes the checkpoint's.", panel=ENGINE
    )
    quantization: Quantization = described(
        "auto",
        "auto: as the checkpoint has them. fp8: weights of an unquantised checkpoint are quantised "
        "to FP8 while they are loaded. The same in all workers.",
        panel=ENGINE,
    )
    kv_cache_dtype: KvCacheDtype = described(
        "auto",
        "auto: the KV cache has the data type of activations. fp8: it is in FP8 (e4m3), with half "
        "the bytes of bfloat16. The same in all workers.",
        panel=ENGINE,
    )
    tensor_parallel_size: TensorParallelSize = described(
        1,
        "Number of processes that compute one model together: each has a part of the weights and "
        "of the KV cache, and a GPU; with --device cpu they share the cores.",
        panel=ENGINE,
    )
    ranks_share_gpu: bool = described(
        False,
        "Put all processes of a model on one GPU, for tests: they take turns on it, and are slower "
        "than one.",
        panel=ENGINE,
    )
    load_format: LoadFormat = described(
        "safetensors", "dummy: random weights, for benchmarks of a shape.", panel=ENGINE
    )
    kernels: Kernels = described(
        "auto", "Kernels that run; auto takes Triton on CUDA and torch on the CPU.", panel=ENGINE
    )
    block_size: BlockSize = described(
        16, "Tokens in a KV block, the same in all workers: 16, 32, 64 or 128.", panel=ENGINE
    )
    num_blocks: Positive | None = described(
        None, "Blocks in a worker's KV pool.", unset="as many as fit into memory", panel=ENGINE
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=0.98)] = described(
        0.85,
        "Share of the GPU's memory for weights, activations and KV pool; workers that "
        "`pagewire up` starts on one GPU divide the default.",
        panel=ENGINE,
    )
    max_model_len: Positive | None = described(
        None,
        "Longest prompt plus answer, in tokens.",
        unset="the model's, or what the KV pool holds if that is less",
        panel=ENGINE,
    )
    max_num_seqs: Positive = described(512, "Sequences that run at once.", panel=ENGINE)
    max_num_batched_tokens: Positive = described(
        2048, "Tokens of one step; longer prompts run in chunks.", panel=ENGINE
    )
    slo_gap_s: Gap | None = described(
        None,
        "Largest time between two tokens of a running answer that the worker tries to keep, in "
        "seconds: it computes prompts next to it in shorter parts. A request may have its own.",
        unset="none",
        panel=ENGINE,
    )
    max_waiting: Positive = described(
        1024, "Sequences that may wait for those that run.", panel=ENGINE
    )
    enable_prefix_caching: bool = described(True, "Reuse blocks with equal content.", panel=ENGINE)
    cuda_graphs: bool = described(
        True,
        "Replay decode steps, small prefill steps and copies of KV blocks as CUDA graphs.",
        panel=ENGINE,
    )
    batch_invariant: bool = described(
        False,
        "Make a token's log probabilities the same bits in every batch, however its prompt is cut "
        "into chunks and whether it is recomputed; slower. The same in all workers.",
        panel=ENGINE,
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
    """Settings of the offline `LLM` and `AsyncLLM`."""

    seed: Seed | None = described(
        None,
        "Makes a program's answers reproducible: from it and their number follow the seeds of "
        "requests that have none.",
        unset="each has a random seed",
    )
    generation_config: GenerationConfig = GENERATION_CONFIG
    special_tokens_in_messages: SpecialTokens = SPECIAL_TOKENS
    chat_template: Path | None = CHAT_TEMPLATE
    tool_parser: ToolParserName = TOOL_PARSER
    reasoning_parser: ReasoningParserName = REASONING_PARSER


class WorkerSettings(ClusterSettings, EngineSettings):
    """Settings of a prefill or decode worker."""

    served_model_name: ModelNames | None = SERVED_MODEL_NAME
    worker_id: ServiceId = described(
        lambda: f"worker-{secrets.token_hex(4)}",
        "Stable name of this worker; a restart under the same name has a new epoch.",
        unset="a random one",
        panel=NETWORK,
    )
    control_port: Port = described(
        0, "Port of the control socket; 0 takes a free one.", panel=NETWORK
    )
    metrics_port: Port = METRICS_PORT
    kv_transport: KvTransport = described(
        "auto",
        "How KV blocks are sent. auto: between GPUs ipc (CUDA IPC, one host), then ucx if the KV "
        "network is private; otherwise zmq, which is encrypted.",
        panel=NETWORK,
    )
    kv_network: KvNetwork = described(
        "untrusted",
        "private: auto may take UCX, which is not encrypted. Anyone who reaches a UCX port can "
        "end the worker.",
        panel=NETWORK,
    )
    # Each link of a decode worker needs at least two of its staging slots.
    staging_slots: Annotated[int, Field(ge=2, le=256)] = described(
        16,
        "KV segments in flight at once; a decode worker accepts at most half as many KV links.",
        panel=NETWORK,
    )
    # If two workers differ, segments fit into the smaller staging slots.
    staging_slot_bytes: Positive | None = described(
        None,
        "Largest KV segment, in bytes, rounded down to whole blocks.",
        unset="by the block's size and the GPU's memory",
        panel=NETWORK,
    )
    local_prefill_tokens: Annotated[int, Field(ge=0)] = described(
        32,
        "A decode worker computes up to this many uncached prompt tokens itself, unless its router "
        "predicts what is best.",
        panel=ENGINE,
    )
    retained_share: Annotated[float, Field(ge=0, le=1)] = described(
        0.5,
        "Share of a worker's KV pool that the sessions of one API key, or of one client's "
        "address where there are no keys, may keep while they pause: these blocks are evicted "
        "after others.",
        panel=ENGINE,
    )
    transfer_timeout_s: Seconds = described(
        10.0,
        "Seconds for the oldest KV segment under way to be acknowledged, and for each step of "
        "opening a KV link.",
    )
    step_timeout_s: Seconds = described(
        10.0,
        "Seconds that a step may take beyond 4 times its predicted time; then its worker counts as "
        "hanging, ends, and is started again.",
    )
    prefill_timeout_s: Seconds = described(
        30.0,
        "Seconds without a segment or a first token of a prefill job, after which another worker "
        "gets it; at least twice step_timeout_s.",
    )

    @field_validator("prefill_timeout_s")
    @classmethod
    def _outlasts_a_hang(cls, value: float, info: ValidationInfo) -> float:
        """Leave a worker that hangs time to name the job before another worker gets it."""
        step_timeout_s = info.data.get("step_timeout_s")
        if step_timeout_s is not None and value < 2 * step_timeout_s:
            raise ValueError(f"at least twice step_timeout_s, which is {step_timeout_s:g}")
        return value


class RouterSettings(ClusterSettings, KeySettings):
    """Settings of a router, the cluster's HTTP server."""

    # Of the model, the router reads only its tokenizer and configuration.
    model: str = described(
        EngineSettings.model_fields["model"].default,
        description(EngineSettings, "model"),
        panel=MAIN,
    )
    revision: Revision | None = REVISION
    model_impl: ModelImpl = MODEL_IMPL
    served_model_name: ModelNames | None = SERVED_MODEL_NAME
    generation_config: GenerationConfig = GENERATION_CONFIG
    special_tokens_in_messages: SpecialTokens = SPECIAL_TOKENS
    chat_template: Path | None = CHAT_TEMPLATE
    trust_request_chat_template: bool = described(
        False,
        "Let a request bring its own chat template, in the field chat_template. It runs in a "
        "sandbox, in a process of its own, for 2 s of CPU time at most.",
        panel=MAIN,
    )
    trust_request_placement: bool = described(
        False,
        "Let a request have a prefill worker compute its prompt, even where that takes longer, by "
        "the field use_prefill_worker; for tests and demonstrations.",
        panel=MAIN,
    )
    tool_parser: ToolParserName = TOOL_PARSER
    reasoning_parser: ReasoningParserName = REASONING_PARSER
    router_id: ServiceId = described(
        lambda: f"router-{secrets.token_hex(4)}",
        "Name of this router, and the label `router` of its metrics; no two have the same.",
        unset="a random one",
        panel=NETWORK,
    )
    port: Port = described(8000, "Port of the HTTP endpoint.", panel=NETWORK)
    responses_redis_url: str | None = RESPONSES_REDIS_URL
    responses_bytes: Annotated[int, Field(ge=0)] = RESPONSES_BYTES
    cors_origins: Origins | None = described(
        None,
        "Origins, separated by commas, whose pages may use the endpoint from a browser, such as "
        "https://chat.example.com; * allows all.",
        unset="none",
        panel=NETWORK,
    )
    fd: Annotated[int, Field(ge=3)] | None = described(
        None,
        "File descriptor of a bound TCP socket to accept connections from, instead of host and "
        "port. Several routers can have the same socket.",
        unset="none",
        panel=NETWORK,
    )
    metrics_port: Port = METRICS_PORT
    operator_port: Port | None = OPERATOR_PORT
    operator_fd: Annotated[int, Field(ge=3)] | None = OPERATOR_FD
    policy: Policy = described(
        "predicted",
        "predicted places requests where the answer is predicted to come soonest and to delay "
        "others least; prefix, by cached prefix and load, and the prompt to a prefill worker; "
        "round_robin, in turn.",
        panel=NETWORK,
    )
    max_queue: Positive = described(
        1024,
        "Answers of one API key, or of one client's address where there are no keys, that run or "
        "wait in one router process at once, fewer if others have many; more are answered 429.",
        panel=NETWORK,
    )
    max_connections: Positive | None = described(
        None,
        "Open connections of one router. Those that wait for their clients make room for new "
        "ones; if all are being served, new ones are answered 503.",
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
        "Ids, separated by commas, of the workers that /ready waits for after the start "
        "before it answers 200; requests are served meanwhile.",
    )

    @property
    def chosen_operator_port(self) -> int:
        """The operator port; 0 takes a free one."""
        if self.operator_port is not None:
            return self.operator_port
        return usual_operator_port(0 if self.fd is not None else self.port)


class ClientSettings(Settings):
    """The commands that talk to an endpoint."""

    url: str = described("http://127.0.0.1:8000", "URL of the endpoint, with or without /v1.")
    operator_url: str | None = OPERATOR_URL
    api_key: SecretStr | None = described(
        lambda: SecretStr(key) if (key := os.environ.get("OPENAI_API_KEY")) else None,
        "Sent as a bearer token.",
        unset="OPENAI_API_KEY, or none",
    )


# All services may share an environment; each reads only its own settings.
_ALL_FIELDS = {
    field
    for kind in (LLMSettings, WorkerSettings, RouterSettings, ClientSettings)
    for field in kind.model_fields
}


_SECRETS = ("cluster_secret", "api_key")  # no error shows them


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
        field, *part = map(str, first["loc"])
        is_secret = field in _SECRETS
        verb = "have" if part else "be"
        problem = "is wrong" if is_secret else f"cannot {verb} {first['input']!r}"
        rule = first["msg"].removeprefix("Value error, ")
        if first["type"] == "too_short":  # pydantic's error for a short secret
            least, actual = first["ctx"]["min_length"], first["ctx"]["actual_length"]
            rule = f"it must have at least {least} characters, not {actual}"
        raise ConfigError(
            f"setting {field} (PAGEWIRE_{field.upper()}) {problem}: {rule[0].lower()}{rule[1:]}"
        ) from None if is_secret else exc
