"""The grammar of an answer in messages with channels, for llguidance.

Before the answer there may be reasoning and, if there are tools, remarks in `commentary`. An answer
has at most one call: the model ends it with `<|call|>`, which is a stop token.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagewire.shared.grammar.lark_rules import LarkRules, literal, quoted
from pagewire.shared.text.markers import Markers
from pagewire.shared.tool_calls.argument_grammar import (
    json_rule,
    rule_of_arguments,
    schema_problems,
)
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.grammar import AllowedCalls
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

_TEXT = "/(?s:.*)/"


def channels_grammar(wanted: AllowedCalls, begins: Begins, tokens: Mapping[str, int]) -> str:
    """Return the grammar of an answer that may have calls.

    Args:
        wanted: the allowed calls; if a call is required, `final` is not allowed.
        begins: the kind of message that the prompt has opened, if any.
        tokens: ids of the markers that are tokens; others are text.

    Raises:
        InvalidRequestError: no grammar can express a function's schema, or the grammar becomes too
            large with it.
    """
    rules = _Rules(tokens)
    rules.add_messages("analysis", "commentary")
    calls = " | ".join(
        rules.add_call(index, function, wanted.lenient)
        for index, function in enumerate(wanted.functions)
    )
    rules["call"], rules["TEXT"] = calls, _TEXT
    # If the prompt ends within `final`, the answer is text, unless a call is required.
    final = "TEXT" if begins == "answer" else f"messages ({rules.final()} TEXT | call)"
    start = "messages call" if wanted.must_call else final
    is_in_message = begins == "inside" or (begins == "answer" and wanted.must_call)
    return rules.text(f"rest {start}" if is_in_message else start)


def form_in_final(name: str, begins: Begins, tokens: Mapping[str, int]) -> str:
    """Return the grammar of an answer whose message in `final` follows another grammar.

    Args:
        name: name of the other grammar.
        begins: the kind of message that the prompt has opened, if any.
        tokens: ids of the markers that are tokens; others are text.
    """
    rules = _Rules(tokens)
    rules.add_messages("analysis")
    start = f"messages {rules.final()} @{name}"
    return rules.text(f"rest {start}" if begins == "inside" else start)


class _Rules(LarkRules):
    """Collects the rules of the grammar for one request's answer."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        super().__init__()
        self._markers = Markers(tokens)

    def add_messages(self, *channels: str) -> None:
        """Add `messages` (messages on these channels) and `rest` (of a message that has begun)."""
        end = self._markers.ids.get(END)
        begin_next = self._literal(f"{START}assistant")
        if end is None:
            self["until_end[lazy]"] = f"/(?s:.*){quoted(END)}/"
            self["rest"] = f"until_end {begin_next}"
        else:
            self["UNTIL_END"] = _TEXT
            self["rest"] = f"UNTIL_END <[{end}]> {begin_next}"
        heads = " | ".join(self._literal(f"{CHANNEL}{channel}{MESSAGE}") for channel in channels)
        self["message"] = f"({heads}) rest"
        self["messages"] = f"message{{0,{MAX_MESSAGES}}}"

    def final(self) -> str:
        """Return the expression of the header of `final`."""
        return f"{self._literal(f'{CHANNEL}final')} {self._data_type()}"

    def add_call(self, index: int, function: Function, lenient: bool) -> str:
        """Add the rule of a function's arguments; return the expression of its call."""
        arguments = rule_of_arguments(index, function.name)
        with schema_problems(arguments):
            self[arguments] = json_rule(function.schema, lenient)
        recipient = f" {RECIPIENT}{function.name}"
        # The recipient comes after the role or after the channel.
        heads = [f"{CHANNEL}commentary{recipient}", f"{recipient}{CHANNEL}commentary"]
        any_head = " | ".join(map(self._literal, heads))
        return f"({any_head}) {self._data_type()} {arguments}"

    def _literal(self, text: str) -> str:
        return literal(text, self._markers)

    def _data_type(self) -> str:
        """Return the expression of the end of a header, perhaps with a type."""
        whole = [MESSAGE, f" {CONSTRAIN}json{MESSAGE}", f"{CONSTRAIN}json{MESSAGE}"]
        return f"({' | '.join(map(self._literal, [*whole, f' json{MESSAGE}']))})"
