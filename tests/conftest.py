"""Shared by all tests: Triton's interpreter where there is no GPU, and GPU tests only where one is.

The variable must be set before Triton is imported for the first time, so it is set here.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
