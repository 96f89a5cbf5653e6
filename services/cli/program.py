"""Finds the command name to show in advice: `pagewire`, or the path of this program."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def own_command() -> str:
    """Return the command to advise: `pagewire`, or its path if it is not on PATH."""
    is_ours = Path(sys.argv[0]).name == "pagewire" and shutil.which("pagewire") is None
    return shlex.quote(sys.argv[0]) if is_ours else "pagewire"
