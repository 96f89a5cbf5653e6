"""Settings that several services have, each with its one description, and those of responses."""

from __future__ import annotations

from typing import Any

from pagewire.shared.settings.texts import MAIN, NETWORK, described

GENERATION_CONFIG: Any = described(
    "auto",
    "auto: sampling parameters and max_tokens that a request leaves out come from the model's "
    "generation_config.json, as far as they are supported; none turns that off.",
    panel=MAIN,
)
REVISION: Any = described(
    None,
    "Branch, tag or commit of a hub id, the same in all services.",
    unset="its main branch",
    panel=MAIN,
)
MODEL_IMPL: Any = described(
    "auto",
    "Whose code computes the model. auto and pagewire: Pagewire's, for the families that it has; "
    "transformers: Hugging Face's, for other decoders, which is slower and needs the extra "
    "`transformers`.",
    panel=MAIN,
)
SERVED_MODEL_NAME: Any = described(
    None,
    "The name that clients ask for, or several, separated by commas. Metrics have the first "
    "one; an answer has the name that was asked for.",
    unset="the last part of the model's directory or hub id",
    panel=MAIN,
)
METRICS_PORT: Any = described(0, "Port of /metrics and /health; 0 takes a free one.", panel=NETWORK)
OPERATOR_PORT: Any = described(
    None,
    "Port for operators, never for clients: /dashboard shows the cluster, /cluster describes it, "
    "/sd lists the addresses of all metrics for Prometheus. 0 takes a free one.",
    unset="`port` plus 1000",
    panel=NETWORK,
)
OPERATOR_FD: Any = described(
    None,
    "File descriptor of a bound TCP socket to use instead of the operator port. Several routers "
    "can have the same socket.",
    unset="none",
    panel=NETWORK,
)
OPERATOR_URL: Any = described(
    None,
    "URL of a router's operator port, which describes the cluster.",
    unset="the endpoint's, with its port plus 1000",
)
RESTARTS: Any = described(
    0, "Times that a supervisor has started this process again; only its metrics show it."
)

SPECIAL_TOKENS: Any = described(
    "text",
    "What becomes of a special token's text in a chat message, such as </s>. text: it remains "
    "text; tokens: it becomes the special token, as with Hugging Face's apply_chat_template, so "
    "that a message can end itself and go on in another role.",
    panel=MAIN,
)

CHAT_TEMPLATE: Any = described(
    None,
    "File of a chat template (Jinja) that renders conversations.",
    unset="the model's own template",
    panel=MAIN,
)
TOOL_PARSER: Any = described(
    "auto", "How the model writes tool calls; auto goes by its chat template.", panel=MAIN
)
REASONING_PARSER: Any = described(
    "auto",
    "How the model writes reasoning, which is split from its answers; auto goes by its chat "
    "template.",
    panel=MAIN,
)

RESPONSES_REDIS_URL: Any = described(
    None,
    "URL of a Redis for stored responses of /v1/responses, in the form of redis_url.",
    unset="the Redis of redis_url",
)
RESPONSES_BYTES: Any = described(
    64 << 20,
    "Bytes of all stored responses; the oldest of the API key, or of the client's address, that "
    "has most make room for new ones. 0: none is stored.",
)
