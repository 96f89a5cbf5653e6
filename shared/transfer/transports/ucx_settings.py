"""UCX's settings: they keep a worker alive when a peer dies at any moment, and are fast.

Settings of the user in the environment (`UCX_...`) are not changed. Each choice was found by
killing processes during transfers:

- Error handling is on for all endpoints. Without it a sender that dies while its memory is read
  (cma) aborts the reading process, and a transfer that waits for a dead peer can never be ended:
  UCX cancels no send and no receive that has begun, but closing an endpoint by force does.
- No shared memory. All senders write to one queue of the receiver, and one that dies between
  reserving its place there and filling it stops the receiver for good, for all of them.
- TCP opens ports without authentication, and a few malformed bytes on one of them end the process
  (UCX 1.21). So UCX is bound to the device that has the worker's own address: by default the
  loopback device, never all of them. TCP's segments of 8 and 64 KiB cost half of the bandwidth.
"""

from __future__ import annotations

import os

from pagewire.shared.transfer.transports.ucx_device import find_device

# Importing ucxx sets some, so this is what the user had set before.
_SET_BY_USER = frozenset(name for name in os.environ if name.startswith("UCX_"))
_CHOOSES_DEVICES = frozenset({"UCX_TLS", "UCX_NET_DEVICES"})

# Read when libucs is loaded: for the environment. What goes wrong is raised as an exception.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")


def ucx_settings(host: str, *, cuda: bool) -> dict[str, str]:
    """Return the settings of a UCX context, without the prefix `UCX_`.

    Args:
        host: this worker's own address, on whose device UCX listens. A user who has chosen
            transports (`UCX_TLS`) or devices (`UCX_NET_DEVICES`) has chosen the devices.
        cuda: whether buffers lie in GPU memory.

    Raises:
        ConfigError: no device has that address, so that UCX would listen on all of them.
    """
    settings = {
        "TLS": "cuda_ipc,cuda_copy,tcp,self" if cuda else "tcp,self",
        "TCP_TX_SEG_SIZE": "128k",
        "TCP_RX_SEG_SIZE": "128k",
        # Without it UCX refuses shared memory with error handling, should the user ask for it.
        "MM_ERROR_HANDLING": "y",
        # ucxx would stage the fragments of all transfers in GPU memory.
        "RNDV_FRAG_MEM_TYPE": "cuda" if cuda else "host",
    }
    if _SET_BY_USER.isdisjoint(_CHOOSES_DEVICES):
        settings |= {"NET_DEVICES": find_device(host), "TCP_AF_PRIO": "inet"}
    return {name: value for name, value in settings.items() if f"UCX_{name}" not in _SET_BY_USER}


def listens_on(settings: dict[str, str]) -> str:
    """Return where UCX listens with these settings and the user's: words for a log."""
    devices = settings.get("NET_DEVICES") or os.environ.get("UCX_NET_DEVICES")
    return f"on {devices}" if devices else "on all network devices"
