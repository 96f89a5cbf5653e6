"""What `import pagewire` offers, and how little it loads."""

from __future__ import annotations

import subprocess
import sys

import pagewire

PROGRAM = """
import sys, pagewire
print(*dir(pagewire))
print(*sorted({"torch", "msgspec", "pydantic"} & set(sys.modules)))
"""


def test_names_are_listed_before_they_are_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    names, loaded = done.stdout.splitlines()
    shown = {name for name in names.split() if not name.startswith("_")}
    assert shown == set(pagewire.__all__)
    assert loaded == ""


def test_each_public_name_can_be_imported() -> None:
    for name in pagewire.__all__:
        assert getattr(pagewire, name).__name__ == name
