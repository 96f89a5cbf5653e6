"""Keeps special tokens that messages spell out as text, so that no message can end itself.

Hugging Face's `apply_chat_template` makes special tokens of them. Here each is replaced by a mark
before the template runs, so that it differs from the template's own special tokens. The rendered
text is then encoded as a whole, by a copy of the tokenizer that treats special tokens as text. The
copy has stand-ins for the template's special tokens, whose ids are replaced afterwards. So text
around a literal is tokenized as if no special token had that name.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.encoding import Encoder

# A template's input from the sender: texts in lists and mappings.
Given = dict[str, Any]

_INDEX_DIGITS = 4
# Keys that templates look for, as against those of tools' arguments and schemas.
_OWN_KEYS = frozenset(
    {"messages", "tools", "variables", "role", "content", "name", "tool_calls", "tool_call_id"}
    | {"id", "type", "function", "arguments", "description", "parameters"}
    | {"reasoning", "reasoning_content", "thinking"}
)


class Literals:
    """Finds and encodes special tokens that messages spell out.

    Args:
        backend: the model's tokenizer; copied, which takes as long as loading it.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        specials = {
            token_id: token
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._special = frozenset(specials)
        texts = [token.content for token in specials.values()]
        self._pattern = re.compile(_any_of(texts))
        # Some are looked for in a text once that is normalized: if that makes letters small,
        # `[CLS]` is a special token that `[cls]` spells, too.
        normalized = [token.content for token in specials.values() if token.normalized]
        self._normalizer = backend.normalizer if normalized else None
        if self._normalizer is not None:
            self._normalized = re.compile(_any_of(map(self._normalizer.normalize_str, normalized)))
        self._marks, self._stand_ins = _names(texts), _names(texts)
        self._literals = {mark: literal for literal, mark in self._marks.items()}
        self._mark_pattern = re.compile(_any_of(self._literals))
        self._copy = tokenizers.Tokenizer.from_str(backend.to_str())
        self._copy.encode_special_tokens = True  # that is, as text
        self._copy.add_tokens([self._stand_in(token) for token in specials.values()])
        self._encoder = Encoder(self._copy)
        self._ids = {
            self._copy.token_to_id(self._stand_ins[token.content]): token_id
            for token_id, token in specials.items()
        }

    def are_in(self, inputs: Given) -> bool:
        """Return whether any text spells out a special token, perhaps once it is normalized."""
        return any(
            self._pattern.search(text) or self._are_in_normalized(text) for text in _texts(inputs)
        )

    def _are_in_normalized(self, text: str) -> bool:
        if self._normalizer is None:
            return False
        try:
            return bool(self._normalized.search(self._normalizer.normalize_str(text)))
        except UnicodeEncodeError:  # a lone surrogate, which encoding the text refuses
            return False

    def encode(self, inputs: Given, render: Callable[[Given], str]) -> list[int]:
        """Return the token ids of a conversation in which literals are text.

        Args:
            inputs: messages, tools and the like, by name.
            render: by the template.

        Raises:
            InvalidRequestError: the template or the tokenizer cannot keep a literal as it is.
        """
        text = render(inputs)
        marked = render({key: self._with_marks(value) for key, value in inputs.items()})
        if self._with_literals(marked) != text:
            raise self._refusal("chat template", inputs)
        replaced, count = self._pattern.subn(lambda match: self._stand_ins[match[0]], marked)
        ids = self._encoder.encode(self._with_literals(replaced), add_special_tokens=False)
        # A vocabulary's own words may have a special token's name, or a stand-in be overlooked.
        if sum(token_id in self._ids for token_id in ids) != count or not self._special.isdisjoint(
            ids
        ):
            raise self._refusal("tokenizer", inputs)
        return [self._ids.get(token_id, token_id) for token_id in ids]

    def _with_marks(self, value: Any) -> Any:
        """Return a value with marks in all of its texts, keys included."""
        match value:
            case str():
                return self._pattern.sub(lambda match: self._marks[match[0]], value)
            case list() | tuple():
                marked = [self._with_marks(each) for each in value]
                return marked if isinstance(value, list) else tuple(marked)
            case Mapping():
                return {
                    key if key in _OWN_KEYS else self._with_marks(key): (
                        each if key == "role" else self._with_marks(each)
                    )
                    for key, each in value.items()
                }
        return value

    def _with_literals(self, text: str) -> str:
        return self._mark_pattern.sub(lambda match: self._literals[match[0]], text)

    def _stand_in(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        """Return a token that is cut out of a text as the special one is."""
        return tokenizers.AddedToken(
            self._stand_ins[token.content],
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=False,
        )

    def _refusal(self, what: str, inputs: Given) -> InvalidRequestError:
        spelled = self._pattern.findall("\n".join(_texts(inputs)))
        return InvalidRequestError(
            f"this model's {what} cannot keep {spelled[0]!r}, which a message spells out, as text: "
            "leave it out",
            param="messages",
        )


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts that the sender has written, keys included; a role is one of a few."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case list() | tuple() as items:
                waiting += items
            case Mapping() as items:
                waiting += (key for key in items if key not in _OWN_KEYS)
                waiting += (item for key, item in items.items() if key != "role")


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression of texts, of which the longest counts.

    What several begin with is in it once, so that looking for hundreds takes no longer than for
    one.
    """
    branches = [
        re.escape(first) + _any_of(text[1:] for text in group) if first else ""
        for first, group in itertools.groupby(sorted(texts, reverse=True), key=lambda t: t[:1])
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches) or '(?!)'})"


def _names(texts: Sequence[str]) -> dict[str, str]:
    """Return a name for each text that occurs nowhere: letters and digits, of equal length."""
    nonce = secrets.token_hex(16)
    return {text: f"{nonce}{index:0{_INDEX_DIGITS}x}" for index, text in enumerate(texts)}
