"""The command `pagewire batch`: answers the requests of a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from pagewire.services.cli.batch.input_file import check_input, pending_requests
from pagewire.services.cli.batch.known_ids import KnownIds
from pagewire.services.cli.batch.lines import BatchLineError, OutputLine
from pagewire.services.cli.batch.output_file import OutputFile
from pagewire.services.cli.batch.sender import BatchSender
from pagewire.services.cli.batch.view import Tally, run_with_progress
from pagewire.services.cli.client import client_options as options
from pagewire.services.cli.ctrl_c import CtrlC
from pagewire.services.cli.error_exit import EXIT_FAILURE, EXIT_INTERRUPTED, one_line_errors
from pagewire.services.cli.terminal import note
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.open_files import raise_open_file_limit

InputPath = Annotated[
    Path, typer.Argument(metavar="INPUT", help="OpenAI batch file with the requests.")
]
OutputPath = Annotated[
    Path, typer.Argument(metavar="OUTPUT", help="File to which a line is added for each answer.")
]
Concurrency = Annotated[
    int, typer.Option(min=1, max=10_000, help="Number of requests in flight at once.")
]
ErrorsPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File for the lines of requests that failed, instead of OUTPUT."
    ),
]
RetryFor = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="How long to resend a request that is refused (429, 503) or gets no connection.",
    ),
]
ReportEvery = Annotated[
    float,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        help="Time between lines of progress if the output is not a terminal.",
    ),
]


def batch(
    input_file: InputPath,
    output_file: OutputPath,
    url: options.Url = None,
    api_key: options.ApiKey = None,
    concurrency: Concurrency = 64,
    errors: ErrorsPath = None,
    retry_for: RetryFor = 300.0,
    report_every: ReportEvery = 10.0,
    timeout: options.Timeout = 600.0,
) -> None:
    """Send the requests of a batch file and write their answers.

    INPUT is checked as a whole before anything is sent.
    The same command again sends what has no successful answer in OUTPUT yet.
    Exit code 1 if a request failed.

    Example: pagewire batch requests.jsonl answers.jsonl
    """
    with one_line_errors(), contextlib.ExitStack() as stack:
        raise_open_file_limit()  # each request has a connection
        sender = BatchSender(*options.endpoint(url, api_key), concurrency, timeout, retry_for)
        files = BatchFiles(stack, input_file, output_file, errors)
        with asyncio.Runner() as runner, CtrlC(runner.get_loop()) as ctrl_c:
            try:
                runner.run(_send(sender, files, ctrl_c, report_every))
            finally:
                note(_summary(files.tally, errors or output_file))
    if ctrl_c.pressed or files.tally.failed:
        raise typer.Exit(EXIT_INTERRUPTED if ctrl_c.pressed else EXIT_FAILURE)


async def _send(sender: BatchSender, files: BatchFiles, ctrl_c: CtrlC, report_every: float) -> None:
    async with sender:
        sending = sender.send(files.requests, files.write)
        await ctrl_c.ends(run_with_progress(sending, files.tally, sender, report_every))


def _summary(tally: Tally, failures: Path) -> str:
    summary = tally.describe()
    if tally.failed:
        summary += f". Failures are in {failures}"
    if tally.failed or tally.done < tally.total:
        summary += ". The same command again sends what has no successful answer"
    return summary


def _is_no_success(line: OutputLine) -> bool:
    """Return False for a failure of an earlier run, so that its line is removed.

    Raises:
        BatchLineError: the line is a success, so the file is the output of a batch.
    """
    if line.is_ok:
        raise BatchLineError("which has answers that succeeded, cannot be the file for --errors")
    return False


class BatchFiles:
    """The files of one batch, checked and locked.

    Args:
        stack: closes the files.
        source: the input.
        output: the file for requests that succeed.
        errors: the file for requests that fail, emptied first; None writes them to the output.

    Attributes:
        tally: counts of the batch's requests.
        requests: the requests that are still to be sent.

    Raises:
        ConfigError: a file cannot be used.
    """

    def __init__(
        self, stack: contextlib.ExitStack, source: Path, output: Path, errors: Path | None
    ) -> None:
        paths = [os.path.realpath(path) for path in (source, output, errors) if path is not None]
        if len(set(paths)) < len(paths):
            raise ConfigError("INPUT, OUTPUT and --errors must be different files")
        self._ids = stack.enter_context(KnownIds())
        self._done = 0
        total = check_input(source, self._ids)
        self._output = stack.enter_context(OutputFile(output, self._is_kept))
        self._errors = self._output
        if errors is not None:
            self._errors = stack.enter_context(OutputFile(errors, _is_no_success))
        self.tally = Tally(total, self._done)
        self.requests = pending_requests(source, self._ids)

    def _is_kept(self, line: OutputLine) -> bool:
        """Whether to keep a line: a request that failed is sent again, so its line is removed."""
        if line.is_ok:
            self._done += self._ids.mark_done(line.custom_id)
        return line.is_ok

    def write(self, line: OutputLine) -> None:
        """Add a line to the file for it, and to the tally.

        Raises:
            PagewireError: the line cannot be written.
        """
        (self._output if line.is_ok else self._errors).append(line)
        self.tally.ok += line.is_ok
        self.tally.failed += not line.is_ok
