"""Turns values without a written type, as in XML-like elements, into JSON by their schema.

Where the schema allows text, a value is text: `12345` is then a string, and so is `true`. There are
two exceptions, of which the text would not say the same: the word `null` (`None` in the history of
some templates) where null is allowed, too, and a whole list or object as JSON where that is. If the
schema allows only certain texts, other values are JSON. A value that nothing is known of may have
any type, so it is text with these exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import msgspec

from pagewire.shared.grammar.references import References
from pagewire.shared.grammar.schema_fit import is_idle, with_null, without_nulls
from pagewire.shared.tool_calls.argument_shapes import shape_of
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.scanner import ValueScanner, escaped
from pagewire.shared.tool_calls.schema_constants import type_of

OtherType = Literal["null", "boolean", "number", "array", "object"]

MAX_LENGTH = 8192  # longest text whose length a grammar counts
NULLS = ("null", "None")

_MAX_DEPTH = 32  # references and alternatives within each other
_MAX_RULES = 64  # alternatives of one text
# Keywords that say which values a schema allows, those with other schemas aside.
_OWN = {"type", "const", "enum", "minLength", "maxLength", "pattern", "format", "not", "if"}
_READ = {*_OWN, "$ref", "allOf", "anyOf", "oneOf", "nullable"}
_OTHERS: frozenset[OtherType] = frozenset(("null", "boolean", "number", "array", "object"))
_BY_NAME: dict[str, OtherType] = {"integer": "number", **{name: name for name in _OTHERS}}
_DAY = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    r"02-(0[1-9]|[12][0-9]))"
)
_OFFSET = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?{_OFFSET}"
_HEX = "[0-9a-fA-F]"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PART, _LABEL = "[A-Za-z0-9_+-]{1,32}", "[A-Za-z0-9]{1,32}"
# Texts that have a format. An address may have more characters than here.
_FORMATS = {
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "email": rf"^{_PART}(\.{_PART}){{0,4}}@{_LABEL}(\.{_LABEL}){{1,4}}$",
}


class ValueForm(msgspec.Struct, frozen=True):
    """How the values of one parameter are written.

    Attributes:
        any_text: a value may be any text.
        texts: it may be these texts.
        others: other types that it may have.
    """

    any_text: bool = True
    texts: tuple[str, ...] = ()
    others: tuple[OtherType, ...] = tuple(sorted(_OTHERS))

    @property
    def containers(self) -> str:
        """First characters of the lists and objects that it may be."""
        return ("[" if "array" in self.others else "") + ("{" if "object" in self.others else "")

    def as_json(self, text: str) -> str:
        """Return a value of this form as JSON text."""
        word = text.strip()
        if "null" in self.others and word in NULLS:
            return "null"
        is_text = self.any_text and word[:1] not in self.containers
        if is_text or text in self.texts or not word:
            return f'"{escaped(text)}"'
        scanner = ValueScanner(python=True)
        out, at = scanner.push(word + "\n")
        is_value = scanner.is_done and at >= len(word)
        return out if is_value else f'"{escaped(text)}"'


ANY_VALUE = ValueForm()


class ParameterForms(msgspec.Struct, frozen=True):
    """How the values of a function's parameters are written.

    Attributes:
        forms: each way once, as many parameters may refer to one schema with many texts.
        named: place of a parameter's form in `forms`, by the parameter's name.
        others: of all others.
    """

    forms: tuple[ValueForm, ...] = ()
    named: dict[str, int] = {}
    others: ValueForm = ANY_VALUE

    @classmethod
    def by_name(cls, named: Mapping[str, ValueForm], others: ValueForm = ANY_VALUE) -> Self:
        """Return the forms of parameters by their names."""
        forms = {id(form): form for form in named.values()}
        places = {key: place for place, key in enumerate(forms)}
        fitting = {name: places[id(form)] for name, form in named.items()}
        return cls(tuple(forms.values()), fitting, others)

    def of(self, name: str) -> ValueForm:
        """Return how the values of a parameter are written."""
        place = self.named.get(name)
        return self.others if place is None else self.forms[place]


def parameter_forms(function: Function) -> ParameterForms:
    """Return how the values of a function's parameters are written."""
    schema = function.schema
    try:
        shape, values = shape_of(schema, lenient=True), SchemaValues(schema)
    except ValueError:
        return ParameterForms()
    named = {name: values.form(each) for name, each in shape.properties.items()}
    others = ANY_VALUE if shape.others is False else values.form(shape.others)
    return ParameterForms.by_name(named, others)


