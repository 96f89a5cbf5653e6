"""The command `pagewire version`: releases of Pagewire and what it uses."""

from __future__ import annotations

import platform
from importlib import metadata

from pagewire import __version__

PARTS = ("torch", "triton", "ucxx-cu13", "ucxx-cu12", "pyzmq", "redis")


def own_version() -> str:
    """Return the line that `--version` prints."""
    return f"pagewire {__version__}"


def version() -> None:
    """Print the versions of Pagewire and of what it runs on.

    Example: pagewire version
    """
    print(own_version())
    print(f"python {platform.python_version()} on {platform.platform()}")
    for name in PARTS:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} not installed")
