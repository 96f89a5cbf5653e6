"""The grammar of an answer with tool calls, in llguidance's dialect of Lark.

- A required or named call: only calls, after the reasoning if the model writes any.
- `auto` with a form (structured output): the form or calls, after the reasoning.
- `auto`: free text, or text and then calls. A call that has begun is of one of the request's
  functions, and its arguments follow the schema. Text that only begins like a call is text. So the
  grammar knows all calls that the parser finds, those without the text before them included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pagewire.shared.grammar.lark_rules import LarkRules, literal, one_of, quoted, regex
from pagewire.shared.text.markers import Markers
from pagewire.shared.tool_calls.argument_grammar import (
    add_keywords,
    json_rule,
    rule_of_arguments,
    schema_problems,
)
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.formats import ARGUMENT_KEYS, ID_PLACE, ToolFormat
from pagewire.shared.tool_calls.reasoning import Begins, ReasoningFormat
from pagewire.shared.tool_calls.xml_calls import FUNCTION, FUNCTION_END
from pagewire.shared.tool_calls.xml_grammar import XmlParameterRules

MAX_CALLS = 32  # in one answer, so that a model that repeats itself ends

_ANY_OBJECT = {"type": "object"}
_SPACES, _SOME_SPACES = r"[ \t\r\n]*", r"[ \t\r\n]{0,16}"
_PARTS = re.compile(r"\s+|[{\[:,]|[^\s{\[:,]+")
_COLON, _PLAIN = rf"{_SPACES}:{_SPACES}", r"[^\[\]{}]*"
# Beginnings of what parsers take for calls, in any order of keys and with any spaces.
_CALLS = {
    "object": (
        rf'\{{{_PLAIN}("function"{_COLON}\{{{_PLAIN}|"(arguments|parameters)"{_COLON}\{{(?s:.*))?'
        rf'"(name|function|tool_name)"{_COLON}"(<names>)"'
    ),
    "python": rf"(<names>){_SPACES}\(",
}


class AllowedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that an answer may have.

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
    wanted: AllowedCalls,
    reasoning: ReasoningFormat | None,
    begins: Begins,
    tokens: Mapping[str, int],
    content: str = "",
) -> str:
    """Return the grammar of an answer.

    Args:
        form: how the model writes calls.
        wanted: the calls that the answer may have.
        reasoning: how the model writes reasoning; None if it does not.
        begins: whether the prompt has opened the reasoning.
        tokens: ids of the markers that are tokens; others are text.
        content: expression of an answer without calls; if empty, any text is allowed, with or
            without calls after it.

    Raises:
        InvalidRequestError: no grammar can express a function's schema, or the grammar becomes too
            large with it.
    """
    return _Grammar(form, wanted, reasoning, begins, Markers(tokens)).text(content)


@dataclass(slots=True)
class _Grammar:
    """Collects the rules of the grammar for one request's answer."""

    form: ToolFormat
    wanted: AllowedCalls
    reasoning: ReasoningFormat | None
    begins: Begins
    markers: Markers
    rules: LarkRules = field(default_factory=LarkRules)

    def text(self, content: str) -> str:
        """Return the grammar's text; `content` is the form that content must have."""
        before = ""
        if self.reasoning is not None:
            before = add_reasoning(self.rules, self.reasoning, self.begins, self.markers)
            before += "" if self.begins == "inside" else "?"
        # Such a call is content: it is neither a required call nor a form.
        no_call = "" if self.wanted.must_call or content else self.form.no_call
        calls = self._add_calls(no_call)
        if self.wanted.must_call:
            start = f"{before} {calls}"
        elif content:
            start = f"{before} ({content} | {calls})"
        else:
            start = f"{before} ({self._add_text()} | {self._add_triggered()})"
        # A model may write the end of a tag and the text after it as one token.
        return self.rules.text(start, forces=False)

    def _literal(self, text: str) -> str:
        """Return the expression of a text; the place of a call's number stands for digits."""
        parts = (literal(part, self.markers) for part in text.split(ID_PLACE))
        return " CALL_NUMBER ".join(parts)

    def _add_calls(self, no_call: str) -> str:
        """Add the rules of calls; return the name of the rule of all calls."""
        form, functions = self.form, self.wanted.functions
        if no_call:
            functions += (Function(no_call),)
        if ID_PLACE in form.shape:
            self.rules["CALL_NUMBER"] = regex("[0-9]{1,3}")
        self.rules["call"] = " | ".join(
            self._add_function(index, function) for index, function in enumerate(functions)
        )
        marker, close = self._literal(form.open), self._literal(form.close)
        separator = self._literal(form.separator)
        if form.is_list:
            more = self._repeated(f"{separator} call")
            self.rules["listed"] = f"{self._literal(form.begin)} call {more} {self._end()}"
            self.rules["calls"] = f"{self._may_open()} {marker} listed"
        else:
            self.rules["closed"] = f"call {close}"
            more = self._repeated(f"{separator} {marker} closed")
            self.rules["calls"] = f"{marker} closed {more}"
        return "calls"

    def _may_open(self) -> str:
        """Return the expression of `may_open`; empty if the tokenizer lacks this token."""
        marker = self.form.may_open
        return f"{self._literal(marker)}?" if marker in self.markers.ids else ""

    def _end(self) -> str:
        return self._literal(self.form.end + self.form.close)

    def _repeated(self, more: str) -> str:
        return "" if self.wanted.only_one else f"({more}){{0,{MAX_CALLS - 1}}}"

    def _add_triggered(self) -> str:
        """Add the rules of text and calls after it; return their expression."""
        form = self.form
        if not form.open:
            return f"{self._may_open()} {self._unopened()} {self._end()}"
        trigger = self._add_trigger()
        if form.is_list:
            alternatives = [f"{trigger} listed"]
            rest = f"{self._literal(form.end)} ({self._literal(form.close)})?"
        else:
            # One text: otherwise the separator might be the beginning of `close`.
            closed = f"{self._literal(form.separator + form.open)} closed"
            rest = f"({self._literal(form.close)})? {self._repeated(closed)}"
            alternatives = [f"{trigger} closed {self._repeated(closed)}"]
        if form.unopened:
            alternatives.append(f"{self._unopened_later()} {rest}")
        return one_of(alternatives)

    def _unopened(self) -> str:
        """Return the expression of calls with which an answer begins."""
        first = " | ".join(
            f"{self._first_head(function.name)} body_{index}"
            for index, function in enumerate(self.wanted.functions)
        )
        return f"({first}) {self._more_listed()}"

    def _more_listed(self) -> str:
        form = self.form
        return self._repeated(f"{self._literal(form.separator)} call") if form.is_list else ""

    def _unopened_later(self) -> str:
        """Return the expression of text and calls that begin with the format's `unopened`."""
        begin, expressions = self.form.unopened, []
        is_marker = self.form.kind != "xml"
        for index, function in enumerate(self.wanted.functions):
            head = self._head(function)
            if is_marker:
                start = self._literal(head.removeprefix(begin))
            else:  # with another name, or without the line's end, it may be text
                start = f"unopened_{index}"
                self.rules[f"{start}[lazy]"] = _text(quoted(head), self._not_text())
            expressions.append(f"{start} body_{index}")
        first = self._until("unopened", begin) if is_marker else ""
        return f"{first} ({' | '.join(expressions)}) {self._more_listed()}"

    def _first_head(self, name: str) -> str:
        """Return the expression of the beginning of a call with which an answer begins.

        It is one terminal with any spaces: a text that begins like the call must not fit better.
        """
        form = self.form
        if form.kind == "python":
            return regex(f"{_loose(form.begin)}{quoted(name)}{_SOME_SPACES}\\(")
        before, after = form.shape.partition("<arguments>")[0].split("<name>")
        for key in ARGUMENT_KEYS:
            after = after.replace(f'"{key}"', "<key>")
        pattern = f"{_loose(form.begin + before)}{quoted(name)}{_loose(after)}"
        pattern = pattern.replace("<key>", f'"({"|".join(ARGUMENT_KEYS)})"')
        return regex(pattern.replace(ID_PLACE, "[0-9]{1,3}"))

    def _add_trigger(self) -> str:
        """Add the rules of text up to a call; return their expression."""
        triggers = [self._until("call_begin", self.form.open)]
        for index, opening in enumerate(self.form.other_opens):
            triggers.append(self._until(f"other_begin_{index}", opening))
        return one_of(triggers)

    def _until(self, name: str, marker: str) -> str:
        """Add the rule of text up to a marker; return the expression of both."""
        return _add_until(self.rules, self.markers, name, marker, self._not_text())

    def _not_text(self) -> list[str]:
        """Return patterns of beginnings with which an answer is not text."""
        texts, form, begin = [], self.reasoning, self.form.begin
        if form is not None and self.begins != "inside" and form.open not in self.markers.ids:
            texts.append(quoted(form.open))
        if not self.form.open:
            names = "|".join(quoted(function.name) for function in self.wanted.functions)
            before = f"{quoted(begin.strip())}{_SPACES}" if begin else ""
            call = _CALLS[self.form.kind].replace("<names>", names)
            texts.append(f"{before}{call}")
        return texts

    def _add_text(self) -> str:
        """Add the rule of an answer that is only text; return its expression."""
        excluded = self._not_text()
        if not self.form.open and self.reasoning is not None:
            excluded.append(quoted("\n"))  # else line breaks before a call would begin a text
        self.rules["TEXT"] = _text("", excluded)
        form = self.reasoning
        tags = (form.answer_open, form.answer_close) if form is not None else ()
        # A tag that is not a token of its own is matched by `TEXT` as well.
        if not any(tag in self.markers.ids for tag in tags):
            return "TEXT"
        before, after = ((f"{self._literal(tag)}?") for tag in tags)
        return f"{before} TEXT {after}"

    def _head(self, function: Function) -> str:
        name, before = function.name, self.form.before
        if self.form.kind == "xml":
            return f"{before}{FUNCTION}{name}>\n"
        if self.form.kind == "object":
            return before + self.form.head(name)
        return f"{before}{name}(" if self.form.kind == "python" else before + name

    def _add_function(self, index: int, function: Function) -> str:
        """Add the rules of a function's arguments; return the expression of its call."""
        with schema_problems(rule_of_arguments(index, function.name)):
            arguments, end = self._add_arguments(index, function)
            before, after = map(self._literal, (self.form.mark, end + self.form.after))
            parts = (before, arguments, after)
            self.rules[f"body_{index}"] = " ".join(part for part in parts if part)
        return f"{self._literal(self._head(function))} body_{index}"

    def _add_arguments(self, index: int, function: Function) -> tuple[str, str]:
        """Add the rules of a function's arguments; return their expression and the text after."""
        prefix, form = f"body_{index}", self.form
        schema, lenient = function.schema, self.wanted.lenient
        if form.kind == "python":
            constants = form.python_constants
            return add_keywords(prefix, schema, self.rules, constants, lenient), ")"
        if form.kind == "xml":
            return XmlParameterRules(prefix, schema, self.rules, lenient).add(), FUNCTION_END
        arguments = rule_of_arguments(index, function.name)
        self.rules[arguments] = json_rule(schema, lenient)
        return arguments, form.tail if form.kind == "object" else ""


