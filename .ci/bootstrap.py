"""Sets up what the Makefile needs, with the standard library alone.

Usage:
    bootstrap.py venv DIRECTORY [TORCH_INDEX]: a virtual environment with Pagewire in it.
    bootstrap.py locked-venv DIRECTORY [FILE]: likewise, with exactly what requirements/ has, by
        hashes; FILE is dev.txt or clients.txt.
    bootstrap.py redis: a real Redis server, for the tests.
    bootstrap.py prometheus: a real Prometheus with promtool, likewise.
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
PROMETHEUS_INSTALLERS = {
    "apt-get": ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "prometheus"],
    "dnf": ["dnf", "install", "-q", "-y", "golang-github-prometheus"],
    "apk": ["apk", "add", "-q", "prometheus"],
    "brew": ["brew", "install", "-q", "prometheus"],
}


def main(arguments: list[str]) -> None:
    """Do what the first argument says."""
    match arguments:
        case ["venv", directory, *index]:
            make_venv(Path(directory).resolve(), "".join(index))
        case ["locked-venv", directory]:
            make_locked_venv(Path(directory).resolve(), "dev.txt")
        case ["locked-venv", directory, "dev.txt" | "clients.txt" as file]:
            make_locked_venv(Path(directory).resolve(), file)
        case ["redis"]:
            install("redis-server or valkey-server", REDIS_SERVERS, REDIS_INSTALLERS)
        case ["prometheus"]:
            if install("prometheus and promtool", ("promtool",), PROMETHEUS_INSTALLERS):
                stop_service("prometheus")
        case _:
            sys.exit(__doc__)


def make_venv(directory: Path, torch_index: str) -> None:
    """Make or update the environment, with a CPU build of torch where that is all it needs."""
    python = make_bare_venv(directory)
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
        say("these packages cannot be installed here: taking what pyproject.toml allows")
    say(f"installing Pagewire and its other dependencies: up to {other_size} to download")
    if not pip_install(python, *index, "--editable", ".[worker,ucx,dev]"):
        say("that failed; trying without UCX (KV blocks then cross over ZeroMQ)")
        if not pip_install(python, *index, "--editable", ".[worker,dev]"):
            sys.exit("installing failed; pip says why above")


def make_locked_venv(directory: Path, file: str) -> None:
    """Make or update the environment from the lock files; pip checks each package's hash.

    Without a GPU it takes torch's CPU build, or the other one where there is no such build.
    """
    python = make_bare_venv(directory)
    hashed = ("--no-deps", "--require-hashes", "--requirement")
    on_cpu = not shutil.which("nvidia-smi")
    say("installing what requirements/ has, by hashes")
    index = ("--extra-index-url", CPU_INDEX)
    if not (on_cpu and pip_install(python, *index, *hashed, "requirements/torch-cpu.txt")):
        if on_cpu:
            say("torch's CPU build cannot be installed here: taking the one for CUDA")
        if not pip_install(python, *hashed, "requirements/torch-cuda.txt"):
            sys.exit("installing torch failed; pip says why above")
    here = ("--no-deps", "--no-build-isolation", "--editable", ".")
    if not (pip_install(python, *hashed, f"requirements/{file}") and pip_install(python, *here)):
        sys.exit("installing failed; pip says why above")


def make_bare_venv(directory: Path) -> str:
    """Make the environment if there is none, and return its Python."""
    python = str(directory / "bin" / "python")
    if not succeeds(python, "-c", "import pip"):
        say(f"making {directory.name} with Python {platform.python_version()}")
        if not succeeds(sys.executable, "-m", "venv", "--clear", str(directory), quiet=False):
            sys.exit("making it failed; on Debian and Ubuntu: apt-get install python3-venv")
    return python


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


def install(what: str, programs: tuple[str, ...], installers: dict[str, list[str]]) -> bool:
    """Install something with the system's package manager, unless there is one of its programs.

    Returns whether it had to be installed.
    """
    if any(shutil.which(name) for name in programs):
        return False
    manager = next((name for name in installers if shutil.which(name)), None)
    if manager is not None:
        as_root = [] if os.geteuid() == 0 or manager == "brew" else ["sudo"]
        command = [*as_root, *installers[manager]]
        say(f"the tests need {what}: {' '.join(command)}")
        if manager == "apt-get":
            os.environ["DEBIAN_FRONTEND"] = "noninteractive"
            succeeds(*as_root, "apt-get", "update", "-qq", quiet=False)
        if succeeds(*command, quiet=False):
            return True
    sys.exit(f"the tests need {what} on the PATH: install it")


def stop_service(name: str) -> None:
    """Stop what a package has started, where there is a systemd: tests start their own."""
    as_root = [] if os.geteuid() == 0 else ["sudo"]
    if shutil.which("systemctl"):
        succeeds(*as_root, "systemctl", "disable", "--now", name)


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
