"""Stop strings are for the answer: in reasoning, and in what is around it, they do nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.answer_text import TextAssembler, TextRules
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.answer import AnswerParsing, ParsedMessage, read_answer
from pagewire.shared.tool_calls.answer_parts import answer_parts
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.reasoning import REASONING_FORMATS, Begins
from pagewire.shared.tool_calls.syntax import ChatSyntax

TOKENIZER = Tokenizer.from_dir(demo_model_path())
SYNTAXES = {name: ChatSyntax(None, form) for name, form in REASONING_FORMATS.items()}
SYNTAXES["harmony"] = ChatSyntax(TOOL_FORMATS["harmony"], REASONING_FORMATS["harmony"])
TEXT = "<think>\nFirst a.\nThen b, so\n</think>\n\nYes.\n\nNo.\nThen"
HARMONY = (
    "<|channel|>analysis<|message|>One. Two.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Three. Four.<|return|>"
)
STOPS = ["\n\n", "\n", "so", "e", "soYes", "</think>", "<", "[/", " ", "Yes"]


def assembled(
    name: str, begins: Begins, text: str, rules: TextRules, step: int = 1
) -> tuple[ParsedMessage, str | None]:
    """Return an answer as clients get it, and the stop string that ended it."""
    syntax, reading = SYNTAXES[name], AnswerParsing(reasoning=begins)
    assembler = TextAssembler(TOKENIZER, [], rules, answer_parts(syntax, reading))
    ids = TOKENIZER.encode_word(text)
    found = ""
    for at in range(0, len(ids), step):
        delta = assembler.push(ids[at : at + step], "length" if at + step >= len(ids) else None)
        found += delta.text
        if delta.finish_reason is not None:
            break
    return read_answer(syntax, reading, found, is_cut=True), assembler.matched


@pytest.mark.parametrize(
    ("name", "begins", "text", "stop", "content"),
    [
        ("think", "outside", TEXT, "a.", "Yes.\n\nNo.\nThen"),
        ("think", "outside", TEXT, "\nThen", "Yes.\n\nNo."),
        ("think", "inside", TEXT.removeprefix("<think>"), "\nThen", "Yes.\n\nNo."),
        ("think", "outside", TEXT, "\n\n", "Yes."),
        ("think", "outside", TEXT, "</think>", "Yes.\n\nNo.\nThen"),
        ("think", "outside", TEXT, "so\nYes", "Yes.\n\nNo.\nThen"),
        ("think", "outside", "\n\nYes.", "\n", ""),
        ("think", "outside", "<thanks>", "<th", ""),
        ("think", "outside", "<thi", "<th", ""),
        ("think", "inside", "Hm, so\nThen b", "\nThen", None),
        ("granite_tags", "outside", "<think>a</think><response>\nYes", "<response>", "Yes"),
        ("granite_tags", "outside", "<think>a</think>\n<respect>Yes", "<resp", None),
        ("cohere", "answer", "Yes. No.", " N", "Yes."),
        ("mistral", "outside", "[THINK]Yes.[/THINK]No. Yes.", " Yes", "No."),
        ("harmony", "outside", HARMONY, "Two.", "One.\nThree. Four."),
        ("harmony", "outside", HARMONY, "Four", "One.\nThree. "),
        ("harmony", "outside", HARMONY, "final", "One.\nThree. Four."),
        ("harmony", "inside", "One.<|end|><|start|>assistant", "One", None),
        ("harmony", "outside", "One. Two.", "Two", "One. "),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stop_string_counts_in_the_answer_alone(
    name: str, begins: Begins, text: str, stop: str, content: str | None, step: int
) -> None:
    whole, _ = assembled(name, begins, text, TextRules())
    found, matched = assembled(name, begins, text, TextRules((stop,)), step)
    assert found.content == content
    assert found.reasoning == whole.reasoning
    assert (matched is not None) == (whole.content != content)


def test_the_stop_string_may_be_a_part_of_the_answer() -> None:
    rules = TextRules(("\nThen", "No"), include_stop=True)
    found, matched = assembled("think", "outside", TEXT, rules)
    assert (found.content, matched) == ("Yes.\n\nNo", "No")


def test_stop_tokens_end_an_answer_in_its_reasoning_as_before() -> None:
    ids = TOKENIZER.encode_word("<think>So")
    syntax, reading = SYNTAXES["think"], AnswerParsing(reasoning="outside")
    rules = TextRules(("x",), stop_token_ids=(ids[-1],))
    assembler = TextAssembler(TOKENIZER, [], rules, answer_parts(syntax, reading))
    delta = assembler.push(ids, "stop")
    assert (delta.text, delta.stop_string) == ("<think>S", None)


def test_reasoning_is_not_held_back_where_it_looks_like_a_stop_string() -> None:
    parts = answer_parts(SYNTAXES["think"], AnswerParsing(reasoning="inside"))
    assembler = TextAssembler(TOKENIZER, [], TextRules(("No way",)), parts)
    assert assembler.push(TOKENIZER.encode_word("No"), None).text == "No"
    text = "".join(
        assembler.push([each], None).text for each in TOKENIZER.encode_word("</think>\nNo wa")
    )
    assert text == "</think>\n"
    assert assembler.push(TOKENIZER.encode_word("s"), "stop").text == "No was"


TEXTS = st.lists(st.integers(0, 9), max_size=12)


def text_of(name: str, words: list[int]) -> str:
    form = REASONING_FORMATS[name]
    texts = (form.open, form.close, form.answer_open, form.answer_close, "\n", " ", "so", "Yes")
    return "".join((*texts, form.open[:3], form.close[:3])[word] for word in words)


@given(
    name=st.sampled_from(sorted(SYNTAXES)),
    begins=st.sampled_from(["outside", "inside", "answer"]),
    words=TEXTS,
    step=st.integers(1, 9),
)
def test_parts_are_the_whole_text(name: str, begins: Begins, words: list[int], step: int) -> None:
    text = text_of(name, words)
    parts = answer_parts(SYNTAXES[name], AnswerParsing(reasoning=begins))
    assert parts is not None
    chunks = [text[at : at + step] for at in range(0, len(text), step)]
    divided = [each for chunk in chunks for each in parts.push(chunk)] + parts.flush()
    assert "".join(part for part, _ in divided) == text


@given(
    name=st.sampled_from(["granite", "mistral", "think"]),  # without tags around the answer
    begins=st.sampled_from(["outside", "inside", "answer"]),
    words=TEXTS,
    stop=st.sampled_from(STOPS),
    step=st.integers(1, 4),
)
def test_any_answer_is_that_without_stop_strings_up_to_the_first_in_its_content(
    name: str, begins: Begins, words: list[int], stop: str, step: int
) -> None:
    text = text_of(name, words)
    whole, _ = assembled(name, begins, text, TextRules())
    found, matched = assembled(name, begins, text, TextRules((stop,)), step)
    content = whole.content or ""
    assert found.reasoning == whole.reasoning
    assert (found.content or "") == content.partition(stop)[0]
    assert (matched == stop) == (stop in content)
