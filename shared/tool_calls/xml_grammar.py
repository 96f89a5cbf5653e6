"""Grammar rules of arguments that are XML-like elements, as `xml_calls.py` reads them."""

from __future__ import annotations

import re
from typing import Any

from pagewire.shared.grammar.lark_rules import LarkRules, json_text, other_name, quoted, regex
from pagewire.shared.grammar.regex_texts import ASCII
from pagewire.shared.grammar.schema_fit import ANNOTATIONS
from pagewire.shared.tool_calls.argument_grammar import MAX_ARGUMENTS, named
from pagewire.shared.tool_calls.argument_shapes import shape_of
from pagewire.shared.tool_calls.value_schemas import ValueSchemas
from pagewire.shared.tool_calls.written_values import SchemaValues, TextRule
from pagewire.shared.tool_calls.xml_calls import PARAMETER, PARAMETER_END

_PATTERN_PARTS = re.compile(r"\\.|.", re.DOTALL)
# Parts of patterns that are written in another way: those that Lark escapes, and classes that have
# only ASCII characters, as in ECMAScript and in JSON here. Rust's have those of all of Unicode.
_WRITTEN = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_WRITTEN |= {each: ASCII[each] for each in (r"\d", r"\D", r"\w", r"\W")}
_NAME = re.compile(r"[^<>\s]{1,256}")
_VALUE_END = f"\n{PARAMETER_END}\n"
_ANY_TEXT = TextRule()


class XmlParameterRules:
    """The rules of arguments in elements, made from the schema of an object.

    Properties come in the schema's order, then any others that it allows. Each value that is
    allowed follows the schema as it is read; it need not be the only way to write it.

    Args:
        prefix: prefix of the rules' names.
        schema: schema of the object.
        rules: the grammar's rules, to which these are added.
        lenient: see `json_rule` and `shape_of`; keywords that no grammar of texts can express are
            ignored.
    """

    def __init__(
        self, prefix: str, schema: dict[str, Any], rules: LarkRules, lenient: bool = False
    ) -> None:
        self._prefix, self._rules, self._lenient = prefix, rules, lenient
        # Expressions of texts, by the ids of their rules, which the values keep.
        self._texts: dict[tuple[int, str], str] = {}
        self._known: dict[int, str] = {}  # expressions of values, by the ids of their schemas
        self._shape = shape_of(schema, lenient)
        self._values = SchemaValues(schema)
        self._schemas = ValueSchemas(schema, rules, lenient)

    def add(self) -> str:
        """Add the rules; return the expression of the elements, which may match no element."""
        shape, parts = self._shape, []
        names = named(shape, _NAME, self._lenient)
        for index, name in enumerate(names):
            rule = f"{self._prefix}_p{index}"
            value = self._value(shape.properties[name], f"{self._prefix}_v{index}")
            self._rules[rule] = f"{json_text(f'{PARAMETER}{name}>' + chr(10))} {value}"
            parts.append(rule if name in shape.required else f"{rule}?")
        if shape.others is not False:
            tags = [PARAMETER + each for each in (*names, *sorted(shape.excluded))]
            name = other_name(rf"{quoted(PARAMETER)}[^<>\s]{{1,64}}", ">\n", tags)
            rule = self._rules.add_shared(f"{self._prefix}_OTHER".upper(), name)
            value = self._value(shape.others, f"{self._prefix}_other_value")
            parts.append(f"({rule} {value}){{0,{MAX_ARGUMENTS}}}")
        return " ".join(parts)

    def _value(self, schema: Any, rule: str) -> str:
        """Add the rules of a value; return the expression of the value and its end tag."""
        if id(schema) not in self._known:  # the shape keeps the schema
            self._known[id(schema)] = self._new_value(schema, rule)
        return self._known[id(schema)]

    def _new_value(self, schema: Any, rule: str) -> str:
        if not isinstance(schema, dict) or schema.keys() <= ANNOTATIONS:
            return self._text(_ANY_TEXT, "", rule)
        values = self._values.of(schema)
        containers = values.others & {"array", "object"} if values.any_text else frozenset()
        first = ("[" if "array" in containers else "") + ("{" if "object" in containers else "")
        parts = [
            self._text(text, first, f"{rule}_{index}" if index else rule)
            for index, text in enumerate(values.texts)
            if _can_be_written(text)
        ]
        if values.any_text and "null" in values.others and _ANY_TEXT not in values.texts:
            parts.append(json_text(f"null{_VALUE_END}"))
        if others := containers if values.any_text else values.others:
            allowed = {"allOf": [schema, {"type": sorted(others)}]} if values.texts else schema
            parts.append(f"{self._schemas.add(f'{rule}_json', allowed)} {json_text(_VALUE_END)}")
        if not parts:
            raise ValueError("it has an argument for which no value can be written")
        return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"

    def _text(self, text: TextRule, not_first: str, rule: str) -> str:
        """Add the rule of texts; return the expression of a text and its end tag.

        Args:
            text: the texts that the rule allows.
            not_first: characters of JSON with which they cannot begin.
            rule: name of the rule.
        """
        key = id(text), not_first
        if key not in self._texts:
            self._texts[key] = self._new_text(text, not_first, rule)
        return self._texts[key]

    def _new_text(self, text: TextRule, not_first: str, rule: str) -> str:
        if text.unfollowed and not self._lenient:
            raise ValueError(
                "grammars of this format of calls cannot express these keywords of a text: "
                + ", ".join(dict.fromkeys(text.unfollowed))
            )
        if text.values is not None and text == TextRule(text.values):
            texts = " | ".join(json_text(value + _VALUE_END) for value in _written(text.values))
            return self._rules.add_shared(rule, f"({texts})")
        name = f"{rule}[lazy]"
        return self._rules.add_shared(name, _expression(text, not_first)).removesuffix("[lazy]")


def _written(values: tuple[str, ...]) -> list[str]:
    return [value for value in values if PARAMETER_END not in value]


def _can_be_written(text: TextRule) -> bool:
    return text.values is None or any(PARAMETER_END not in value for value in text.values)


def _expression(text: TextRule, not_first: str) -> str:
    """Return the expression of a text and its end tag.

    The conditions apply to the text alone: with the end tag in each, they would cost much more.
    """
    if text.values is None:
        most = "" if text.most is None else text.most
        rules = [regex(f"(?s:.{{{text.least},{most}}})")]
    else:
        rules = [f"({' | '.join(map(json_text, _written(text.values)))})"]
    rules.append("~" + regex(f"(?s:.*){quoted(PARAMETER_END)}(?s:.*)"))
    if not_first:
        rules.append("~" + regex(rf"\s*[{quoted(not_first)}](?s:.*)"))
    rules += [_matching(pattern) for pattern in text.patterns]
    return f"({' & '.join(rules)}) {json_text(_VALUE_END)}"


def _matching(pattern: str) -> str:
    """Return the expression of texts in which a schema's pattern matches."""
    parts = _PATTERN_PARTS.findall(pattern)
    first, last = int(parts[:1] == ["^"]), len(parts) - (parts[-1:] == ["$"])
    before = "" if first else "(?s:.*)"
    after = "" if last < len(parts) else "(?s:.*)"
    inner = "".join(_WRITTEN.get(part, part) for part in parts[first:last])
    return regex(f"{before}({inner}){after}")
