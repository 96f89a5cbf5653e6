"""`pagewire router`."""

from __future__ import annotations

import typer

from pagewire.services.cli import options
from pagewire.services.cli.errors import one_line_errors
from pagewire.shared.settings.config import RouterSettings, load_settings


def router(
    ctx: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    model_impl: options.ModelImpl = None,
    served_model_name: options.ServedModelName = None,
    generation_config: options.GenerationConfig = None,
    special_tokens_in_messages: options.SpecialTokensInMessages = None,
    tool_parser: options.ToolParser = None,
    reasoning_parser: options.ReasoningParser = None,
    host: options.Host = None,
    port: options.Port = None,
    fd: options.Fd = None,
    metrics_port: options.MetricsPort = None,
    operator_port: options.OperatorPort = None,
    operator_fd: options.OperatorFd = None,
    router_id: options.RouterId = None,
    api_key_file: options.ApiKeyFile = None,
    cors_origins: options.CorsOrigins = None,
    policy: options.Policy = None,
    max_queue: options.MaxQueue = None,
    redis_url: options.RedisUrl = None,
    drain_timeout_s: options.DrainTimeoutS = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
) -> None:
    """Run the router: the OpenAI-compatible endpoint.

    Example: pagewire router --model demo --port 8000 --redis-url redis://127.0.0.1:6379/0
    """
    with one_line_errors():
        settings = load_settings(RouterSettings, ctx.params)
        from pagewire.services.router.main import run

        raise typer.Exit(run(settings))
