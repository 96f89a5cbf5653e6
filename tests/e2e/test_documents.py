"""The commands in the documents work as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagewire.tests.support.documents import ROOT, Block, blocks
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(180)

DEFAULT_URL = "http://127.0.0.1:8000"
BLOCKS = blocks()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster("--device", "cpu") as running:
        yield running


def _run(block: Block, code: str) -> str:
    if block.language == "python":
        command = [sys.executable, "-P", "-c", code]
    else:
        commands = code.replace(
            ".venv/bin/pagewire", f"{sys.executable} -P -m pagewire.services.cli.main"
        )
        command = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_block_says_how_it_is_run() -> None:
    silent = [str(block) for block in BLOCKS if block.run is None]
    assert not silent
    kinds = {block.run for block in BLOCKS if not (block.run or "").startswith("by hand, ")}
    assert kinds == {"alone", "cluster", "docker"}


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.run == "alone"], ids=str)
def test_block_runs_alone(block: Block) -> None:
    assert _run(block, block.code).strip()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.run == "cluster"], ids=str)
def test_block_runs_against_a_cluster(block: Block, cluster: LocalCluster) -> None:
    code = block.code.replace(DEFAULT_URL, cluster.url)
    # Commands without a URL mean the default one.
    code = re.sub(r"(pagewire (?:complete|chat|bench|status))", rf"\1 --url {cluster.url}", code)
    assert _run(block, code).strip()
