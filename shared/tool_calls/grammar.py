"""The grammar of an answer with tool calls, in llguidance's dialect of Lark.

- A required or named call: only calls, after the reasoning if the model writes any.
- `auto` with a form (structured output): the form or calls, after the reasoning.
- `auto`: free text, or text and then calls. A call that has begun is of one of the request's
  functions, and its arguments follow the schema. Text that only begins like a call is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from pagewire.shared.grammar.lark_rules import LarkRules
from pagewire.shared.tool_calls.argument_grammar import (
    Keywords,
    Parameters,
    json_rule,
    quoted,
    regex,
    rule_of_arguments,
    schema_problems,
)
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.formats import ID_PLACE, TokenOf, ToolFormat
from pagewire.shared.tool_calls.reasoning import Begins, ReasoningFormat
from pagewire.shared.tool_calls.xml_calls import FUNCTION, FUNCTION_END

MAX_CALLS = 32  # in one answer, so that a model that repeats itself ends

_ANY_OBJECT = {"type": "object"}


class CallsWanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls an answer may have.

    Attributes:
        functions: functions that may be called.
        must_call: only calls are allowed; otherwise the model chooses.
        only_one: at most one call.
        is_named: the request names the function.
        lenient: parts of a function's schema that no grammar can express are ignored.
    """

    functions: tuple[Function, ...]
    must_call: bool
    only_one: bool
    is_named: bool = False
    lenient: bool = False


def tools_grammar(
    form: ToolFormat,
    wanted: CallsWanted,
    reasoning: ReasoningFormat | None,
    begins: Begins,
    token_of: TokenOf,
    content: str = "",
) -> str:
    """Return the grammar of an answer.

    Args:
        form: how the model writes calls.
        wanted: the calls that the answer may have.
        reasoning: how the model writes reasoning; None if it does not.
        begins: whether the prompt has opened the reasoning.
        token_of: returns a marker's token id; None if the marker is text.
        content: expression of an answer without calls; if empty, any text is allowed, with or
            without calls after it.

    Raises:
        InvalidRequestError: no grammar can express a function's schema, or the grammar becomes too
            large with it.
    """
    return _Grammar(form, wanted, reasoning, begins, token_of).text(content)


