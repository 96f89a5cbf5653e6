"""Long texts are encoded in parts: the tokens are those of the whole text."""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text import encoding
from pagewire.shared.text.encoding import Encoder

_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_APART = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern: str) -> dict[str, Any]:
    """Return how Llama 3 and later models divide texts, as in tokenizer.json."""
    by = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [by, BYTES]}


def token(content: str, **flags: bool) -> dict[str, Any]:
    """Return an added token as in tokenizer.json."""
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 0, "content": content, **off, **flags}


DIVIDED: dict[str, dict[str, Any]] = {
    "gpt-2": {},
    "llama": {"pre_tokenizer": split(rf"{_APART}|\p{{N}}{{1,3}}|{_ENDS}")},
    "qwen": {"pre_tokenizer": split(rf"{_APART}|\p{{N}}|{_ENDS}"), "normalizer": {"type": "NFC"}},
    "gpt-oss": {"pre_tokenizer": split(GPT_OSS)},
    "digits": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True},
            ],
        }
    },
}  # fmt: skip
ADDED: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "marks": [token("a,b"), token("x<y"), token("<|end|>", special=True)],
    "spaces": [token("a b"), token("<|end|>", rstrip=True, lstrip=True)],
    "words": [token("ab", single_word=True), token("abc", rstrip=True)],
}
WHOLE: dict[str, dict[str, Any]] = {
    "another expression": {"pre_tokenizer": split(r"\p{L}+\s?|\p{N}+|[^\p{L}\p{N}]+")},
    "spaces before": {"pre_tokenizer": BYTES | {"add_prefix_space": True, "use_regex": True}},
    "no division": {"pre_tokenizer": BYTES},
    "no pieces": {"pre_tokenizer": None},
    "another normalizer": {"normalizer": {"type": "Replace", "pattern": {"String": " "},
                                          "content": "a "}},
}  # fmt: skip


def backend(changes: dict[str, Any], added: list[dict[str, Any]]) -> tokenizers.Tokenizer:
    """Return the demo's tokenizer with other parts."""
    content = json.loads((demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"))
    known = {each["content"] for each in added}
    content["added_tokens"] = [
        each for each in content["added_tokens"] if each["content"] not in known
    ] + [each | {"id": 2048 + index} for index, each in enumerate(added)]
    return tokenizers.Tokenizer.from_str(json.dumps(content | changes))


BACKENDS = {
    f"{name}, {more}": backend(changes, added)
    for name, changes in (DIVIDED | WHOLE).items()
    for more, added in ADDED.items()
}
ENCODERS = {name: Encoder(each) for name, each in BACKENDS.items()}
ALPHABET = "abAx1 \t\n\r,'\"<|>/.-\u00e9\u0301\u4e00\u00a0\U0001f600"
TEXTS = st.text(st.sampled_from(ALPHABET), max_size=60) | st.text(max_size=40)
WORDS = ["it's ", "a,b", "a b", "x<y", "<|end|>  ", "ab", "abc ", "12345", " \n\n", '"a": 1, ', "é"]


class Recording:
    """A tokenizer that keeps the texts that it has encoded."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.texts: list[str] = []
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> list[tokenizers.Encoding]:
        self.texts += texts
        return self._inner.encode_batch_fast(texts, **options)


@pytest.fixture
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PART_CHARS", 1)


@pytest.mark.usefixtures("_short_parts")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("special", [True, False])
def test_parts_have_the_tokens_of_the_whole(name: str, special: bool) -> None:
    choose = random.Random(name)
    texts = ["".join(choose.choices([*WORDS, *ALPHABET], k=30)) for _ in range(60)]
    for text in texts:
        (whole,) = BACKENDS[name].encode_batch_fast([text], add_special_tokens=special)
        assert ENCODERS[name].encode(text, special) == whole.ids, text


@pytest.mark.parametrize("name", [f"{each}, none" for each in DIVIDED])
def test_any_text_has_the_tokens_of_the_whole(name: str) -> None:
    @given(TEXTS)
    def check(text: str) -> None:
        (whole,) = BACKENDS[name].encode_batch_fast([text], add_special_tokens=True)
        assert ENCODERS[name].encode(text, add_special_tokens=True) == whole.ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "PART_CHARS", 1)
        check()


def parts(name: str, text: str) -> list[str]:
    recorded: Any = Recording(BACKENDS[name])
    Encoder(recorded).encode(text, add_special_tokens=False)
    return recorded.texts


@pytest.mark.usefixtures("_short_parts")
@pytest.mark.parametrize("name", DIVIDED)
def test_parts_begin_where_the_tokenizer_divides(name: str) -> None:
    """Whatever its vocabulary: that of these tests has few tokens with several kinds of letters."""
    choose, pre_tokenizer = random.Random(name), BACKENDS[f"{name}, none"].pre_tokenizer
    for _ in range(300):
        text = unicodedata.normalize("NFC", "".join(choose.choices([*WORDS, *ALPHABET], k=30)))
        ends = {end for _, (_, end) in pre_tokenizer.pre_tokenize_str(text)}
        found = itertools.accumulate(map(len, parts(f"{name}, none", text)))
        assert ends.issuperset(found), text


@pytest.mark.usefixtures("_short_parts")
def test_a_text_is_divided_where_that_is_certain() -> None:
    text = "it's one, a,b <|end|> more."
    for name in DIVIDED:
        assert len(parts(f"{name}, none", text)) > 3
    for name in WHOLE:
        assert parts(f"{name}, none", text) == [text]
    assert parts("llama, words", text) == [text]


def test_a_lone_surrogate_is_refused_in_any_part() -> None:
    long = "word " * encoding.PART_CHARS
    for text in ("\ud800", f"{long}\ud800", f"\ud800 {long}"):
        with pytest.raises(InvalidRequestError, match="a lone surrogate"):
            ENCODERS["llama, none"].encode(text, add_special_tokens=False)
