"""An engine with Triton kernels on a Hopper GPU that does not exist.

Its tensors are on the CPU and hold real numbers wherever the host or an index needs them. Launchers
see a Hopper GPU. A launch does nothing but what Triton does first: it finds the kernel that is
specialised on the arguments, and has it compiled if it is new. Here, compiling reports the kernel
to `knobs.compilation.listener`, as Triton does, and is over.

Import this in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from pagewire.kernels import _launch, linear, paged_prefill, paged_prefill_hopper
from pagewire.shared.engine.build import BuiltEngine, build_engine
from pagewire.shared.engine.execution import kernel_choice
from pagewire.shared.settings.config import EngineSettings, load_settings

_SMS = 132
_RESULTS = {"_pick_kernel": "out_ptr", "_join_kernel": "ids_ptr"}  # what the host or an index reads


class HopperDriver:
    """Stands in for Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launches:
    """Finds the kernels of launches, and compiles none.

    Attributes:
        vocab_size: sampled tokens are below it.
    """

    def __init__(self) -> None:
        self.vocab_size = 1
        self._kernels: list[Any] = []

    def launcher(self, kernel: Any, grid: Any) -> Callable[..., None]:
        """Return what stands in for `kernel[grid]`."""
        if kernel not in self._kernels:
            self._kernels.append(kernel)
            kernel.device_caches[0]  # made when it is read: sets `compile`
            kernel.compile = self._compile

        def launch(*args: Any, **options: Any) -> None:
            kernel.run(*args, grid=grid, warmup=True, **options)
            self._fill_result(kernel, args)

        return launch

    def forget(self) -> None:
        """Forget all kernels, as a new process would."""
        for kernel in self._kernels:
            kernel.device_caches.clear()
        self._kernels.clear()

    def _compile(self, src: Any, **options: Any) -> object:
        listener = knobs.compilation.listener
        if listener is not None:
            listener(
                src=src,
                metadata=options["options"],
                metadata_group={},
                times=SimpleNamespace(total=0),
                cache_hit=False,
            )
        return object()

    def _fill_result(self, kernel: Any, args: tuple[Any, ...]) -> None:
        name = _RESULTS.get(kernel.__name__)
        if name is not None:
            args[kernel.arg_names.index(name)].random_(self.vocab_size)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((len(x), len(weight))) if out is None else out


@contextmanager
def hopper() -> Iterator[Launches]:
    """Make launchers see a Hopper GPU."""
    launches = Launches()
    with ExitStack() as stack:
        driver.set_active(HopperDriver())
        for target, name, value in (
            (KernelInterface, "__getitem__", lambda kernel, grid: launches.launcher(kernel, grid)),
            (_launch, "_INTERPRETED_SMS", _SMS),
            (_launch, "_is_hopper_or_newer", lambda device: True),
            (paged_prefill, "_hopper_kernel", lambda device: paged_prefill_hopper),
            (linear, "_by_cublas", _product),
            (kernel_choice, "_triton_is_interpreted", lambda: True),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield launches


def build(
    directory: Path, shape: dict[str, Any], **more: Any
) -> tuple[BuiltEngine, EngineSettings]:
    """Build an engine of a model's shape, with random weights; return its settings, too.

    Args:
        directory: gets the model's configuration.
        shape: content of config.json.
        more: settings.
    """
    (directory / "config.json").write_text(json.dumps(shape))
    fields = {"model": str(directory), "load_format": "dummy", "kernels": "triton", **more}
    settings = load_settings(EngineSettings, fields)
    return build_engine(settings), settings
