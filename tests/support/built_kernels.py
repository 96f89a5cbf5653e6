# mypy: allow-untyped-defs, allow-untyped-decorators
"""Compile a kernel for a Hopper GPU without a GPU, and print what was counted:

    python -P -m pagewire.tests.support.built_kernels

The process must not have TRITON_INTERPRET; TRITON_CACHE_DIR names Triton's cache.
"""

from __future__ import annotations

import json
import logging
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagewire.shared.engine.execution.builds import Builds, count_kernels


@triton.jit
def _add_kernel(x_ptr, count, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(x_ptr + lanes, tl.load(x_ptr + lanes) + count)


def compile_it() -> None:
    """Compile the kernel, or load it from Triton's cache."""
    signature = {"x_ptr": "*i32", "count": "i32", "SIZE": "constexpr"}
    source = ASTSource(_add_kernel, signature, {(2,): 64}, {(0,): [["tt.divisibility", 16]]})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


def main() -> None:
    """Build before and after a worker is ready; print the counts as JSON, and the log."""
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s", stream=sys.stdout)
    builds = Builds()
    count_kernels(builds)
    count_kernels(builds)  # counts each once all the same
    compile_it()
    builds.record_ready()
    compile_it()
    print(json.dumps([builds.early, builds.late]))


if __name__ == "__main__":
    main()
