"""Sets up what the Makefile needs, with the standard library alone.

Usage:
    bootstrap.py venv DIRECTORY [TORCH_INDEX]: a virtual environment with Pagewire in it.
    bootstrap.py redis: a real Redis server, for the tests.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The release that the CPU indexes are asked for; pyproject.toml allows a range around it.
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 3
REDIS_SERVERS = ("redis-server", "valkey-server")
REDIS_INSTALLERS = {
    "apt-get": ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "redis-server"],
    "dnf": ["dnf", "install", "-q", "-y", "valkey"],
    "apk": ["apk", "add", "-q", "redis"],
    "brew": ["brew", "install", "-q", "redis"],
}


def main(arguments: list[str]) -> None:
    """Do what the first argument says."""
    match arguments:
        case ["venv", directory, *index]:
            make_venv(Path(directory).resolve(), "".join(index))
        case ["redis"]:
            install_redis()
        case _:
            sys.exit(__doc__)


def make_venv(directory: Path, torch_index: str) -> None:
    """Make or update the environment, with a CPU build of torch where that is all it needs."""
    python = str(directory / "bin" / "python")
    if not succeeds(python, "-c", "import pip"):
        say(f"making {directory.name} with Python {platform.python_version()}")
        if not succeeds(sys.executable, "-m", "venv", "--clear", str(directory), quiet=False):
            sys.exit("making it failed; on Debian and Ubuntu: apt-get install python3-venv")
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    index = index_arguments(torch_index)
    source = f", also from {index[1]}" if index else ""
    say(f"installing {TORCH}{source} (the first time this takes minutes)")
    # In a step of its own: a CPU build of this very release ("+cpu") outranks the plain one.
    if not succeeds(*pip, *index, TORCH, quiet=False):
        say("that is not to be had here: taking what pyproject.toml allows")
    say("installing Pagewire and its other dependencies")
    if not succeeds(*pip, *index, "--editable", ".[worker,ucx,dev]", quiet=False):
        say("that failed; trying without UCX (KV blocks then cross over ZeroMQ)")
        if not succeeds(*pip, *index, "--editable", ".[worker,dev]", quiet=False):
            sys.exit("installing failed; pip says why above")


def index_arguments(torch_index: str) -> list[str]:
    """Return pip's arguments for one more index to find torch in, if there is a better one."""
    if torch_index:
        return ["--extra-index-url", torch_index]
    if shutil.which("nvidia-smi"):
        return []
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=PROBE_S):  # noqa: S310 - https
            return ["--extra-index-url", CPU_INDEX]
    except OSError:  # URLError and timeouts are
        say(f"no GPU here and no answer from {CPU_INDEX}: taking torch from pip's own indexes")
        return []


def install_redis() -> None:
    """Install a Redis server with the system's package manager, unless there is one."""
    if any(shutil.which(name) for name in REDIS_SERVERS):
        return
    manager = next((name for name in REDIS_INSTALLERS if shutil.which(name)), None)
    if manager is not None:
        as_root = [] if os.geteuid() == 0 or manager == "brew" else ["sudo"]
        command = [*as_root, *REDIS_INSTALLERS[manager]]
        say(f"the tests need a real redis-server: {' '.join(command)}")
        if manager == "apt-get":
            os.environ["DEBIAN_FRONTEND"] = "noninteractive"
            succeeds(*as_root, "apt-get", "update", "-qq", quiet=False)
        if succeeds(*command, quiet=False):
            return
    sys.exit("the tests need redis-server or valkey-server on the PATH: install one of them")


def succeeds(*command: str, quiet: bool = True) -> bool:
    """Run a command in the repository's root; False if it fails or there is no such program."""
    output = subprocess.DEVNULL if quiet else None
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    except OSError:
        return False
    return done.returncode == 0


def say(message: str) -> None:
    """Tell what happens next."""
    print(f"==> {message}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
