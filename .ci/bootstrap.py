"""Sets up what the Makefile needs, with the standard library alone.

Usage:
    bootstrap.py venv DIRECTORY [TORCH_INDEX]: a virtual environment with Pagewire in it.
    bootstrap.py redis: a real Redis server, for the tests.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
# The release that the CPU indexes are asked for; pyproject.toml allows a range around it.
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 3
# Bytes to download into an empty cache, as measured on x86-64 Linux with the releases of November
# 2026: torch with what it needs, then all the rest, which has Triton where torch did not bring it.
SIZES = {"CPU build": ("0.2 GB", "0.5 GB"), "CUDA build": ("2.7 GB", "0.2 GB")}
# "  Downloading torch-2.13.0-cp311-...whl (191.8 MB)"; metadata of packages is not worth a line.
DOWNLOAD = re.compile(r"\s*Downloading (\S+?)(?<!\.metadata) (\(.+\))$")
UNPACK = re.compile(r"Installing collected packages: (.+)$")
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
    index = index_arguments(torch_index)
    build = "CPU build" if index and index[-1].rstrip("/").endswith("cpu") else "CUDA build"
    source = f", also from {index[1]}" if index else ""
    torch_size, other_size = SIZES[build]
    say(
        f"installing {TORCH}{source}: the first time, up to {torch_size} to download for a "
        f"{build}, in some minutes"
    )
    # In a step of its own: a CPU build of this very release ("+cpu") outranks the plain one.
    if not pip_install(python, *index, TORCH):
        say("that is not to be had here: taking what pyproject.toml allows")
    say(f"installing Pagewire and its other dependencies: up to {other_size} to download")
    if not pip_install(python, *index, "--editable", ".[worker,ucx,dev]"):
        say("that failed; trying without UCX (KV blocks then cross over ZeroMQ)")
        if not pip_install(python, *index, "--editable", ".[worker,dev]"):
            sys.exit("installing failed; pip says why above")


def pip_install(python: str, *arguments: str) -> bool:
    """Run pip; False if it fails.

    A terminal gets pip's own progress bars, a log a line for each download and its size.
    """
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check")
    if sys.stdout.isatty():
        return succeeds(*pip, *arguments, quiet=False)
    with subprocess.Popen(
        (*pip, "--progress-bar", "off", *arguments),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if found := DOWNLOAD.match(line):
                file = unquote(found[1].rpartition("/")[2])
                print(f"    downloading {file} {found[2]}", flush=True)
            elif found := UNPACK.match(line):
                count = len(found[1].split(", "))
                print(f"    unpacking {count} package{'s' * (count > 1)}", flush=True)
    return process.returncode == 0


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
    """Say what happens next."""
    print(f"==> {message}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