def _loose(text: str) -> str:
    """Return the pattern of a part of JSON with any spaces between its parts."""
    parts = [part for part in _PARTS.findall(text) if not part.isspace()]
    return "".join(quoted(part) + (_SOME_SPACES if part in "{[:," else "") for part in parts)


def add_reasoning(rules: LarkRules, form: ReasoningFormat, begins: Begins, markers: Markers) -> str:
    """Add the rules of reasoning and the line breaks after it; return their expression.

    Args:
        rules: the grammar's rules.
        form: how the model writes reasoning.
        begins: whether the prompt has opened it.
        markers: the markers that are tokens.
    """
    rules["LINE_BREAKS"] = regex(r"\n{1,8}")
    rest = f"{_add_until(rules, markers, 'reasoning_end', form.close)} LINE_BREAKS?"
    if begins == "inside":
        return rest
    rules["reasoning"] = f"{literal(form.open, markers)} {rest}"
    return "reasoning"


def _add_until(
    rules: LarkRules, markers: Markers, name: str, marker: str, excluded: Sequence[str] = ()
) -> str:
    """Add the rule of any text up to a marker; return the expression of both.

    Args:
        rules: the grammar's rules.
        markers: the markers that are tokens.
        name: name of the rule.
        marker: the marker as in the format.
        excluded: patterns that the text must not begin with.
    """
    core = marker.strip()
    rest = literal(marker[marker.index(core) + len(core) :], markers)
    if (token := markers.ids.get(core)) is not None:
        rules[name.upper()] = _text("", excluded)
        return f"{name.upper()} <[{token}]> {rest}".strip()
    rules[f"{name}[lazy]"] = _text(quoted(core), excluded)
    return f"{name} {rest}".strip()


def _text(end: str, excluded: Sequence[str]) -> str:
    """Return a regular expression of any text that has this end and no excluded beginning.

    Spaces before an excluded text are ignored, as the parser does.
    """
    text = regex(f"(?s:.*){end}")
    if not excluded:
        return text
    wrong = regex(f"{_SPACES}(?:{'|'.join(excluded)})(?s:.*)")
    return f"{text} & ~{wrong}"


def any_arguments(functions: Sequence[Function]) -> tuple[Function, ...]:
    """Return the functions with any object as arguments: for schemas no grammar can express."""
    return tuple(
        msgspec.structs.replace(function, parameters=_ANY_OBJECT) for function in functions
    )
