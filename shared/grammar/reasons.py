"""Translates llguidance's errors into messages that a client can understand."""

from __future__ import annotations

import re

# Patterns of llguidance's errors about limits and about schemas that it cannot express, and what a
# client reads instead.
_IN_PLAIN_WORDS = (
    (
        r"Current row has (\d+) items; max is (\d+)",
        "at one place an answer has {} ways to go on, of which {} are possible: each alternative "
        "is one, each optional property of an object is four",
    ),
    (
        r"Too many items \(limit (\d+)",
        "grammar too ambiguous: the parser takes more than {} steps for a token",
    ),
    (
        "too many expressions constructed",
        "its regular expressions are too large: counts such as {{1000}} make them so",
    ),
    (
        "recursion limit exceeded",
        "it is nested too deeply: a schema may have about 120 objects and lists in one another",
    ),
    (r"Unimplemented keys: \[(.*)\]", "grammars cannot express these keywords of its schema: {}"),
    (
        "oneOf constraints are not supported",
        "in its schema one value may fit several schemas of oneOf: use anyOf",
    ),
)
# An error in a rule with a JSON schema: the line of the grammar, the reason, and an extract of the
# grammar. The client has not written that grammar if it is made from tools.
_SCHEMA_RULE = re.compile(
    r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: (?P<reason>.*?)\n +\d+ \| .*",
    re.DOTALL,
)


def plain_reason(error: str) -> str:
    """Return an error of llguidance in one line, in plain words where possible."""
    error = error.partition("<backtrace>")[0]  # a panic has one
    rule = ""
    if (rule_match := _SCHEMA_RULE.match(error)) is not None:
        named = re.search(rf"^ +{rule_match['line']} \| (\w+)", error, re.MULTILINE)
        rule = "" if named is None else f"{named[1]}: "
        error = rule_match["reason"]
    for pattern, words in _IN_PLAIN_WORDS:
        if (match := re.search(pattern, error)) is not None:
            return rule + words.format(*match.groups())
    lines = [line.strip() for line in error.splitlines()]
    return rule + " ".join(line for line in lines if line and line != "<non-verbose/>")
