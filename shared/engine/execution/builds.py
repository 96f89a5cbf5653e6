"""Counts what a process builds for its device: kernels compiled or loaded, CUDA graphs captured.

Before a worker is ready, that prepares it. Afterwards a request may wait for it: each of these late
builds has a line in the log.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

logger = logging.getLogger(__name__)

# A kernel is compiled, or loaded from Triton's cache on disk. A CUDA graph is captured.
BuildKind = Literal["compiled", "loaded", "captured"]


def _zeros() -> dict[BuildKind, int]:
    return dict.fromkeys(get_args(BuildKind), 0)


@dataclass(slots=True)
class Builds:
    """Counts the kernels and CUDA graphs that this process has built, and the time that took.

    Attributes:
        early: how many there were of each kind before the worker was ready.
        late: how many since then.
        seconds: time that all of them took, by kind.
        is_ready: whether the worker is ready: further builds are late.
    """

    early: dict[BuildKind, int] = field(default_factory=_zeros)
    late: dict[BuildKind, int] = field(default_factory=_zeros)
    seconds: dict[BuildKind, float] = field(default_factory=lambda: dict.fromkeys(_zeros(), 0.0))
    is_ready: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, kind: BuildKind, name: str, seconds: float) -> None:
        """Count a build; log it if it is late.

        Args:
            kind: the kind of build.
            name: name of the kernel and what it is specialised on, or of the CUDA graph.
            seconds: how long it took.
        """
        with self._lock:
            counts = self.late if self.is_ready else self.early
            counts[kind] += 1
            self.seconds[kind] += seconds
        if self.is_ready:
            logger.warning("%s after the worker was ready, in %.2f s: %s", kind, seconds, name)

    @contextmanager
    def timed(self, kind: BuildKind, name: str) -> Iterator[None]:
        """Count what the code in the `with` statement builds, and measure it."""
        start_s = time.monotonic()
        yield
        self.record(kind, name, time.monotonic() - start_s)

    def record_ready(self) -> None:
        """Count builds as late from now on; log how many there were."""
        self.is_ready = True
        if any(self.early.values()):
            text = ", ".join(f"{kind} {n} in {self.seconds[kind]:.1f} s" for kind, n in self.parts)
            logger.info("kernels and CUDA graphs of this worker: %s", text)

    @property
    def parts(self) -> list[tuple[BuildKind, int]]:
        """The kinds of builds with how many there were before the worker was ready."""
        return list(self.early.items())


BUILDS = Builds()  # of this process: Triton reports kernels to one listener


def count_kernels(builds: Builds = BUILDS) -> None:
    """Have Triton report each kernel that it compiles or loads; without Triton there is none."""
    try:
        compilation = importlib.import_module("triton").knobs.compilation
    except ImportError:
        return
    earlier = compilation.listener
    if isinstance(earlier, _Listener) and earlier.builds is builds:
        return
    compilation.listener = _Listener(builds, earlier)


@dataclass(frozen=True, slots=True)
class _Listener:
    """Takes Triton's reports, and passes them on to the listener that was there before."""

    builds: Builds
    earlier: Any

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        if self.earlier is not None:
            self.earlier(src=src, times=times, cache_hit=cache_hit, **more)
        kind: BuildKind = "loaded" if cache_hit else "compiled"
        options = more.get("metadata", {})
        warps = {"num_warps": options["num_warps"]} if "num_warps" in options else {}
        self.builds.record(kind, _describe(src, warps), times.total / 1e6)


def _describe(src: Any, options: dict[str, int]) -> str:
    """Return a kernel's name with what it is specialised on.

    Args:
        src: Triton's source of a kernel: its arguments' types, constants and attributes.
        options: further options that distinguish compiled kernels.
    """
    constants = {_place(key): value for key, value in getattr(src, "constants", {}).items()}
    attributes = {_place(key) for key in getattr(src, "attrs", {})}
    parts = [
        f"{name}={constants.get(index)!r}"
        if kind == "constexpr"
        else f"{name}:{kind}{'/16' if index in attributes else ''}"
        for index, (name, kind) in enumerate(getattr(src, "signature", {}).items())
    ]
    parts += [f"{name}={value}" for name, value in options.items()]
    return f"{src.name}({', '.join(parts)})"


def _place(key: Any) -> Any:
    """Return the number of an argument from the key that Triton has for it."""
    return key[0] if isinstance(key, tuple) and len(key) == 1 else key
