"""`pagewire prove` passes, and fails by name if what answers depend on is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewire.services.cli.prove.answers import MAX_TOKENS, PROMPTS

pytestmark = pytest.mark.timeout(240)

TIMEOUT_S = 120.0
GUTTED = "pagewire.tests.support.gutted_proof"
# Silence is noticed sooner than by default, so that a proof that fails takes no longer.
SETTINGS = {
    "PAGEWIRE_HEARTBEAT_S": "0.5",
    "PAGEWIRE_LEASE_S": "2",
    "PAGEWIRE_STEP_TIMEOUT_S": "2",
    "PAGEWIRE_PREFILL_TIMEOUT_S": "4",
}


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory whose name is short, unlike pytest's: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        yield Path(directory)


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose files all go to a directory; check that no process is left."""
    (home / "tmp").mkdir()
    own = {"HOME": str(home), "TMPDIR": str(home / "tmp")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, **SETTINGS, **own},
    )
    left = [each for each in psutil.process_iter() if str(home) in _environment(each)]
    assert left == []
    assert list((home / "tmp").iterdir()) == []
    return done


def _environment(process: psutil.Process) -> str:
    try:
        return str(process.environ())
    except psutil.Error:  # it has ended, or is another user's
        return ""


def failed(home: Path, what: str) -> list[str]:
    """Return the lines with a cross of a proof whose services lack something."""
    done = run(home, GUTTED, what, "prove", "--json", "--device", "cpu")
    assert done.returncode == 1, done
    result: dict[str, Any] = json.loads(done.stdout)
    assert not result["passed"]
    assert "logs of the services: " in done.stderr
    return [line["name"] for line in result["lines"] if not line["passed"]]


def test_it_passes_and_leaves_nothing(home: Path) -> None:
    done = run(home, "pagewire.services.cli.main", "prove", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-3000:]
    before, _, after = done.stdout.partition("\nDisturbed run")
    calm = before.partition("first one:\n")[2]
    text, _, result = after.partition("\n\n  ✓")
    said = [line for line in text.splitlines()[1:] if line.startswith("  >> ")]
    assert [line.split()[1] for line in said] == ["flipped", "froze", "killed", "killed"]
    words = [line for line in text.splitlines()[1:] if not line.startswith("  >> ")]
    assert " ".join(words).split() == calm.split()
    assert "✗" not in result
    assert f"tokens that differ      0 of {len(PROMPTS) * MAX_TOKENS}\n" in result
    assert "\nproved, in " in result
    assert list((home / ".cache/pagewire/runs").iterdir()) == []


def test_it_fails_without_the_checksum(home: Path) -> None:
    """And then a flipped byte changes answers."""
    names = ["corrupt segments found", "segments sent again", "tokens that differ"]
    assert failed(home, "checksum") == names


def test_it_fails_without_the_resend(home: Path) -> None:
    """The job waits for its timeout and another worker gets it, so that later faults may miss."""
    names = failed(home, "resend")
    assert "segments sent again" in names
    assert not {"byte flipped", "corrupt segments found", "tokens that differ"} & {*names}


def test_it_fails_without_migration(home: Path) -> None:
    assert failed(home, "migration") == [
        "decode worker killed",
        "prefill worker killed",
        "answers moved",
        "tokens that differ",
    ]