class TextRule(NamedTuple):
    """Texts that a schema allows.

    Attributes:
        values: only these; None if any that fit the rest.
        least: least number of characters.
        most: most of them; None if any.
        patterns: regular expressions that match them.
        unfollowed: further keywords, which no grammar of texts expresses.
    """

    values: tuple[str, ...] | None = None
    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    unfollowed: tuple[str, ...] = ()


class AllowedValues(NamedTuple):
    """Values that a schema allows.

    Attributes:
        texts: the texts, by one rule or another.
        others: types of the other values.
    """

    texts: tuple[TextRule, ...] = (TextRule(),)
    others: frozenset[OtherType] = _OTHERS

    @property
    def any_text(self) -> bool:
        """Whether texts are allowed that are not listed."""
        return any(rule.values is None for rule in self.texts)


_ANY = AllowedValues()


class SchemaValues:
    """Finds the values that the schemas of parameters allow.

    What it has found it remembers, so that many parameters with one long enum cost little more than
    one. Equal results are the same object, whose id stands for it.

    Args:
        root: the function's whole schema, into which references lead.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._references = References(root)
        # By reference; None while it is read: a schema that is an alternative of its own adds none.
        self._known: dict[str, AllowedValues | None] = {}
        self._num_open = 0  # references that are being read
        self._interned: dict[AllowedValues, AllowedValues] = {_ANY: _ANY}
        # With the schema, which keeps its id.
        self._of_schemas: dict[int, tuple[Any, AllowedValues]] = {}
        self._of_parts: dict[tuple[int | str, ...], AllowedValues] = {}
        self._forms: dict[int, ValueForm] = {}

    def form(self, schema: Any) -> ValueForm:
        """Return how values that follow a schema are written."""
        try:
            values = self.of(schema)
        except ValueError:
            return ANY_VALUE
        if id(values) not in self._forms:
            texts = (value for rule in values.texts for value in rule.values or ())
            others: list[OtherType] = sorted(values.others)
            form = ValueForm(values.any_text, tuple(dict.fromkeys(texts)), tuple(others))
            self._forms[id(values)] = form
        return self._forms[id(values)]

    def of(self, schema: Any, depth: int = 0) -> AllowedValues:
        """Return the values that a schema allows.

        Raises:
            ValueError: the schema is nested too deeply, has too many alternatives, or has a
                reference that leads nowhere.
        """
        if not isinstance(schema, dict):
            return self._same(AllowedValues((), frozenset())) if schema is False else _ANY
        if _READ.isdisjoint(schema):
            return _ANY
        if id(schema) in self._of_schemas:
            return self._of_schemas[id(schema)][1]
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        values = self._read(schema, depth)
        if not self._num_open:  # else it may lack what is not read yet
            self._of_schemas[id(schema)] = schema, values
        return values

    def _same(self, values: AllowedValues) -> AllowedValues:
        return self._interned.setdefault(values, values)

    def _read(self, schema: dict[str, Any], depth: int) -> AllowedValues:
        schema = with_null(without_nulls(schema))
        values = self._same(_own(schema))
        if isinstance(reference := schema.get("$ref"), str):
            values = self._both(values, self._referred(reference, depth + 1))
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            values = self._both(values, self.of(part, depth + 1))
        for name in ("anyOf", "oneOf"):
            parts = schema.get(name)
            if isinstance(parts, list):
                several = [self.of(part, depth + 1) for part in parts]
                key = (name, *map(id, several))
                if key not in self._of_parts:
                    self._of_parts[key] = self._same(_either(several, name == "oneOf"))
                values = self._both(values, self._of_parts[key])
        return values

    def _both(self, one: AllowedValues, other: AllowedValues) -> AllowedValues:
        if one is _ANY or other is _ANY:
            return other if one is _ANY else one
        key = id(one), id(other)
        if key not in self._of_parts:
            self._of_parts[key] = self._same(_both(one, other))
        return self._of_parts[key]

    def _referred(self, reference: str, depth: int) -> AllowedValues:
        if reference not in self._known:
            self._known[reference] = None
            self._num_open += 1
            try:
                self._known[reference] = self.of(self._references.find(reference), depth)
            except (LookupError, ValueError) as exc:
                del self._known[reference]
                raise ValueError(exc.args[0]) from None
            finally:
                self._num_open -= 1
        return self._known[reference] or self._same(AllowedValues((), frozenset()))


def _own(schema: dict[str, Any]) -> AllowedValues:
    """Return the values that the keywords of a schema allow, its other schemas aside."""
    if _OWN.isdisjoint(schema):
        return _ANY
    kinds = schema.get("type")
    names = kinds if isinstance(kinds, list) else [kinds]
    others, has_texts = _OTHERS, True
    if kinds is not None and all(name in ("string", *_BY_NAME) for name in names):
        others = frozenset(_BY_NAME[str(name)] for name in names if name != "string")
        has_texts = "string" in names
    elif kinds is not None:
        has_texts = False
    texts: tuple[str, ...] | None = None
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            listed = tuple(value for value in values if isinstance(value, str))
            texts = listed if texts is None else tuple(text for text in texts if text in listed)
            kinds_of = (type_of(value) for value in values if not isinstance(value, str))
            others &= {_BY_NAME[name] for names in kinds_of for name in names}
    has_texts = has_texts and texts != ()
    return AllowedValues((_rule(schema, texts),) if has_texts else (), others)


def _rule(schema: dict[str, Any], values: tuple[str, ...] | None) -> TextRule:
    """Return the rule of a schema's texts."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    patterns = [pattern for pattern in (schema.get("pattern"),) if isinstance(pattern, str)]
    unfollowed: list[str] = [key for key in ("not", "if") if key in schema]
    for key, length in (("minLength", least), ("maxLength", most)):
        if key in schema and not is_idle(key, length):
            is_counted = type(length) is int and 0 <= length <= MAX_LENGTH
            unfollowed += [] if is_counted else [key]
    kind = schema.get("format")
    if kind in _FORMATS:
        patterns.append(_FORMATS[kind])
    elif kind is not None and not is_idle("format", kind):
        unfollowed.append("format")
    rule = TextRule(
        values,
        0 if "minLength" in unfollowed else least,
        None if "maxLength" in unfollowed or is_idle("maxLength", most) else most,
        tuple(patterns),
        tuple(unfollowed),
    )
    return _fitting(rule)


