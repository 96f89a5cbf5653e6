"""Sets up what the Makefile needs, with the standard library alone.

Usage:
    bootstrap.py options DIRECTORY: a virtual environment that can read the options of commands.
    bootstrap.py serving|loadtest|dev DIRECTORY [TORCH_INDEX]: the same environment, with Pagewire
        and what these need.
    bootstrap.py locked DIRECTORY [FILE]: an environment with exactly what requirements/ has, by
        hashes; FILE is dev.txt or clients.txt.
    bootstrap.py redis: a real Redis server, for the tests.
    bootstrap.py prometheus: a real Prometheus with promtool, likewise.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The release that the CPU indexes are asked for; pyproject.toml allows a range around it.
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 3
# Of Pagewire's dependencies, those that services/cli/up/check.py needs.
READ_OPTIONS = ("msgspec", "packaging", "pydantic", "pydantic-settings", "typer")
EXTRAS = {
    "serving": ("worker",),
    "loadtest": ("worker", "loadtest"),
    "dev": ("worker", "gpu", "ucx", "dev"),  # tests on a CPU interpret the kernels
}
ON_GPU = ("gpu", "ucx")
# With what is to download into an empty cache, as measured on x86-64 Linux with the releases of
# November 2026.
TORCH_SIZES = {"CPU build": "0.2 GB", "CUDA build": "2.7 GB"}
TEXTS = {
    "serving": "what serving needs (up to 0.1 GB)",
    "loadtest": "what load tests need (up to 0.2 GB)",
    "dev": "what development needs (up to 0.5 GB)",
}
# Everything that serving imports.
ENTRY_POINTS = ("cli.up.cluster", "cli.up.prepare", "router.main", "prefill.main", "decode.main")
# "  Downloading torch-2.13.0-cp311-...whl (191.8 MB)"
DOWNLOAD = re.compile(r"\s*Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)$")
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
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
        case ["options", directory]:
            install_option_readers(Path(directory).resolve())
        case ["serving" | "loadtest" | "dev" as group, directory, *index]:
            install_group(Path(directory).resolve(), group, "".join(index))
        case ["locked", directory]:
            make_locked_venv(Path(directory).resolve(), "dev.txt")
        case ["locked", directory, "dev.txt" | "clients.txt" as file]:
            make_locked_venv(Path(directory).resolve(), file)
        case ["redis"]:
            install("redis-server or valkey-server", REDIS_SERVERS, REDIS_INSTALLERS)
        case ["prometheus"]:
            if install("prometheus and promtool", ("promtool",), PROMETHEUS_INSTALLERS):
                stop_service("prometheus")
        case _:
            sys.exit(__doc__)


def install_option_readers(directory: Path) -> None:
    """Make the environment, with what reads options and what builds Pagewire."""
    python = make_bare_venv(directory)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [
        requirement
        for requirement in project["project"]["dependencies"]
        if re.match(r"[\w-]+", requirement)[0] in READ_OPTIONS
    ]
    wanted += project["build-system"]["requires"]
    if not pip_install(python, "what reads options (up to 10 MB)", *wanted):
        sys.exit("installing failed; pip says why above")


def install_group(directory: Path, group: str, torch_index: str) -> None:
    """Install or update a group, with a CPU build of torch where that is all it needs."""
    python = str(directory / "bin" / "python")
    index = []
    if not has_torch(python):
        index = index_arguments(torch_index)
        build = "CPU build" if index and index[-1].rstrip("/").endswith("cpu") else "CUDA build"
        what = f"{TORCH.replace('==', ' ')}, {build} (up to {TORCH_SIZES[build]})"
        # In a step of its own: a CPU build of this very release ("+cpu") outranks the plain one.
        if not pip_install(python, what, *index, TORCH):
            say("it cannot be installed here: taking what pyproject.toml allows")
    extras = {*EXTRAS[group], *(ON_GPU if shutil.which("nvidia-smi") else ())}
    is_done = pip_install(python, TEXTS[group], *index, *editable(extras))
    if not is_done and "ucx" in extras:
        say("trying without UCX: KV blocks then cross over ZeroMQ")
        is_done = pip_install(python, TEXTS[group], *index, *editable(extras - {"ucx"}))
    if not is_done:
        sys.exit("installing failed; pip says why above")
    compile_modules(python)


def editable(extras: set[str]) -> tuple[str, ...]:
    """Return pip's arguments that install Pagewire from here, built by what is installed."""
    return ("--no-build-isolation", "--editable", f".[{','.join(sorted(extras))}]")


