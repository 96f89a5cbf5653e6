"""Triton's interpreter: quicker, and with right conversions to FP8."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter


@cache
def _builtins_of(package: Any) -> list[tuple[str, Any]]:
    """Return what the interpreter must replace in a part of Triton's language, as it came."""
    return [each for each in inspect.getmembers(package) if tl.core.is_builtin(each[1])]


def _replace_builtins(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins_of(package):
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, scope)


_dtype_of = interpreter._get_np_dtype
_scalar_of = cache(_dtype_of)


def _numpy_dtype(dtype: Any) -> Any:
    scalar = dtype.scalar
    return _dtype_of(scalar) if isinstance(scalar, tl.pointer_type) else _scalar_of(scalar)


def keep_look_ups() -> None:
    """Let the interpreter remember the builtins of Triton's language, and the dtypes of numpy.

    It then takes a third less time. For as long as the process lives.
    """
    assert callable(interpreter._patch_builtin)
    interpreter._patch_builtin = _replace_builtins
    interpreter._get_np_dtype = _numpy_dtype


_converted = interpreter._convert_float


def _convert_float(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
    if (source, target) != (tl.float32, tl.float8e4nv):
        return _converted(numbers, source, target, rounding)
    flat = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32).reshape(-1))
    in_fp8: Any = flat.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return in_fp8.reshape(numbers.shape)


def convert_to_fp8_exactly() -> None:
    """Let the interpreter convert float32 to e4m3 as torch and a GPU do: to the nearest number.

    Its own conversion loses the exponent's carry, so that 0.99 becomes 0.5, and makes a number of
    NaN. For as long as the process lives.
    """
    interpreter._convert_float = _convert_float