def _fitting(rule: TextRule) -> TextRule:
    """Return a rule whose listed texts have the right length."""
    if rule.values is None or not (rule.least or rule.most is not None):
        return rule
    least, most = _lengths(rule.values)
    if rule.least <= least and (rule.most is None or rule.most >= most):
        return rule._replace(least=0, most=None)
    if rule.least > most:
        return rule._replace(values=(), least=0, most=None)
    fitting = (
        value
        for value in rule.values
        if rule.least <= len(value) and (rule.most is None or len(value) <= rule.most)
    )
    return rule._replace(values=tuple(fitting), least=0, most=None)


@lru_cache(maxsize=4)
def _lengths(values: tuple[str, ...]) -> tuple[int, int]:
    """Return the least and the greatest length of texts."""
    lengths = [len(value) for value in values]
    return min(lengths, default=0), max(lengths, default=0)


def _both(one: AllowedValues, other: AllowedValues) -> AllowedValues:
    """Return the values that both allow."""
    if len(one.texts) * len(other.texts) > _MAX_RULES:
        raise ValueError("it has too many alternatives")
    rules = (_both_rules(a, b) for a in one.texts for b in other.texts)
    texts = tuple(rule for rule in rules if rule.values != ())
    return AllowedValues(texts, one.others & other.others)


def _both_rules(one: TextRule, other: TextRule) -> TextRule:
    values = one.values if other.values is None else other.values
    if one.values is not None and other.values is not None:
        known = set(other.values)
        values = tuple(value for value in one.values if value in known)
    mosts = [most for most in (one.most, other.most) if most is not None]
    rule = TextRule(
        values,
        max(one.least, other.least),
        min(mosts, default=None),
        tuple(dict.fromkeys((*one.patterns, *other.patterns))),
        (*one.unfollowed, *other.unfollowed),
    )
    return _fitting(rule)


def _either(parts: Iterable[AllowedValues], only_one: bool) -> AllowedValues:
    """Return the values that any part allows.

    Args:
        parts: what each of several schemas allows.
        only_one: no value may follow two of the schemas.
    """
    rules: dict[TextRule, None] = {}
    values: dict[str, None] = {}
    others: frozenset[OtherType] = frozenset()
    num_with_texts = num_values = num_nulls = 0
    for part in parts:
        others |= part.others
        num_nulls += "null" in part.others
        num_with_texts += bool(part.texts)
        for rule in part.texts:
            if rule.values is not None and rule == TextRule(rule.values):
                values |= dict.fromkeys(rule.values)
                num_values += len(rule.values)
            else:
                rules[rule] = None
    are_shared = num_with_texts > 1 and (bool(rules) or num_values > len(values))
    is_unclear = only_one and (are_shared or num_nulls > 1)
    if TextRule() in rules:
        rules, values = {TextRule(): None}, {}
    if values:
        rules[TextRule(tuple(values))] = None
    if len(rules) > _MAX_RULES:
        raise ValueError("it has too many alternatives")
    extra = ("oneOf",) if is_unclear else ()
    return AllowedValues(
        tuple(rule._replace(unfollowed=(*rule.unfollowed, *extra)) for rule in rules), others
    )
