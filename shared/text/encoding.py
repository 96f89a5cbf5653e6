"""Encodes texts with a tokenizer of the `tokenizers` library.

The library takes up to 400 bytes of memory for each byte of a text. So a long text is encoded in
parts, if it is certain that no token lies on both sides of the places between them.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Set
from functools import cached_property

import tokenizers

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.piece_table import settings_of

PART_CHARS = 1 << 15

# The places are before a space that follows another character of ASCII, and between a letter or
# digit and one of these marks. The apostrophe is none of them: some tokenizers have words such as
# `it's`.
_MARKS = frozenset("\t\n\r") | frozenset(string.punctuation) - {"'"}
# Expressions that divide a text into words, which are encoded one by one, and never have such a
# place in them: those of Llama 3, Qwen and gpt-oss. That of GPT-2 is a part of the library.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE, _SPACES = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS = r" ?[^\s\p{L}\p{N}]+"
_WORDS = {
    rf"{_CONTRACTION}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}[\r\n]*|{_SPACES}",
    rf"{_CONTRACTION}|{_BEFORE}\p{{L}}+|\p{{N}}|{_OTHERS}[\r\n]*|{_SPACES}",
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}|{_OTHERS}[\r\n/]*|{_SPACES}",
}


class Encoder:
    """Encodes texts with a tokenizer.

    Args:
        backend: the tokenizer, with all of its added tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._places = _places(backend)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any length.
            add_special_tokens: begin and end the text as the model wants it.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        if len(text) <= PART_CHARS or self._places is None:
            return self._encode(text, add_special_tokens)
        begin, end = self.special_ends if add_special_tokens else ([], [])
        ids = list(begin)
        for part in _parts(text, self._places):
            ids += self._encode(part, add_special_tokens=False)
        return ids + end

    @cached_property
    def special_ends(self) -> tuple[list[int], list[int]]:
        """The special tokens that begin and end a text."""
        plain, whole = (self._encode("a", special) for special in (False, True))
        starts = range(len(whole) - len(plain) + 1)
        at = next((i for i in starts if whole[i : i + len(plain)] == plain), 0)
        return whole[:at], whole[at + len(plain) :]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # Unlike `encode`, this lets other threads run meanwhile: a long text takes seconds.
            encodings = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as exc:  # JSON can carry one, and then the library sees no text.
            raise InvalidRequestError("the text is not valid Unicode: a lone surrogate") from exc
        ids: list[int] = encodings[0].ids
        return ids


def _parts(text: str, places: re.Pattern[str]) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        place = places.search(text, begin + PART_CHARS)
        end = len(text) if place is None else place.start()
        yield text[begin:end]
        begin = end


def _places_before(chars: Set[str]) -> re.Pattern[str]:
    """Return the places before a space and before marks, if they are among these characters."""
    marks = re.escape("".join(sorted(chars - {" "})))
    before_space = r"(?<=[!-~])(?= )" if " " in chars else "(?!)"
    before_mark = rf"(?<=[A-Za-z0-9])(?=[{marks}])" if marks else "(?!)"
    return re.compile(f"{before_space}|{before_mark}")


def _places(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Return the places that cut no added token, nor spaces off it; None if there are none."""
    if not _divides(backend):
        return None
    chars = {" ", *_MARKS}
    every_place = _places_before(chars)
    for token in backend.get_added_tokens_decoder().values():
        if token.single_word:  # only a token if no letter is next to it
            return None
        chars -= {token.content[place.start()] for place in every_place.finditer(token.content)}
        chars -= set(string.whitespace if token.rstrip else "")
    return _places_before(chars)


def _divides(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer divides each text at all of the places, whatever is around them."""
    normalizer, pre_tokenizer = map(settings_of, (backend.normalizer, backend.pre_tokenizer))
    if normalizer.get("type", "NFC") != "NFC":
        return False
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    divides = False
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": by_regex}:
                divides |= by_regex
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
                divides |= pattern in _WORDS and not step["invert"]
            case {"type": "Digits"}:
                pass
            case _:
                return False
    return divides
