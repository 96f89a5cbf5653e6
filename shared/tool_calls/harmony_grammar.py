"""The grammar of an answer in messages with channels, for llguidance.

Before the answer there may be reasoning and, if there are tools, remarks in `commentary`. An answer
has at most one call: the model ends it with `<|call|>`, which is a stop token.
"""

from __future__ import annotations

import json
import re

from pagewire.shared.grammar.lark_rules import LarkRules
from pagewire.shared.tool_calls.argument_grammar import (
    json_rule,
    quoted,
    rule_of_arguments,
    schema_problems,
)
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.formats import TokenOf
from pagewire.shared.tool_calls.grammar import CallsWanted
from pagewire.shared.tool_calls.harmony import (
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RECIPIENT,
    START,
)
from pagewire.shared.tool_calls.reasoning import Begins

MAX_MESSAGES = 32  # messages before the answer

_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END)
_SPLIT = re.compile(f"({'|'.join(map(re.escape, _MARKERS))})")
_TEXT = "/(?s:.*)/"


def channels_grammar(wanted: CallsWanted, begins: Begins, token_of: TokenOf) -> str:
    """Return the grammar of an answer that may have calls.

    Args:
        wanted: the allowed calls; if a call is required, `final` is not allowed.
        begins: the kind of message that the prompt has opened, if any.
        token_of: returns a marker's token id; None if the marker is text.

    Raises:
        InvalidRequestError: no grammar can express a function's schema, or the grammar becomes too
            large with it.
    """
    rules = _Rules(token_of)
    rules.add_messages("analysis", "commentary")
    calls = " | ".join(
        rules.add_call(index, each, wanted.lenient) for index, each in enumerate(wanted.functions)
    )
    rules.add("call", calls)
    rules.add("TEXT", _TEXT)
    # If the prompt ends within `final`, the answer is text, unless a call is required.
    final = "TEXT" if begins == "answer" else f"messages ({rules.final()} TEXT | call)"
    start = "messages call" if wanted.must_call else final
    is_in_message = begins == "inside" or (begins == "answer" and wanted.must_call)
    return rules.text(f"rest {start}" if is_in_message else start)


def form_in_final(name: str, begins: Begins, token_of: TokenOf) -> str:
    """Return the grammar of an answer whose message in `final` follows another grammar.

    Args:
        name: name of the other grammar.
        begins: the kind of message that the prompt has opened, if any.
        token_of: returns a marker's token id; None if the marker is text.
    """
    rules = _Rules(token_of)
    rules.add_messages("analysis")
    start = f"messages {rules.final()} @{name}"
    return rules.text(f"rest {start}" if begins == "inside" else start)


class _Rules:
    """The rules of one grammar."""

    def __init__(self, token_of: TokenOf) -> None:
        self._token_of = token_of
        self._rules = LarkRules()

    def text(self, start: str) -> str:
        """Return the grammar."""
        return self._rules.text(start)

    def add(self, name: str, rule: str) -> None:
        """Add a rule."""
        self._rules[name] = rule

    def literal(self, text: str) -> str:
        """Return the expression of a text; markers in it that are tokens are written as tokens."""
        parts = [part for part in _SPLIT.split(text) if part]
        ids = {part: self._token_of(part) for part in parts if part in _MARKERS}
        return " ".join(
            json.dumps(part) if ids.get(part) is None else f"<[{ids[part]}]>" for part in parts
        )

    def add_messages(self, *channels: str) -> None:
        """Add `messages` (messages on these channels) and `rest` (of a message that has begun)."""
        end = self._token_of(END)
        begin_next = self.literal(f"{START}assistant")
        if end is None:
            self.add("until_end[lazy]", f"/(?s:.*){quoted(END)}/")
            self.add("rest", f"until_end {begin_next}")
        else:
            self.add("UNTIL_END", _TEXT)
            self.add("rest", f"UNTIL_END <[{end}]> {begin_next}")
        heads = " | ".join(self.literal(f"{CHANNEL}{each}{MESSAGE}") for each in channels)
        self.add("message", f"({heads}) rest")
        self.add("messages", f"message{{0,{MAX_MESSAGES}}}")

    def final(self) -> str:
        """Return the expression of the header of `final`."""
        return f"{self.literal(f'{CHANNEL}final')} {self._data_type()}"

    def add_call(self, index: int, function: Function, lenient: bool) -> str:
        """Add the rule of a function's arguments; return the expression of its call."""
        arguments = rule_of_arguments(index, function.name)
        with schema_problems(arguments):
            self.add(arguments, json_rule(function.schema, lenient))
        recipient = f" {RECIPIENT}{function.name}"
        # The recipient comes after the role or after the channel.
        heads = [f"{CHANNEL}commentary{recipient}", f"{recipient}{CHANNEL}commentary"]
        any_head = " | ".join(map(self.literal, heads))
        return f"({any_head}) {self._data_type()} {arguments}"

    def _data_type(self) -> str:
        """Return the expression of the end of a header, perhaps with a type."""
        whole = [MESSAGE, f" {CONSTRAIN}json{MESSAGE}", f"{CONSTRAIN}json{MESSAGE}"]
        return f"({' | '.join(map(self.literal, [*whole, f' json{MESSAGE}']))})"
