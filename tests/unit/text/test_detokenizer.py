"""Detokenizing part by part, against the tokenizer's own decode."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.detokenizer import ContextDetokenizer, make_detokenizer
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.sentencepiece import sentencepiece_tokenizer

DEMO = Tokenizer.from_dir(demo_model_path())

BYTE_IDS = [i for i in range(DEMO.vocab_size) if len(DEMO.token_bytes.of(i)) == 1]
# Text in which nothing reads as a special token, which decoding would leave out.
PLAIN_TEXT = st.text().filter(lambda text: "<|" not in text)


@pytest.mark.parametrize(
    "detokenizer", [make_detokenizer, ContextDetokenizer], ids=["table", "context"]
)
class TestDetokenizers:
    @given(PLAIN_TEXT, st.text(max_size=8), st.integers(1, 4))
    def test_any_text_comes_back(self, detokenizer: Any, text: str, prompt: str, step: int) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        stream = detokenizer(DEMO, DEMO.encode(prompt))
        parts = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
        assert "".join(parts) + stream.flush() == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)

    @given(st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=200))
    def test_any_ids_come_back_as_decode_has_them(self, detokenizer: Any, ids: list[int]) -> None:
        stream = detokenizer(DEMO, DEMO.encode("prompt"))
        assert stream.push(ids) + stream.flush() == DEMO.decode(ids)

    @given(
        st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=200),
        st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=12),
    )
    def test_all_at_once_gives_what_one_by_one_does(
        self, detokenizer: Any, ids: list[int], prompt: list[int]
    ) -> None:
        stream = detokenizer(DEMO, prompt)
        one_by_one = stream.push(ids) + stream.flush()
        assert detokenizer(DEMO, prompt).finish(ids) == one_by_one

    def test_a_repeated_prompt_and_its_answer_are_the_whole(self, detokenizer: Any) -> None:
        hello, pepper, letter, wrong = (
            DEMO.encode(text, add_special_tokens=False)
            for text in ("Hi ", "\U0001f336", "a", "\ufffd")
        )
        for prompt, answer in (
            ([*hello, *pepper[:2]], pepper[2:]),
            ([*hello, *pepper[:2]], letter),
            ([*hello, *pepper[:2]], []),
            ([*hello, *wrong], letter),  # a character of its own
            (pepper[:1], pepper[1:]),
            ([], pepper),
        ):
            stream, shown = detokenizer(DEMO, prompt), DEMO.decode(prompt)
            repeated = shown[: len(shown) - stream.take_rest()]
            text = "".join([stream.push([each]) for each in answer]) + stream.flush()
            assert repeated + text == DEMO.decode(prompt + answer)

    def test_emoji_appears_with_its_last_token(self, detokenizer: Any) -> None:
        ids = DEMO.encode("👋", add_special_tokens=False)
        assert len(ids) > 1
        stream = detokenizer(DEMO, DEMO.encode("Hi "))
        assert [stream.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["👋"]
        assert stream.flush() == ""

    def test_prompt_may_end_inside_a_character(self, detokenizer: Any) -> None:
        ids = DEMO.encode("a👋b", add_special_tokens=False)
        for cut in range(2, len(ids) - 1):
            stream = detokenizer(DEMO, ids[:cut])
            assert stream.push(ids[cut:]) + stream.flush() == "👋b"

    @pytest.mark.parametrize("text", ["a …b", "x  日本", " é é", "1 👋 👋"])
    def test_what_a_prompt_has_finished_is_not_given_out_again(
        self, detokenizer: Any, text: str
    ) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        for cut in range(1, len(ids)):
            before = DEMO.decode(ids[:cut]).rstrip("\ufffd")
            stream = detokenizer(DEMO, ids[:cut])
            assert stream.push(ids[cut:]) + stream.flush() == text.removeprefix(before), cut

    def test_unfinished_character_comes_with_the_end(self, detokenizer: Any) -> None:
        ids = DEMO.encode("ok👋", add_special_tokens=False)
        stream = detokenizer(DEMO, [])
        assert stream.push(ids[:-1]) == "ok"
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""

    @pytest.mark.parametrize("text", ["\ufffd" * 100, "日" * 100], ids=["U+FFFD", "han"])
    def test_long_runs_of_many_token_characters(self, detokenizer: Any, text: str) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        stream = detokenizer(DEMO, [])
        assert "".join(stream.push([i]) for i in ids) + stream.flush() == text

    def test_garbage_is_not_held_for_ever(self, detokenizer: Any) -> None:
        lead = DEMO.encode("👋", add_special_tokens=False)[0]
        stream = detokenizer(DEMO, [])
        parts = [stream.push([lead]) for _ in range(1000)]
        assert len("".join(parts)) > 900
        assert "".join(parts) + stream.flush() == DEMO.decode([lead] * 1000)

    def test_special_tokens_are_silent(self, detokenizer: Any) -> None:
        end = DEMO.encode("<|end|>", add_special_tokens=False)
        ids = DEMO.encode("done", add_special_tokens=False)
        stream = detokenizer(DEMO, end)
        assert stream.push([*ids, *end]) + stream.flush() == "done"


class TestTable:
    """Against the tokenizer's own decode, of the prompt and the answer together."""

    @given(
        st.lists(st.integers(0, DEMO.vocab_size + 3), max_size=12),
        st.lists(st.integers(0, DEMO.vocab_size + 3), max_size=60),
        st.integers(1, 5),
    )
    def test_any_ids(self, prompt: list[int], ids: list[int], step: int) -> None:
        assert DEMO.token_bytes.text_table is not None
        stream = make_detokenizer(DEMO, prompt)
        parts = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
        assert DEMO.decode(prompt + ids) in _wholes(prompt, "".join(parts) + stream.flush())

    @given(st.lists(st.sampled_from(BYTE_IDS), max_size=9), st.lists(st.sampled_from(BYTE_IDS)))
    def test_a_repeated_prompt_and_any_bytes_are_the_whole(
        self, prompt: list[int], ids: list[int]
    ) -> None:
        stream, shown = make_detokenizer(DEMO, prompt), DEMO.decode(prompt)
        repeated = shown[: len(shown) - stream.take_rest()]
        text = "".join([stream.push([i]) for i in ids]) + stream.flush()
        assert repeated + text == DEMO.decode(prompt + ids)

    @given(st.lists(st.sampled_from(BYTE_IDS), max_size=4), st.lists(st.sampled_from(BYTE_IDS)))
    def test_any_bytes(self, prompt: list[int], ids: list[int]) -> None:
        stream = make_detokenizer(DEMO, prompt)
        text = "".join([stream.push([i]) for i in ids]) + stream.flush()
        assert DEMO.decode(prompt + ids) in _wholes(prompt, text)

    def test_a_replacement_character_that_the_prompt_began_is_the_answers(self) -> None:
        ids = DEMO.encode("\ufffd", add_special_tokens=False)
        assert len(ids) > 1
        assert make_detokenizer(DEMO, ids[:1]).finish(ids[1:]) == "\ufffd"
        assert make_detokenizer(DEMO, ids[:1]).finish(DEMO.encode("a")[-1:]) == "a"

    def test_a_decoder_that_looks_at_neighbours_has_none(self, sentencepiece: Tokenizer) -> None:
        assert sentencepiece.token_bytes.text_table is None

    def test_a_vocabulary_that_decodes_to_other_text_has_none(self) -> None:
        backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
        assert Tokenizer(backend, None, None, frozenset()).token_bytes.text_table is not None
        backend.add_tokens(["\u00e9"])  # one byte in a byte-level vocabulary, and no text
        assert Tokenizer(backend, None, None, frozenset()).token_bytes.text_table is None


def _wholes(prompt: list[int], answer: str) -> list[str]:
    """The texts that prompt and answer may be together: the prompt's last character, if it is
    unfinished, is finished by the answer or stays a U+FFFD."""
    shown = DEMO.decode(prompt)
    return [shown + answer, shown.removesuffix("\ufffd") + answer]


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return sentencepiece_tokenizer()


class TestSentencePieceStyle:
    @pytest.mark.parametrize("prompt", ["", "hi", "日"], ids=["empty", "ascii", "bytes"])
    def test_stream_is_decode_minus_the_prompt(self, sentencepiece: Tokenizer, prompt: str) -> None:
        prompt_ids = [1, *sentencepiece.encode(prompt)]
        ids = sentencepiece.encode("hello world 日本 👋 bye")
        stream = make_detokenizer(sentencepiece, prompt_ids)
        parts = [stream.push([i]) for i in ids]
        whole = sentencepiece.decode([*prompt_ids, *ids])
        assert "".join(parts) + stream.flush() == whole.removeprefix(prompt)
        assert not any("\ufffd" in part for part in parts)
