"""The commands in the documents work as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pagewire.tests.support.documents import ROOT, Block, blocks
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters

pytestmark = pytest.mark.timeout(180)

DEFAULT_URL = "http://127.0.0.1:8000"
BLOCKS = blocks()


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=1, decode=1, predicted=True)


# What the demo is asked in documents and help texts, and what only the right answer has.
ASKED = re.compile(r"What is a lambda\?|Lambda expressions|How do I open a file")
RIGHT, RIGHT_OF_FILES = "(sometimes called lambda forms)", "with open("
PROGRAM = f"{sys.executable} -P -m pagewire.services.cli.main"


def _run(block: Block, code: str) -> str:
    if block.language == "python":
        return _output([sys.executable, "-P", "-c", code])
    return _shell(code.replace(".venv/bin/pagewire", PROGRAM))


def _shell(commands: str) -> str:
    return _output(["bash", "-euo", "pipefail", "-c", commands])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _check_answers(code: str, output: str) -> None:
    """Check that each question in some code has its own answer."""
    assert output.strip()
    asked = len(ASKED.findall(code))
    asks = re.search(r"complet|chat|generate", code)
    assert asked or not asks, f"a question that this test has no answer to: {code}"
    assert output.count(RIGHT) + output.count(RIGHT_OF_FILES) == asked, output


def test_every_block_says_how_it_is_run() -> None:
    silent = [str(block) for block in BLOCKS if block.run is None]
    assert not silent
    kinds = {block.run for block in BLOCKS if not (block.run or "").startswith("by hand, ")}
    assert kinds == {"alone", "cluster", "docker"}


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.run == "alone"], ids=str)
def test_block_runs_alone(block: Block) -> None:
    _check_answers(block.code, _run(block, block.code))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.run == "cluster"], ids=str)
def test_block_runs_against_a_cluster(block: Block, cluster: LocalCluster) -> None:
    code = block.code.replace(DEFAULT_URL, cluster.url)
    # Commands without a URL mean the default one.
    commands = r"(pagewire (?:complete|chat|batch|bench|status))"
    code = re.sub(commands, rf"\1 --url {cluster.url}", code)
    code = code.replace("pagewire top", f"pagewire top --operator-url {cluster.operator_url}")
    _check_answers(code, _run(block, code))


def test_the_ready_boxs_command_gets_its_answer(cluster: LocalCluster) -> None:
    line = next(line for line in cluster.lines if line.startswith("curl "))
    _check_answers(line, _shell(line))


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_the_example_of_a_help_text_gets_its_answer(command: str, cluster: LocalCluster) -> None:
    [example] = re.findall(
        r"Example: pagewire (.*)", _shell(f"COLUMNS=200 {PROGRAM} {command} --help")
    )
    if command == "chat":  # a conversation: somebody has to ask
        example += " <<< 'What is a lambda?'"
    code = example.replace(command, f"{command} --url {cluster.url}", 1)
    _check_answers(code, _shell(f"{PROGRAM} {code}"))
