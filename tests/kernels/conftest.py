"""Fixtures of the kernel tests: devices, tolerances, poisoned memory.

A test of a Triton kernel takes `device`: `cpu` is Triton's interpreter, which exists only where
there is no GPU, `cuda` is the GPU. Tests of the references alone take none and run everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels import Ops, load_ops

# (atol, rtol) of results of magnitude about 1, rounded once to the dtype, accumulated in float32.
_TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
_GARBAGE = 0x5A


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `device` (and `dtype`) in the interpreter and on the GPU."""
    devices = [
        pytest.param("cpu", id="interpreter"),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
    ]
    # A bf16 dot is wrong in the interpreter.
    dtypes = [
        pytest.param("cpu", torch.float32, id="interpreter-fp32"),
        pytest.param("cpu", torch.float16, id="interpreter-fp16"),
        pytest.param("cuda", torch.float32, id="cuda-fp32", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, id="cuda-fp16", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=pytest.mark.gpu),
    ]
    if "device" in metafunc.fixturenames and "dtype" in metafunc.fixturenames:
        metafunc.parametrize(("device", "dtype"), dtypes)
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the interpreter's tests where kernels are compiled for a GPU."""
    if not torch.cuda.is_available():
        return
    here = Path(__file__).parent

    def interpreted(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        return (
            item.path.is_relative_to(here)
            and callspec is not None
            and callspec.params.get("device") == "cpu"
        )

    config.hook.pytest_deselected(items=[item for item in items if interpreted(item)])
    items[:] = [item for item in items if not interpreted(item)]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what `torch.empty` and `torch.empty_like` return, so that a gap shows."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else _GARBAGE)

        return allocate

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernels() -> Ops:
    return load_ops("triton", "cuda")


@pytest.fixture(scope="session")
def reference() -> Ops:
    return load_ops("torch", "cpu")


@pytest.fixture(scope="session")
def assert_close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Compare within the tolerance of the dtype; NaN never passes."""

    def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
        atol, rtol = _TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)

    return compare
