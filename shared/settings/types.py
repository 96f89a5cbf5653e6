"""Types of settings: what each may be, and how it is read from text."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode


def _matching(pattern: str, rule: str) -> AfterValidator:
    """Return what refuses a text that does not match, in words that complete "it must be"."""
    expected = re.compile(pattern)

    def check(value: str) -> str:
        if not expected.fullmatch(value):
            raise ValueError(f"it must be {rule}")
        return value

    return AfterValidator(check)


def _seconds_from_text(value: Any) -> Any:
    """Return the seconds by name of a text of `NAME=SECONDS`, separated by commas."""
    if not isinstance(value, str):
        return value
    parts = [part.rpartition("=") for part in value.split(",") if part.strip()]
    if not all(name.strip() for name, _, _ in parts):
        raise ValueError("it must be NAME=SECONDS, or several separated by commas")
    found = {name.strip(): seconds.strip() for name, _, seconds in parts}
    if len(found) < len(parts):
        raise ValueError("a name is there twice")
    return found


Positive = Annotated[int, Field(gt=0)]
TensorParallelSize = Annotated[int, Field(ge=1, le=64)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Gap = Annotated[float, Field(gt=0, le=3600)]  # in seconds, as `RequestSpec.slo_gap_s` may be
GapByName = Annotated[dict[str, Gap], NoDecode, BeforeValidator(_seconds_from_text)]
ServiceId = Annotated[
    str, _matching(r"[A-Za-z0-9._:-]{1,64}", "1 to 64 letters, digits, '.', '_', ':' or '-'")
]


# Characters that clients can send in a header.
API_KEY = re.compile(r"[!-~]{8,512}")
API_KEY_RULE = "8 to 512 printable ASCII characters without blanks"
HASHED = "sha256:"  # a key's hash in a file of keys begins with this


def _sendable(value: SecretStr) -> SecretStr:
    key = value.get_secret_value()
    if key.lower().startswith(HASHED):
        raise ValueError("it is a hash, which only a file of keys may have")
    if not API_KEY.fullmatch(key):
        raise ValueError(f"it must be {API_KEY_RULE}")
    return value


ApiKeyText = Annotated[SecretStr, AfterValidator(_sendable)]


def _number_from_text(value: Any) -> Any:
    """Give what a `Literal` of numbers needs: the environment knows only text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _ids_from_text(value: Any) -> Any:
    """Return the ids in a comma-separated text."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


ServiceIds = Annotated[tuple[ServiceId, ...], NoDecode, BeforeValidator(_ids_from_text)]


def _names_from_text(value: Any) -> Any:
    """Return the names in a text, separated by commas or blanks, each once."""
    if not isinstance(value, str):
        return value
    return list(dict.fromkeys(value.replace(",", " ").split() or value.split()))


def _as_browsers_send_it(origin: str) -> str:
    """Return an origin in lower case, without the port that its scheme has anyway."""
    origin = origin.lower()
    usual_port = {"http": ":80", "https": ":443"}.get(origin.partition(":")[0], "")
    return origin.removesuffix(usual_port)


ModelName = Annotated[
    str, _matching(r"[!-+.-~-]{1,200}", "1 to 200 ASCII characters, no blanks or commas")
]
ModelNames = Annotated[tuple[ModelName, ...], NoDecode, BeforeValidator(_names_from_text)]
# The form of a browser's `Origin` header, which has no path.
Origin = Annotated[
    str,
    AfterValidator(_as_browsers_send_it),
    _matching(
        r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]_-]{1,255}",
        "an origin such as https://chat.example.com, without a path, or *",
    ),
]
Origins = Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_names_from_text)]
# Without user and password: the exporter writes it into the log.
OtlpEndpoint = Annotated[
    str,
    _matching(
        r"https?://[A-Za-z0-9.:\[\]_/-]{1,500}",
        "a URL such as http://127.0.0.1:4318, without user, password or query",
    ),
]
HostName = Annotated[
    str, _matching(r"[A-Za-z0-9._:-]{1,255}", "a host name or address, without a port")
]
AllowedHost = Annotated[
    str,
    _matching(
        r"\*|[A-Za-z0-9._-]{1,255}|[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*:[0-9A-Fa-f.]*",
        "a host name or address such as chat.example.com, without a port, or *",
    ),
]
AllowedHosts = Annotated[tuple[AllowedHost, ...], NoDecode, BeforeValidator(_names_from_text)]
BlockSize = Annotated[Literal[16, 32, 64, 128], BeforeValidator(_number_from_text)]
Port = Annotated[int, Field(ge=0, le=65535)]
GenerationConfig = Literal["auto", "none"]
SpecialTokens = Literal["text", "tokens"]
# Names of rows in shared/tool_calls/formats.py and reasoning.py, which a test compares.
ToolParserName = Literal[
    "auto", "none", "cohere2", "command_r", "deepseek_v3", "deepseek_v31", "granite", "harmony",
    "hermes", "llama3_json", "mistral", "mistral_args", "olmo3", "phi4_mini", "pythonic",
    "qwen3_coder", "smollm3_python", "tool_code",
]  # fmt: skip
ReasoningParserName = Literal[
    "auto", "none", "think", "cohere", "granite", "granite_tags", "mistral", "harmony"
]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Quantization = Literal["auto", "fp8"]
KvCacheDtype = Literal["auto", "fp8"]
LoadFormat = Literal["safetensors", "dummy"]
ModelImpl = Literal["auto", "pagewire", "transformers"]
Kernels = Literal["auto", "triton", "torch"]
KvTransport = Literal["auto", "ipc", "ucx", "zmq"]
KvNetwork = Literal["untrusted", "private"]
Policy = Literal["predicted", "prefix", "round_robin"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Revision = Annotated[
    str,
    _matching(
        r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}",
        "a branch, tag or commit: up to 200 letters, digits, '.', '_', '/' or '-'",
    ),
]
