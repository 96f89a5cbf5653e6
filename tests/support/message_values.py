"""Random values of messages: hypothesis strategies from msgspec's description of types."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from pagewire.shared.request.logprobs import Logprobs


@st.composite
def logprobs_columns(draw: st.DrawFn) -> Logprobs:
    count, width = draw(st.integers(0, 3)), draw(st.integers(1, 21))
    ids, logprobs = (draw(st.binary(min_size=n, max_size=n)) for n in [4 * count * width] * 2)
    return Logprobs(width, ids, logprobs, draw(st.binary(min_size=4 * count, max_size=4 * count)))


LOGPROBS = logprobs_columns()


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type that msgspec describes, within its limits."""
    match kind:
        case msgspec.inspect.IntType():
            low = kind.ge if kind.ge is not None else -(2**63)
            high = kind.le if kind.le is not None else 2**63 - 1
            high = kind.lt - 1 if kind.lt is not None else high
            return st.integers(low, high)
        case msgspec.inspect.Metadata():
            return values_of(kind.type)
        case msgspec.inspect.FloatType():
            low, above = (kind.ge, False) if kind.gt is None else (kind.gt, True)
            return st.floats(low, kind.le, exclude_min=above, allow_nan=False)
        case msgspec.inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern, fullmatch=True)
        case msgspec.inspect.StrType():
            return st.text(min_size=kind.min_length or 0, max_size=min(kind.max_length or 20, 20))
        case msgspec.inspect.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 50, 50))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType():
            return st.sampled_from(kind.values)
        case msgspec.inspect.ListType():
            return _lists_of(kind)
        case msgspec.inspect.VarTupleType():
            return _lists_of(kind).map(tuple)
        case msgspec.inspect.DictType():
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
        case msgspec.inspect.UnionType():
            return st.one_of([values_of(one) for one in kind.types])
        case msgspec.inspect.StructType(cls=cls) if cls is Logprobs:
            return LOGPROBS
        case msgspec.inspect.StructType():
            return st.builds(kind.cls, **{f.name: values_of(f.type) for f in kind.fields})
    raise AssertionError(f"no strategy for {kind}")


def _lists_of(
    kind: msgspec.inspect.ListType | msgspec.inspect.VarTupleType,
) -> st.SearchStrategy[list[Any]]:
    return st.lists(values_of(kind.item_type), min_size=kind.min_length or 0, max_size=5)
