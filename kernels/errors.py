"""Exceptions of the kernels.

KernelError (a ValueError)
└── UnsupportedShapeError
"""

from __future__ import annotations


class KernelError(ValueError):
    """An operation was given something that its kernel cannot compute."""


class UnsupportedShapeError(KernelError):
    """A shape or layout is outside what the kernel supports."""
