"""Grammars that are meant to cost a server too much: by depth, size, ambiguity or arithmetic."""

from __future__ import annotations

import json
from typing import Any


def _chain(length: int, last: str) -> str:
    return "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(length)) + f"\na{length}: {last}"


def _references(length: int, wrap: bool) -> dict[str, Any]:
    def step(i: int) -> dict[str, Any]:
        ref = {"$ref": f"#/$defs/d{i + 1}"}
        return {"type": "array", "items": ref} if wrap else ref

    defs: dict[str, Any] = {f"d{i}": step(i) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "null"}}}


def _nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


GRAMMARS = {
    "rules-500": "start: a0\n" + _chain(500, '"x"'),
    "rules-1500": "start: a0\n" + _chain(1500, '"x"'),
    "rules-3000": "start: a0\n" + _chain(3000, '"x"'),
    "rules-empty": "start: a0\n" + _chain(60, '"x" | '),
    "terminals-3000": "start: A0\n" + "\n".join(f'A{i}: A{i + 1} "y"' for i in range(3000))
    + '\nA3000: "x"',
    "parentheses": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    "gbnf-parentheses": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
    "ambiguous": "start: s\ns: s s s | s s | /[a-z ]/ | \n",
    "ambiguous-two": 'start: s\ns: s s | "a" | "b" | "" \n',
    "ambiguous-lists": "start: l\nl: l l | x\nx: /[a-z]+/ | /[a-z ]+/ | /[a-z0-9]+/\n",
    "many-rules": "start: " + " | ".join(f"x{i}" for i in range(1500)) + "\n"
    + "\n".join(f"x{i}: /[a-z]*{i}?/ x{i} | " for i in range(1500)),
    "intersections": "start: A\nA: " + " & ".join(f"/.*{i}.*/" for i in range(40)),
    "counted-intersections": "start: A\nA: "
    + " & ".join(f"/(.*x){{{i}}}.*/" for i in range(2, 30)),
    "negation": "start: A\nA: ~/.*(a|b).{60}.*/",
    "left-recursion": 'start: start "a" | "a"',
    "endless": "start: start",
}  # fmt: skip
REGEXES = {
    "counted": "((a{0,1000}){0,1000}){0,1000}",
    "optional": "a?" * 20_000,
    "optional-counted": "(a?){5000}a{5000}",
    "exponential": "(.*a.{40})|(.*b.{40})|(.*c.{41})",
    "suffix": "(a|b)*a(a|b){30}",
    "alternatives": "|".join(f"(a{i}.*b{i})" for i in range(3000)),
    "deep": "(" * 2000 + "a" + "b)*" * 2000,
}
SCHEMAS: dict[str, Any] = {
    "references": _references(3000, wrap=False),
    "array-references": _references(3000, wrap=True),
    "reference-to-itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "nested": _nested(5000),
    "multiple-of": {"type": "integer", "multipleOf": 999_983},
    "lengths": {"type": "string", "minLength": 100_000, "maxLength": 10_000_000},
    "patterns": {
        "allOf": [
            {"anyOf": [{"type": "string", "pattern": f".*{i}{j}.*"} for i in range(6)]}
            for j in range(12)
        ]
    },
    "objects": {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": "string", "pattern": f"{i}"}}}
            for i in range(300)
        ]
    },
    "enumeration": {"enum": [f"{i:05}" * 4 for i in range(5000)]},
}


def hostile_fields() -> dict[str, dict[str, Any]]:
    """Return a request's field for each grammar, regex and schema, by name."""
    fields: dict[str, dict[str, Any]] = {}
    fields.update({name: {"guided_grammar": text} for name, text in GRAMMARS.items()})
    fields.update({name: {"guided_regex": text} for name, text in REGEXES.items()})
    fields.update({name: {"guided_json": _as_text(schema)} for name, schema in SCHEMAS.items()})
    return fields


def _as_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
