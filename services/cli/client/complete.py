"""The command `pagewire complete`: continues one prompt."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from pagewire.services.cli.client import client_options as options
from pagewire.services.cli.client.openai_client import COMPLETIONS, OpenAIClient, Reply
from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.terminal import cut_note, note, readable_stdin, write_text
from pagewire.shared.base.errors import ConfigError


def complete(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; stdin if not given.")
    ] = None,
    url: options.Url = None,
    model: options.ClientModel = None,
    api_key: options.ApiKey = None,
    temperature: options.Temperature = None,
    max_tokens: options.CompletionTokens = 128,
    seed: options.Seed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text, usage and times.")
    ] = False,
    timeout: options.Timeout = 300.0,
) -> None:
    """Continue a text with a model of any OpenAI-compatible endpoint.

    Example: pagewire complete "Lambda expressions" --max-tokens 32
    """
    with one_line_errors():
        fields = {
            "prompt": _read_prompt(prompt),
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        client = OpenAIClient(*options.endpoint(url, api_key), timeout_s=timeout)
        asyncio.run(_complete(client, model, fields, as_json))


async def _complete(
    client: OpenAIClient, model: str | None, fields: dict[str, Any], as_json: bool
) -> None:
    async with client:
        name = await client.choose_model(model)
        reply = await client.stream(
            COMPLETIONS, {"model": name, **fields}, on_text=None if as_json else write_text
        )
    if as_json:
        print(json.dumps(summary(name, reply), ensure_ascii=False))
        return
    if not reply.text.endswith("\n"):
        write_text("\n")
    if cut := cut_note(reply, fields["max_tokens"]):
        note(cut)


def summary(model: str, reply: Reply) -> dict[str, Any]:
    """Return the object that `--json` prints; None where the server does not report a value."""
    return {
        "model": model,
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "prompt_tokens": None if reply.usage is None else reply.usage.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": reply.num_tokens,
        "ttft_s": reply.ttft,
        "tokens_per_s": reply.tokens_per_s,
        "total_s": reply.seconds,
    }


def _read_prompt(prompt: str | None) -> str:
    """Return the argument, or stdin without a line end that `echo` adds.

    Raises:
        ConfigError: both are empty.
    """
    if prompt is None and not sys.stdin.isatty():
        prompt = readable_stdin().read().removesuffix("\n")
    if not prompt:
        raise ConfigError(
            'no text to continue: give some, e.g. pagewire complete "Lambda expressions"'
        )
    return prompt
