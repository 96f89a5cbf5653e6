"""Detokenizing SentencePiece-like vocabularies by a table, against Hugging Face's own decoders."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from pagewire.shared.text.detokenizer import (
    ContextDetokenizer,
    PieceDetokenizer,
    make_detokenizer,
)
from pagewire.shared.text.tokenizer import Tokenizer

WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
WORDS += ["▁", "▁▁", "▁the", "a", "b", "▁日", "é", "▁a▁b", "\ufffd", "👋", "<", "\n"]
REPLACE = decoders.Replace("▁", " ")
ENDS = [REPLACE, decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "llama": decoders.Sequence([*ENDS, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(ENDS),
    "metaspace": decoders.Metaspace("▁", "always"),
    "metaspace-never": decoders.Metaspace("▁", "never"),
}


def make(decoder: Any) -> Tokenizer:
    vocab = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>", "<|tool▁call|>"])
    backend.add_tokens(["<tag▁a>"])
    return Tokenizer(backend, None, 1, frozenset())


TOKENIZERS = {name: make(decoder) for name, decoder in DECODERS.items()}
SIZE = TOKENIZERS["llama"].vocab_size
SPECIAL = [1, 2, SIZE - 2]
# Characters in bytes, parts of them, and other tokens, also some that the vocabulary lacks.
CHARACTERS = st.text("\n a é日👋\ufffd", min_size=1, max_size=2)
IN_BYTES = CHARACTERS.map(lambda text: [3 + byte for byte in text.encode()])
ONE = st.integers(0, SIZE + 2) | st.integers(259, SIZE - 1) | st.sampled_from(SPECIAL)
PARTS = ONE.map(lambda token_id: [token_id]) | IN_BYTES
IDS = st.lists(PARTS, max_size=12).map(lambda parts: [each for part in parts for each in part])


def runs(ids: list[int]) -> list[bytes]:
    """The byte tokens that are next to each other once special ones are left out."""
    text = "".join(f"{i - 3:02x}" if 3 <= i < 259 else " " for i in ids if i not in SPECIAL + [
        each for each in ids if each >= SIZE])  # fmt: skip
    return [bytes.fromhex(run) for run in re.findall(r"[0-9a-f]+", text)]


def has_late_mistake(ids: list[int]) -> bool:
    """Whether bytes that are not UTF-8 come after a character in the same run.

    Hugging Face's decoder then has U+FFFD for the character as well, which a stream has given out.
    """
    for run in runs(ids):
        try:
            run.decode()
        except UnicodeDecodeError as exc:
            if exc.start > 0:
                return True
    return False


@pytest.mark.parametrize("name", ["llama", "gemma"])
@given(ids=IDS, step=st.integers(1, 5), skip=st.booleans())
def test_any_ids_are_what_decode_makes_of_them(
    name: str, ids: list[int], step: int, skip: bool
) -> None:
    assume(skip or not set(ids) & set(SPECIAL))
    assume(not has_late_mistake(ids))
    check(TOKENIZERS[name], ids, step, skip)


@pytest.mark.parametrize("name", ["metaspace", "metaspace-never"])
@given(ids=IDS, step=st.integers(1, 5), skip=st.booleans())
def test_metaspace_has_no_byte_tokens(name: str, ids: list[int], step: int, skip: bool) -> None:
    check(TOKENIZERS[name], ids, step, skip)


@pytest.mark.parametrize("name", DECODERS)
@given(parts=st.lists(st.integers(259, SIZE - 1) | st.sampled_from(SPECIAL), max_size=8))
def test_special_tokens_may_be_shown(name: str, parts: list[int]) -> None:
    check(TOKENIZERS[name], parts, 2, skip=False)
    tokenizer = TOKENIZERS[name]
    stream = make_detokenizer(tokenizer, [], True, visible=[SIZE - 2])
    hidden = [each for each in parts if each not in SPECIAL[:2]]
    assert stream.finish(parts) == tokenizer.decode(hidden, skip_special_tokens=False)


def check(tokenizer: Tokenizer, ids: list[int], step: int, skip: bool) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    stream = make_detokenizer(tokenizer, [], skip)
    assert isinstance(stream, PieceDetokenizer)
    parts = [stream.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join(parts) + stream.flush() == whole
    assert make_detokenizer(tokenizer, [], skip).finish(ids) == whole
    assert stream.flush() == ""


@pytest.mark.parametrize("name", DECODERS)
@given(prompt=IDS, ids=IDS, step=st.integers(1, 5))
def test_answers_after_a_prompt(name: str, prompt: list[int], ids: list[int], step: int) -> None:
    """Together they are the whole, but for the U+FFFD that the prompt has shown."""
    tokenizer = TOKENIZERS[name]
    if name in ("llama", "gemma"):
        assume(not has_late_mistake(prompt + ids) and not has_late_mistake(prompt))
    stream = make_detokenizer(tokenizer, prompt)
    parts = [stream.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    answer, visible = "".join(parts) + stream.flush(), tokenizer.decode(prompt)
    rests = [visible[: len(visible) - cut] for cut in range(4) if visible.endswith("\ufffd" * cut)]
    assert tokenizer.decode(prompt + ids) in [rest + answer for rest in rests]
    stream = make_detokenizer(tokenizer, prompt)
    repeated = visible[: len(visible) - stream.take_rest()]
    assert repeated + stream.finish(ids) == tokenizer.decode(prompt + ids)


@pytest.mark.parametrize("name", ["llama", "gemma"])
@given(ids=IDS, step=st.integers(1, 5))
def test_what_is_finished_is_given_out_and_stays(name: str, ids: list[int], step: int) -> None:
    """Also where bytes after it are wrong: as many U+FFFD follow as there are such bytes."""
    tokenizer = TOKENIZERS[name]
    stream = make_detokenizer(tokenizer, [])
    parts = [stream.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    text = "".join(parts) + stream.flush()
    assert text == make_detokenizer(tokenizer, []).finish(ids)
    assert len(text.encode()) >= len(tokenizer.decode(ids).replace("\ufffd", "").encode())


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_an_emoji_in_bytes_comes_with_the_last_of_them(name: str) -> None:
    ids = [260, *(3 + byte for byte in "👋".encode()), 262]
    stream = make_detokenizer(TOKENIZERS[name], [262])
    assert [stream.push([each]) for each in ids] == ["  ", "", "", "", "👋", "a"]
    assert stream.push([3 + 0xF0, 1, 3 + 0x9F]) == ""  # a special token is not there
    assert stream.push([262]) == "\ufffd\ufffda"
    assert stream.push([3 + 0xF0, 3 + 0x0A]) == "\ufffd\ufffd"
    assert stream.push([3 + 0x0A]) == "\ufffd"  # of the same run
    assert stream.push([262, 3 + 0x0A]) == "a\n"


def test_a_prompt_may_end_inside_a_character() -> None:
    tokenizer, (first, *rest) = TOKENIZERS["gemma"], [3 + byte for byte in "👋".encode()]
    assert make_detokenizer(tokenizer, [262, first]).finish([*rest, 263]) == "👋b"
    assert make_detokenizer(tokenizer, [262, first]).finish([rest[0], 263]) == "\ufffdb"
    assert make_detokenizer(tokenizer, [262, first]).finish([263]) == "b"
    assert make_detokenizer(tokenizer, [262, first, first]).finish(rest) == "\ufffd" * 3


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece("##"),
        decoders.Sequence([*ENDS, decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([REPLACE, decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), REPLACE]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("[ab]"), "c"), *ENDS[1:]]),
    ],
    ids=["word piece", "two spaces", "no bytes", "after all", "regex"],
)
def test_other_decoders_are_asked_for_each_token(decoder: Any) -> None:
    tokenizer = make(decoder)
    stream = make_detokenizer(tokenizer, [262])
    assert isinstance(stream, ContextDetokenizer)
    assert stream.finish([262, 263]) == tokenizer.decode([262, 262, 263])[len("a") :].lstrip("#")
