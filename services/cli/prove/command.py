"""The command `pagewire prove`: shows that faults do not change answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from pagewire.services.cli.error_exit import EXIT_FAILURE, EXIT_INTERRUPTED, one_line_errors
from pagewire.services.cli.prove.run import Proof, run_proof
from pagewire.services.cli.prove.view import View
from pagewire.services.cli.terminal import note
from pagewire.services.cli.up.run_dir import make_log_dir
from pagewire.shared.base.errors import PagewireError
from pagewire.shared.base.open_files import raise_open_file_limit

Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="What the workers run on; auto takes the GPUs if there are any."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result alone, as one JSON object.")]


def prove(device: Device = "auto", as_json: Json = False) -> None:
    """Kill and freeze workers, and show that no answer loses a token.

    It starts a cluster of its own with the demo model, streams seeded answers, and streams them
    again while it flips a byte of KV on its way, freezes a decode worker and kills another one and
    a prefill worker. Then it compares. Nothing of it is left afterwards.
    Exit code 1 if a token, a fault or a check is missing.

    Example: pagewire prove
    """
    with one_line_errors():
        raise_open_file_limit()
        log_dir = make_log_dir()
        try:
            proof = asyncio.run(run_proof(device, log_dir, View(Console(quiet=as_json))))
        except PagewireError:
            note(f"logs of the services: {log_dir}")
            raise
    if not proof.is_complete:
        raise typer.Exit(EXIT_INTERRUPTED)
    if as_json:
        print(json.dumps(as_object(proof), indent=2))
    if not proof.passed:
        note(f"logs of the services: {log_dir}")
        raise typer.Exit(EXIT_FAILURE)
    shutil.rmtree(log_dir, ignore_errors=True)


def as_object(proof: Proof) -> dict[str, Any]:
    """Return the result as a value that is written as JSON."""
    return {
        "passed": proof.passed,
        "seconds": round(proof.total_s, 3),
        "start_seconds": round(proof.start_s, 3),
        "lines": [asdict(line) for line in proof.lines],
        "calm_text": proof.calm[0].text,
        "disturbed_text": proof.disturbed[0].text,
    }
