"""Finds out which transport UCX has chosen: only libucp's human-readable output shows it."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

# The fastest first: the lane for bulk data, even if another lane carries the messages.
_LANES = ("cuda_ipc", "cma", "rc_mlx5", "dc_mlx5", "rc_verbs", "sysv", "posix", "tcp")
_LIBRARY = "libucp.so.0"  # ucxx has already loaded it, so this name finds it


def name_lane(endpoint: int, *, cuda: bool) -> str | None:
    """Return the transport that UCX uses for an endpoint's bulk data; None if it is not known.

    Args:
        endpoint: the `ucp_ep_h`.
        cuda: the data is in GPU memory.
    """
    try:
        text = _print_endpoint(endpoint)
    except (OSError, AttributeError) as exc:
        logger.debug("libucp does not name its lanes: %s", exc)
        return None
    memory = "cuda" if cuda else "host"
    tables = [part for part in text.split("tagged message")[1:] if f"from {memory}" in part]
    bulk = " ".join(line for part in tables for line in part.splitlines() if "..inf" in line)
    return next((lane for lane in _LANES if lane in (bulk or text)), None)


def _print_endpoint(endpoint: int) -> str:
    """Return what `ucp_ep_print_info` writes about an endpoint."""
    libc, libucp = ctypes.CDLL(None), ctypes.CDLL(_LIBRARY)
    libc.open_memstream.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    if not stream:
        raise OSError("open_memstream failed")
    try:
        libucp.ucp_ep_print_info(ctypes.c_void_p(endpoint), stream)
    finally:
        libc.fclose(stream)
        content = ctypes.string_at(text.value, size.value) if text.value else b""
        libc.free(text)
    return content.decode(errors="replace")
