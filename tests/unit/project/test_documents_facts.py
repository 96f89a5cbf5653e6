"""Facts in the documents that the code and the other documents must agree with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pagewire
from pagewire.services.cli.up.command import DRAIN_TIMEOUT_S
from pagewire.services.router.dispatch.dispatcher import WORKER_WAIT_S
from pagewire.services.router.http.unsupported import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS
from pagewire.services.router.main import CUT_S
from pagewire.shared.base.errors import VersionMismatchError
from pagewire.shared.control.protocol import PROTOCOL_VERSION, decode
from pagewire.shared.model.families import ARCHITECTURES
from pagewire.tests.support.documents import DOCUMENTS, ROOT
from pagewire.tests.support.tiny_models import ARCHITECTURE_OF

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTAINERS = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
HAPROXY = (ROOT / "services" / "gateway" / "haproxy.cfg").read_text(encoding="utf-8")
COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")

TOP = ("docs", "kernels", "loadtest", "services", "shared", "tests", "tools")
PLACEHOLDER = re.compile(r"[A-Z]{4}")


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table of the documents that has this heading in its head."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCUMENTS)
    found = re.search(rf"^\| {heading} \|.*\n\| ---.*\n((?:\|.*\n)+)", pages, re.MULTILINE)
    assert found is not None, heading
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[1].splitlines()]


def setting(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


def test_the_list_of_refused_fields_is_complete() -> None:
    listed = [name for row in table("not supported") for name in re.findall(r"`(\w+)`", row[1])]
    assert len(listed) == len(set(listed))
    assert set(listed) == REFUSED_IN_CHATS.keys() | REFUSED_IN_COMPLETIONS.keys()
    [prompt] = [row[1] for row in table("not supported") if row[0] == "prompt"]
    assert "`echo` in chats" in prompt
    assert "echo" not in REFUSED_IN_COMPLETIONS


def test_the_table_of_families_has_all_and_what_was_tried() -> None:
    rows = {row[0].strip("`"): row[2].strip("`") for row in table("architecture")}
    assert rows.keys() == ARCHITECTURES.keys()
    assert rows == {name: f"-k {family}-" for family, name in ARCHITECTURE_OF.items()}


def test_restarts_last_as_long_as_the_documents_say() -> None:
    noticed = {row[0].split(",")[0]: row[1] for row in table("restarted")}
    drain = setting(r"PAGEWIRE_DRAIN_TIMEOUT_S:-(\d+)", COMPOSE)
    hard_stop = setting(r"hard-stop-after (\d+)s", HAPROXY)
    assert f"{drain} s to finish (`PAGEWIRE_DRAIN_TIMEOUT_S`)" in noticed["decode worker"]
    assert f"at most {WORKER_WAIT_S:g} s, then they are answered 503" in noticed["decode worker"]
    assert f"not complete after {drain} s ends with an error" in noticed["router"]
    assert f"not complete after {hard_stop} s breaks off" in noticed["gateway"]
    drained = f"requests have {DRAIN_TIMEOUT_S:g} s to finish (`--drain-timeout-s`)"
    assert drained in CONTAINERS.replace("\n", " ")


def test_who_waits_for_others_waits_longer() -> None:
    """The gateway for the routers, docker for all, which takes them in the order of dependency."""
    drain = int(setting(r"PAGEWIRE_DRAIN_TIMEOUT_S:-(\d+)", COMPOSE))
    hard_stop = int(setting(r"hard-stop-after (\d+)s", HAPROXY))
    grace = [int(each) for each in re.findall(r"stop_grace_period: (\d+)s", COMPOSE)]
    assert len(grace) == 3  # gateway, router, workers
    assert drain + CUT_S < hard_stop < min(grace)
    assert f"connections have {hard_stop} s to end" in COMPOSE.replace("\n# ", " ")
    gateway = setting(r"\n  gateway:\n((?:    .*\n|\n)+)", COMPOSE)
    assert "depends_on" not in gateway  # it would be waited for, and break streams off
    router = setting(r"\n  router:\n((?:    .*\n|\n)+)", COMPOSE)
    assert "      prefill: {" in router and "      decode: {" in router


@pytest.mark.parametrize("row", table("what"), ids=lambda row: row[0])
def test_figures_of_the_readme_are_those_of_the_benchmarks(row: list[str]) -> None:
    """Each number that was measured stands in docs/benchmarks.md."""
    cells = re.sub(r"2 aggregated|1P1D|FlashAttention 3", "", " ".join(row[1:3]))
    figures = re.findall(r"\d[\d,.]*%?", cells)
    assert figures
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d%])(?!\.\d)", BENCHMARKS), figure


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_vllm_is_shown_at_its_best(path: Path) -> None:
    """Where its disaggregated servers are compared, its two aggregated ones are, too."""
    paragraphs_and_tables = re.split(r"\n(?:\s*\n)+", path.read_text(encoding="utf-8"))
    rows = [" ".join(row) for row in table("what")] if path.name == "README.md" else []
    for text in (*paragraphs_and_tables, *rows):
        if re.search("vLLM(?:'s|,) (?:1P1D|likewise)", text):
            assert re.search("vLLM(?:'s|,) (?:two|2) aggregated", text), text


def test_the_readme_says_that_disaggregation_gains_no_goodput_on_one_cpu_machine() -> None:
    assert "On one CPU machine, disaggregation gains no goodput" in README.replace("\n", " ")


PAGES = [*DOCUMENTS, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = []
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    names = re.findall(r"`((?:\w+/)+[\w.]*)`", text)
    ours = [name for name in names if name.split("/")[0] in TOP and not PLACEHOLDER.search(name)]
    wrong += [name for name in ours if not (ROOT / name).exists()]
    assert wrong == []


def test_the_changelog_and_the_upgrade_page_have_this_release() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = setting(r"(?ms)^(## \[.*?)(?=^## \[|\Z)", changelog)
    assert pagewire.__version__ in latest.splitlines()[0]
    assert f"\nProtocol version {PROTOCOL_VERSION}.\n" in latest
    upgrade = (ROOT / "docs" / "upgrade.md").read_text(encoding="utf-8")
    with pytest.raises(VersionMismatchError) as refused:
        decode(bytes([PROTOCOL_VERSION + 1, 0]))
    assert str(refused.value).partition("speaks ")[2] in upgrade.replace("\n", " ")


@pytest.mark.parametrize("name", ["benchmarks.md", "kernel-benchmarks.md", "fault-benchmark.md"])
def test_the_day_stands_under_each_table_of_figures(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    results = text.partition("## Results")[2] if name == "fault-benchmark.md" else text
    sections = re.split(r"^#+ ", results, flags=re.MULTILINE)
    lacking = []
    for section in sections:
        last_table = section.rpartition("\n|")
        if last_table[1] and not re.search(r"20\d\d-\d\d-\d\d", "\n|" + last_table[2]):
            lacking.append(section.splitlines()[0])
    assert len(sections) > 2
    assert lacking == []


def test_first_pages_are_short() -> None:
    assert len(README.split()) <= 1200
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 80


def anchors(document: Path) -> set[str]:
    """Return the names that GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ (.*)", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