def has_torch(python: str) -> bool:
    """Whether the environment has the release of torch already, in whatever build."""
    code = "from importlib.metadata import version; print('torch==' + version('torch'))"
    done = subprocess.run((python, "-c", code), capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("+")[0] == TORCH


def compile_modules(python: str) -> None:
    """Compile what serving imports, once; several services would do so at the same time.

    pip would compile all modules, four times as many.
    """
    imports = ", ".join(f"pagewire.services.{name}" for name in ENTRY_POINTS)
    code = f"import sys; sys.dont_write_bytecode = False; import {imports}"
    with stage("compiling what serving imports"):
        succeeds(python, "-P", "-c", code)


def make_locked_venv(directory: Path, file: str) -> None:
    """Make or update the environment from the lock files; pip checks each package's hash.

    Without a GPU it takes torch's CPU build, or the other one where there is no such build.
    """
    python = make_bare_venv(directory)
    hashed = ("--no-deps", "--require-hashes", "--requirement")
    on_cpu = not shutil.which("nvidia-smi")
    cpu = ("--extra-index-url", CPU_INDEX, *hashed, "requirements/torch-cpu.txt")
    if not (on_cpu and pip_install(python, "torch, the locked CPU build (0.2 GB)", *cpu)):
        if on_cpu:
            say("torch's CPU build cannot be installed here: taking the one for CUDA")
        cuda = (*hashed, "requirements/torch-cuda.txt")
        if not pip_install(python, "torch, the locked CUDA build (2.7 GB)", *cuda):
            sys.exit("installing torch failed; pip says why above")
    here = ("--no-deps", "--no-build-isolation", "--editable", ".")
    if not (
        pip_install(python, f"what requirements/{file} has", *hashed, f"requirements/{file}")
        and pip_install(python, "Pagewire", *here)
    ):
        sys.exit("installing failed; pip says why above")


def make_bare_venv(directory: Path) -> str:
    """Make the environment if there is none, and return its Python."""
    python = str(directory / "bin" / "python")
    if not succeeds(python, "-c", "import pip"):
        with stage(f"making {directory.name} with Python {platform.python_version()}"):
            made = succeeds(sys.executable, "-m", "venv", "--clear", str(directory), quiet=False)
        if not made:
            sys.exit("making it failed; on Debian and Ubuntu: apt-get install python3-venv")
    return python


class Progress:
    """How long something has taken, and how much was downloaded."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.bytes = 0.0

    def __str__(self) -> str:
        size = f", {self.bytes / 1e6:.0f} MB downloaded" if self.bytes >= 5e5 else ""
        return f"{time.monotonic() - self.began:.0f} s{size}"


@contextlib.contextmanager
def stage(what: str) -> Iterator[Progress]:
    """Show what the block does, on one line that ends with its time; a terminal sees it grow."""
    line, progress, is_done = f"==> {what}", Progress(), threading.Event()

    def show() -> None:
        while not is_done.wait(1):
            text = f"{line}: {progress}"
            print(f"\r{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    print(line, end="", flush=True)
    shown = threading.Thread(target=show) if sys.stdout.isatty() else None
    if shown is not None:
        shown.start()
    try:
        yield progress
    finally:
        is_done.set()
        if shown is not None:
            shown.join()
            print(f"\r{line}", end="")
        print(f": {progress}", flush=True)


def pip_install(python: str, what: str, *arguments: str) -> bool:
    """Run pip, and return whether it succeeded; only a failure shows what it says.

    Meanwhile there is one line with time and size. pip compiles nothing: most of that would never
    be imported.
    """
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile")
    with tempfile.TemporaryFile("w+") as errors:
        with (
            stage(what) as progress,
            subprocess.Popen(
                (*pip, "--progress-bar", "off", *arguments),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            for line in process.stdout:
                if found := DOWNLOAD.match(line):
                    progress.bytes += float(found[1]) * UNITS[found[2]]
        if process.returncode != 0:
            errors.seek(0)
            sys.stderr.writelines(line for line in errors if not line.startswith("WARNING: "))
        sys.stderr.flush()
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
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
