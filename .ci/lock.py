"""Writes the lock files in requirements/ from pyproject.toml: exact versions with their hashes.

Usage: lock.py UV [OPTION]...

UV is the program; options go to `uv pip compile`, such as `--upgrade` or `--upgrade-package NAME`.
Without one, versions that are locked stay where pyproject.toml still allows them. The files hold
for every Python and platform that Pagewire runs on.

torch is in files of its own, since an image or environment takes one of two builds: from the
CPU index of PyTorch, or from PyPI with the CUDA libraries.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
TIMEOUT_S = 20
EXTRAS = {
    "router.txt": ("otel",),
    "worker.txt": ("worker", "gpu", "ucx", "transformers", "otel"),
    "dev.txt": ("worker", "gpu", "ucx", "transformers", "otel", "dev"),
    "clients.txt": ("worker", "gpu", "ucx", "transformers", "otel", "dev", "clients"),
}
# What only torch's build for CUDA requires.
OF_CUDA = re.compile(r"nvidia-(?!ml-py)|cuda-toolkit|triton")
# Wheels of the CPU index: the Pythons and machines of Linux.
CPU_WHEEL = re.compile(
    r"torch-(?P<version>[\d.]+)(?:%2B|\+)cpu-cp3(?:11|12|13|14)-cp3(?:11|12|13|14)-manylinux\w*\.whl"
    r"#sha256=(?P<hash>[0-9a-f]{64})"
)
HEAD = "# Written by `make lock` from pyproject.toml.\n"


def main(uv: str, options: list[str]) -> None:
    """Write all files; those of subsets have the versions of dev.txt.

    The libraries in clients.txt exclude some of these versions, which it has where they can be.
    """
    every = compile_extras(uv, EXTRAS["dev.txt"], read_locked(), options)
    write_for_tests("dev.txt", every)
    pins = "".join(each for _, each in every)
    write_for_tests("clients.txt", compile_extras(uv, EXTRAS["clients.txt"], pins, []))
    for file in ("router.txt", "worker.txt"):
        subset = compile_extras(uv, EXTRAS[file], pins, [])
        write(file, [each for name, each in subset if not is_torchs(name)])
        if file == "worker.txt":
            write("torch-cuda.txt", [each for name, each in subset if is_torchs(name)])
    write("build.txt", [each for name, each in every if name == "setuptools"])
    write_cpu_build(next(each for name, each in every if name == "torch"))


def read_locked() -> str:
    """Return what is locked so far."""
    files = [LOCKS / "dev.txt", LOCKS / "torch-cuda.txt"]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.exists())


def compile_extras(
    uv: str, extras: tuple[str, ...], pins: str, options: list[str]
) -> list[tuple[str, str]]:
    """Return name and text of each requirement of the package with these extras."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "locked.txt")
        output.write_text(pins, encoding="utf-8")  # versions in it are preferred
        command = [uv, "pip", "compile", "--quiet", "--no-config", "--universal"]
        command += ["--python-version", "3.11", "--index-url", "https://pypi.org/simple"]
        command += ["--generate-hashes", "--no-annotate", "--no-header"]
        command += ["--no-emit-package", "pagewire"]
        command += [word for extra in extras for word in ("--extra", extra)]
        subprocess.run(
            [*command, *options, "--output-file", str(output), "pyproject.toml"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        text = output.read_text(encoding="utf-8")
    blocks = re.findall(r"^(([\w.-]+)==.*(?:\n[ ].*)*\n)", text, re.MULTILINE)
    return [(name, block) for block, name in blocks]


def is_torchs(name: str) -> bool:
    """Whether a package is torch, or one that comes with its build for CUDA."""
    return name == "torch" or OF_CUDA.match(name) is not None


def write_for_tests(file: str, every: list[tuple[str, str]]) -> None:
    """Write a lock file of an environment for tests, without torch.

    Triton's interpreter runs the tests of kernels, also next to torch's build for the CPU.
    """
    write(file, [each for name, each in every if name == "triton" or not is_torchs(name)])


def write(file: str, blocks: list[str]) -> None:
    """Write a lock file."""
    (LOCKS / file).write_text(HEAD + "".join(blocks), encoding="utf-8")


def write_cpu_build(locked: str) -> None:
    """Write the CPU build of a locked torch, with the hashes that the CPU index names.

    Where it does not answer, the file stays if it is of this version.
    """
    version = re.match(r"torch==(\S+)", locked)[1]
    pin = f"torch=={version}+cpu"
    try:
        with urllib.request.urlopen(CPU_INDEX, timeout=TIMEOUT_S) as answer:
            page = answer.read().decode()
    except OSError as exc:
        file = LOCKS / "torch-cpu.txt"
        if not (file.exists() and pin in file.read_text(encoding="utf-8").split()):
            sys.exit(f"no hashes of {pin}: {CPU_INDEX} does not answer: {exc}")
        print(f"{CPU_INDEX} does not answer ({exc}): {file.name} stays as it is")
        return
    hashes = sorted({m["hash"] for m in CPU_WHEEL.finditer(page) if m["version"] == version})
    if not hashes:
        sys.exit(f"{CPU_INDEX} has no wheels of {pin}")
    lines = [pin, *(f"    --hash=sha256:{each}" for each in hashes)]
    write("torch-cpu.txt", [" \\\n".join(lines) + "\n"])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
