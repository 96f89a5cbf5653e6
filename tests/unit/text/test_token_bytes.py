"""The bytes of single tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.sentencepiece import sentencepiece_tokenizer

DEMO = Tokenizer.from_dir(demo_model_path())


@given(st.text())
def test_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    ids = DEMO.encode(text, add_special_tokens=False)
    assert b"".join(DEMO.token_bytes.of(i) for i in ids) == text.encode()


def test_special_tokens_are_their_own_text() -> None:
    assert DEMO.token_bytes.text(0) == "<|bos|>"
    assert DEMO.token_bytes.is_special(0)
    assert not DEMO.token_bytes.is_special(300)


def test_a_part_of_a_character_is_shown_as_such() -> None:
    first = DEMO.encode("🚀", add_special_tokens=False)[0]
    assert "\ufffd" in DEMO.token_bytes.text(first)
    assert "🚀".encode().startswith(DEMO.token_bytes.of(first))


def test_an_id_that_the_vocabulary_lacks_has_no_text() -> None:
    assert DEMO.token_bytes.of(10**6) == b""


def test_sentencepiece_tokens() -> None:
    tokenizer = sentencepiece_tokenizer()
    joined = b"".join(tokenizer.token_bytes.of(i) for i in tokenizer.encode("hello 日"))
    assert joined == " hello 日".encode()
    assert tokenizer.token_bytes.is_special(1)
