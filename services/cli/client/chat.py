"""The command `pagewire chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from pagewire.services.cli.client import client_options as options
from pagewire.services.cli.client.anatomy import anatomy
from pagewire.services.cli.client.endpoint_errors import EndpointError
from pagewire.services.cli.client.openai_client import CHAT, OpenAIClient, Reply
from pagewire.services.cli.error_exit import EXIT_FAILURE, one_line_errors
from pagewire.services.cli.terminal import cut_note, describe, note, readable_stdin, write_text

PROMPT = "> "
COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@dataclass
class TerminalChat:
    """The messages so far, and the fields of requests.

    Attributes:
        system: the system message before all others, if any.
        fields: fields of each request, in addition to the messages.
    """

    system: str | None
    fields: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages.clear()

    def body(self, question: str) -> dict[str, Any]:
        """Return the body of a request with the conversation so far and a question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        message = {"role": "user", "content": question}
        return {**self.fields, "messages": [*system, *self.messages, message]}

    def add(self, question: str, answer: str) -> None:
        """Add a question and its answer to the conversation, unless the answer is empty."""
        if answer:
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": answer})


def chat(
    question: Annotated[
        str | None, typer.Argument(help="A single question.  [default: a conversation]")
    ] = None,
    url: options.Url = None,
    model: options.ClientModel = None,
    system: Annotated[
        str | None, typer.Option(help="The system message, before the conversation.")
    ] = None,
    api_key: options.ApiKey = None,
    temperature: options.Temperature = None,
    max_tokens: options.ChatTokens = None,
    seed: options.Seed = None,
    use_prefill_worker: Annotated[
        bool,
        typer.Option(
            "--use-prefill-worker",
            help="Have a prefill worker compute the prompts, even where that takes longer, so that "
            "KV crosses; the router must allow it.",
        ),
    ] = False,
    timeout: options.Timeout = 300.0,
) -> None:
    """Talk with a model of any OpenAI-compatible endpoint.

    With a question as argument, it is the only one.
    Each answer streams, and a line below it says how fast it came.
    Pagewire's own endpoint also names the workers that computed it.
    Piped input is a conversation, too: one question a line.

    Example: pagewire chat --system "Answer in one sentence."
    """
    fields = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    fields["use_prefill_worker"] = use_prefill_worker or None
    with one_line_errors(), asyncio.Runner() as runner:
        endpoint = options.endpoint(url, api_key)
        client = OpenAIClient(*endpoint, timeout_s=timeout, asks_timings=True)
        try:
            name = runner.run(client.choose_model(model))
            talk = TerminalChat(system, {"model": name, **fields})
            if question is None:
                failures = _converse(runner, client, talk)
            else:
                failures = not _ask(runner, client, talk, question)
        finally:
            runner.run(client.aclose())
    if failures and not (question is None and sys.stdin.isatty()):
        raise typer.Exit(EXIT_FAILURE)


def _converse(runner: asyncio.Runner, client: OpenAIClient, talk: TerminalChat) -> int:
    """Answer questions until there are no more; return how many could not be answered."""
    failures = 0
    if sys.stdin.isatty():
        note(f"{talk.fields['model']} at {client.url}: {COMMANDS}")
    for line in _questions():
        question = line.strip()
        if question == "/exit":
            break
        if question == "/reset":
            talk.reset()
            note("forgotten")
        elif question.startswith("/") and question[1:].partition(" ")[0].isalpha():
            note(COMMANDS)
        elif question:
            failures += not _ask(runner, client, talk, question)
    return failures


def _ask(runner: asyncio.Runner, client: OpenAIClient, talk: TerminalChat, question: str) -> bool:
    """Stream one answer; return whether the question was answered."""
    heard: list[str] = []

    def on_text(text: str) -> None:
        heard.append(text)
        write_text(text)

    reply: Reply | None = None
    problem = ""
    try:
        reply = runner.run(client.stream(CHAT, talk.body(question), on_text=on_text))
    except EndpointError as exc:
        problem = str(exc)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        problem = "stopped"
    if heard:
        write_text("" if heard[-1].endswith("\n") else "\n")
    talk.add(question, "".join(heard))
    if reply is None:
        note(problem, "yellow" if problem == "stopped" else "red")
    else:
        note(describe(reply))
        if parts := anatomy(reply.timings):
            note(parts)
        if cut := cut_note(reply, talk.fields["max_tokens"]):
            note(cut)
    return reply is not None


def _questions() -> Iterator[str]:
    """Yield lines of stdin until its end; on a terminal, with a prompt and an editable history."""
    if not (stdin := readable_stdin()).isatty():
        yield from stdin
        return
    with contextlib.suppress(ImportError):  # some builds of Python lack it
        import readline  # noqa: F401 - gives input() its editing and history
    interrupted = False
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            note("Ctrl-C once more to leave")
        else:
            interrupted = False
            yield line