class _Grammar:
    """The rules of one grammar."""

    def __init__(
        self,
        form: ToolFormat,
        wanted: CallsWanted,
        reasoning: ReasoningFormat | None,
        begins: Begins,
        token_of: TokenOf,
    ) -> None:
        self._form, self._wanted, self._token_of = form, wanted, token_of
        self._reasoning, self._begins = reasoning, begins
        markers = {*form.markers, *(reasoning.markers if reasoning is not None else ())}
        self._tokens = {text: token for text in markers if (token := token_of(text)) is not None}
        places = {text: f"<[{token}]>" for text, token in self._tokens.items()}
        self._places = {**places, ID_PLACE: "CALL_NUMBER"}
        self._markers = re.compile(f"({'|'.join(map(re.escape, self._places))})")
        self._rules = LarkRules()

    def text(self, content: str) -> str:
        """Return the grammar."""
        before = self._add_reasoning()
        # Such a call is content: it is neither a required call nor a form.
        no_call = "" if self._wanted.must_call or content else self._form.no_call
        calls = self._add_calls(no_call)
        if self._wanted.must_call:
            start = f"{before} {calls}"
        elif content:
            start = f"{before} ({content} | {calls})"
        else:
            start = f"{before} ({self._add_text()} | {self._add_triggered()})"
        return self._rules.text(start)

    def _literal(self, text: str) -> str:
        """Return the expression of a text; markers in it that are tokens are written as tokens."""
        parts = [part for part in self._markers.split(text) if part]
        return " ".join(
            self._places.get(part) or json.dumps(part, ensure_ascii=False) for part in parts
        )

    def _until(self, name: str, marker: str, excluded: Sequence[str] = ()) -> str:
        """Return the expression of any text up to a marker, and the marker.

        Args:
            name: name of the rule.
            marker: the marker as in the format.
            excluded: texts that the text must not begin with.
        """
        core = marker.strip()
        rest = self._literal(marker[marker.index(core) + len(core) :])
        if (token := self._token_of(core)) is not None:
            self._rules[name.upper()] = _text("", excluded)
            return f"{name.upper()} <[{token}]> {rest}".strip()
        self._rules[f"{name}[lazy]"] = _text(quoted(core), excluded)
        return f"{name} {rest}".strip()

    def _add_reasoning(self) -> str:
        form = self._reasoning
        if form is None:
            return ""
        rest = self._until("reasoning_end", form.close)
        opened = self._literal(form.open)
        self._rules["LINE_BREAKS"] = regex(r"\n{1,8}")
        if self._begins == "inside":
            return f"{rest} LINE_BREAKS?"
        self._rules["reasoning"] = f"{opened} {rest} LINE_BREAKS?"
        return "reasoning?"

    def _add_calls(self, no_call: str) -> str:
        """Add the rules of calls; return the name of the rule of all calls."""
        form, functions = self._form, self._wanted.functions
        if no_call:
            functions += (Function(no_call),)
        if ID_PLACE in form.shape:
            self._rules["CALL_NUMBER"] = regex("[0-9]{1,3}")
        self._rules["call"] = " | ".join(
            self._add_function(index, each) for index, each in enumerate(functions)
        )
        marker, close = self._literal(form.open), self._literal(form.close)
        separator = self._literal(form.separator)
        if form.is_list:
            more = self._repeated(f"{separator} call")
            self._rules["listed"] = f"{self._literal(form.begin)} call {more} {self._end()}"
            self._rules["calls"] = f"{self._may_open()} {marker} listed"
        else:
            self._rules["closed"] = f"call {close}"
            more = self._repeated(f"{separator} {marker} closed")
            self._rules["calls"] = f"{marker} closed {more}"
        return "calls"

    def _may_open(self) -> str:
        """Return the expression of `may_open`; empty if the tokenizer lacks this token."""
        marker = self._form.may_open
        return f"{self._literal(marker)}?" if marker and self._token_of(marker) is not None else ""

    def _end(self) -> str:
        return self._literal(self._form.end + self._form.close)

    def _repeated(self, more: str) -> str:
        return "" if self._wanted.only_one else f"({more}){{0,{MAX_CALLS - 1}}}"

    def _add_triggered(self) -> str:
        """Add the rules of text and calls after it; return their expression."""
        form = self._form
        if not form.open:
            # One terminal: otherwise the bracket alone would already be text.
            first = " | ".join(
                f"{self._literal(form.begin + self._head(each))} body_{index}"
                for index, each in enumerate(self._wanted.functions)
            )
            more = self._repeated(f"{self._literal(form.separator)} call")
            return f"{self._may_open()} ({first}) {more} {self._end()}"
        trigger = self._add_trigger()
        if form.is_list:
            return f"{trigger} listed"
        more = self._repeated(f"{self._literal(form.separator)} {self._literal(form.open)} closed")
        return f"{trigger} closed {more}"

    def _add_trigger(self) -> str:
        """Add the rules of text up to a call; return their expression."""
        excluded, form = self._reasoning_open(), self._form
        trigger = self._until("call_begin", form.open, excluded)
        if not form.other_opens:
            return trigger
        others = [
            self._until(f"other_begin_{index}", each, excluded)
            for index, each in enumerate(form.other_opens)
        ]
        return f"({' | '.join([trigger, *others])})"

    def _reasoning_open(self) -> list[str]:
        """Return the tag that begins reasoning, if plain text could also begin with it."""
        form = self._reasoning
        if form is None or self._begins == "inside" or self._token_of(form.open) is not None:
            return []
        return [form.open]

    def _add_text(self) -> str:
        """Add the rule of an answer that is only text; return its expression."""
        excluded = self._reasoning_open()
        if not self._form.open:
            functions = self._wanted.functions
            excluded += [self._form.begin + self._head(function) for function in functions]
            if self._reasoning is not None:
                excluded.append("\n")  # else line breaks before a call would begin a text
        self._rules["TEXT"] = _text("", excluded)
        form = self._reasoning
        tags = (form.answer_open, form.answer_close) if form is not None else ()
        if not any(tag in self._tokens for tag in tags):  # else `TEXT` matches the tags as well
            return "TEXT"
        before, after = ((f"{self._literal(tag)}?") for tag in tags)
        return f"{before} TEXT {after}"

    def _head(self, function: Function) -> str:
        name, before = function.name, self._form.before
        if self._form.kind == "xml":
            return f"{before}{FUNCTION}{name}>\n"
        if self._form.kind == "object":
            return before + self._form.head(name)
        return f"{before}{name}(" if self._form.kind == "python" else before + name

    def _add_function(self, index: int, function: Function) -> str:
        """Add the rules of a function's arguments; return the expression of its call."""
        with schema_problems(rule_of_arguments(index, function.name)):
            arguments, end = self._add_arguments(index, function)
            before, after = map(self._literal, (self._form.mark, end + self._form.after))
            parts = (before, arguments, after)
            self._rules[f"body_{index}"] = " ".join(part for part in parts if part)
        return f"{self._literal(self._head(function))} body_{index}"

    def _add_arguments(self, index: int, function: Function) -> tuple[str, str]:
        """Add the rules of a function's arguments; return their expression and the text after."""
        prefix, form = f"body_{index}", self._form
        schema, lenient = function.schema, self._wanted.lenient
        if form.kind == "python":
            keywords = Keywords(prefix, schema, self._rules, form.python_constants, lenient)
            return keywords.add(), ")"
        if form.kind == "xml":
            return Parameters(prefix, schema, self._rules, lenient).add(), FUNCTION_END
        arguments = rule_of_arguments(index, function.name)
        self._rules[arguments] = json_rule(schema, lenient)
        return arguments, form.tail if form.kind == "object" else ""


def _text(end: str, excluded: Sequence[str]) -> str:
    """Return a regular expression of any text that has this end and no excluded beginning.

    Spaces before an excluded text are ignored, as the parser does.
    """
    text = regex(f"(?s:.*){end}")
    if not excluded:
        return text
    any_of = "|".join(map(quoted, excluded))
    wrong = regex(r"[ \t\r\n]*" + f"(?:{any_of})(?s:.*)")
    return f"{text} & ~{wrong}"


def any_arguments(functions: Sequence[Function]) -> tuple[Function, ...]:
    """Return the functions with any object as arguments: for schemas no grammar can express."""
    return tuple(
        msgspec.structs.replace(function, parameters=_ANY_OBJECT) for function in functions
    )
