"""`pagewire prove`: which lines get a cross, what it prints, and who carries out an order."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pagewire.services.cli.prove.answers import MAX_TOKENS, PROMPTS, ProofAnswer
from pagewire.services.cli.prove.judgement import MAX_GAP_S, Facts, Line, Strike, judge
from pagewire.services.cli.prove.orders import Claim, Orders
from pagewire.services.cli.prove.view import WIDTH, View

TOKENS = list(range(MAX_TOKENS))


def answer(tokens: list[int] = TOKENS, gap_s: float = 0.5, migrations: int = 0) -> ProofAnswer:
    """Return a whole answer with one gap."""
    return ProofAnswer("text", tokens, [1.0, 1.0 + gap_s], migrations, is_whole=True)


def calm() -> list[ProofAnswer]:
    return [answer(), answer()]


def disturbed() -> list[ProofAnswer]:
    return [answer(migrations=2, gap_s=5.0), answer(migrations=1)]


def facts() -> Facts:
    """Return those of a proof that has passed."""
    return Facts(
        flip=Claim("prefill-0", "decode-0", 32_800),
        corrupt=1,
        resent=1,
        frozen=Strike("decode-0", 30),
        killed_decode=Strike("decode-1", 80),
        killed_prefill=Claim("prefill-0", "decode-0", 65_600),
        moved=3,
        died=("prefill-0", "decode-1"),
        survivors=("prefill-1", "decode-0"),
        blocks_left={"prefill-1": 0, "decode-0": 0},
    )


def crosses(lines: list[Line]) -> list[str]:
    return [line.name for line in lines if not line.passed]


def test_a_proof_in_which_all_happened_and_nothing_was_lost_has_ticks_alone() -> None:
    lines = judge(calm(), disturbed(), facts())
    assert crosses(lines) == []
    assert {line.name: line.detail for line in lines} == {
        "byte flipped": "in a KV segment of 32,800 bytes from prefill-0",
        "decode worker frozen": "decode-0 (SIGSTOP), at token 30 of the first answer",
        "decode worker killed": "decode-1 (SIGKILL), at token 80 of the first answer",
        "prefill worker killed": "prefill-0 (SIGKILL), as it sent 65,600 bytes of KV",
        "corrupt segments found": "1 of 1",
        "segments sent again": "1",
        "answers moved": "3 times, the first answer 2 times",
        "tokens that differ": f"0 of {2 * MAX_TOKENS}",
        "longest gap": "5.00 s (calm run: 0.50 s)",
        "KV blocks left": "0 on prefill-1, decode-0, which lived on",
    }


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"flip": None}, ["byte flipped"]),
        ({"corrupt": 0}, ["corrupt segments found"]),
        ({"resent": 0}, ["segments sent again"]),
        ({"frozen": None}, ["decode worker frozen"]),
        ({"frozen": Strike("decode-0", 0)}, ["decode worker frozen"]),
        ({"killed_decode": None}, ["decode worker killed"]),
        ({"killed_decode": Strike("decode-1", MAX_TOKENS)}, ["decode worker killed"]),
        ({"killed_prefill": None}, ["prefill worker killed"]),
        ({"died": ("prefill-0",)}, ["decode worker killed"]),
        ({"died": ("decode-1",)}, ["prefill worker killed"]),
        ({"died": ("prefill-0", "decode-1", "decode-0")}, ["KV blocks left"]),
        ({"blocks_left": {"prefill-1": 0, "decode-0": 2}}, ["KV blocks left"]),
        ({"blocks_left": {"decode-0": 0}}, ["KV blocks left"]),
        ({"survivors": (), "blocks_left": {}}, ["KV blocks left"]),
    ],
)
def test_each_missing_fact_is_a_cross_on_its_line(
    change: dict[str, object], names: list[str]
) -> None:
    changed = replace(facts(), **change)
    assert crosses(judge(calm(), disturbed(), changed)) == names


@pytest.mark.parametrize(
    ("first", "names"),
    [
        (answer([*TOKENS[:-1], -1], migrations=2), ["tokens that differ"]),
        (answer(TOKENS[:-1], migrations=2), ["tokens that differ"]),
        (answer([*TOKENS, 1], migrations=2), ["tokens that differ"]),
        (answer(migrations=1), ["answers moved"]),
        (answer(gap_s=MAX_GAP_S + 1, migrations=2), ["longest gap"]),
    ],
)
def test_an_answer_that_lost_something_is_a_cross(first: ProofAnswer, names: list[str]) -> None:
    assert crosses(judge(calm(), [first, answer()], facts())) == names


def test_an_answer_with_an_error_is_a_cross_with_its_reason() -> None:
    broken = replace(answer(TOKENS[:10]), is_whole=False, problem="no worker")
    lines = judge(calm(), [answer(migrations=2), broken], facts())
    assert crosses(lines) == ["tokens that differ"]
    [line] = [line for line in lines if not line.passed]
    assert line.detail == f"{MAX_TOKENS - 10} of {2 * MAX_TOKENS}; no worker"


def test_a_proof_in_which_nothing_happened_has_crosses_alone() -> None:
    lines = judge([], [], Facts())
    assert crosses(lines) == [line.name for line in lines]


def printed(show: Callable[[View], None], encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    show(View(Console(file=file, width=200)))
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


def test_the_result_names_what_failed() -> None:
    lines = [Line("gap", True, "1 s"), Line("blocks left", False, "3")]
    shown = ["", "  ✓ gap          1 s", "  ✗ blocks left  3", "", "failed: blocks left, in 2.0 s"]
    assert printed(lambda view: view.result(lines, 2.0)) == shown
    plain = printed(lambda view: view.result(lines, 2.0), "ascii")
    assert plain[1:3] == ["  ok   gap          1 s", "  FAIL blocks left  3"]


@pytest.mark.parametrize(
    ("device", "num_gpus", "where"),
    [
        ("auto", 0, "the CPU"),
        ("auto", 1, "1 GPU"),
        ("cpu", 2, "the CPU"),
        ("cuda", 2, "2 GPUs"),
        ("cuda", 0, "GPUs"),  # the workers look for some in another way, and say if there is none
    ],
)
def test_the_start_says_where_workers_run(device: str, num_gpus: int, where: str) -> None:
    [line] = printed(lambda view: view.starting(device, num_gpus))
    assert line.endswith(f" decode workers start, on {where} ...")


def test_a_fault_stands_between_the_words_of_the_answer() -> None:
    def show(view: View) -> None:
        view.disturbed()
        for part in (" a li", "ne\n  inden", "ted and", " on"):
            view.text(part)
        view.fault("killed decode-0")
        view.text("e\x1b[31m more")
        view.result([Line("gap", True, "1 s")], 1.0)

    assert printed(show)[2:7] == [
        f"  {PROMPTS[0]} a line",
        "    indented and",
        "  >> killed decode-0",
        "  one[31m more",
        "",
    ]


def test_long_lines_break_between_words() -> None:
    words = ["word"] * 40

    def show(view: View) -> None:
        view.disturbed()
        view.text(" " + " ".join(words))
        view.result([Line("gap", True, "1 s")], 1.0)

    text = printed(show)[2:-4]
    assert len(text) == 3
    assert max(map(len, text)) <= WIDTH
    assert " ".join(text).split() == [*PROMPTS[0].split(), *words]


def test_an_order_is_carried_out_once(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    first, second = (Claim(f"prefill-{index}", "decode-0", 7) for index in range(2))
    assert not orders.take("flip", first)
    orders.post("flip")
    assert orders.claim_of("flip") is None
    assert [orders.take("flip", first), orders.take("flip", second)] == [True, False]
    assert not orders.take("kill", second)
    assert (orders.claim_of("flip"), orders.claim_of("kill")) == (first, None)
