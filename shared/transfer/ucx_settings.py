"""How UCX is set up: for peers that may die at any moment, and fast besides.

What a user has set in the environment (`UCX_...`) is left alone. The choices, each found by killing
processes in mid-transfer:

- Error handling is on for all endpoints. Without it a sender that dies while its memory is read
  (cma) aborts the reading process, and a transfer that waits for a dead peer can never be ended:
  UCX cancels no send and no receive that has begun, but closing an endpoint by force does.
- No shared memory. All senders write to one queue of the receiver, and one that dies between
  reserving its place there and filling it stops the receiver for good, for all of them.
- TCP opens ports without authentication, so it is kept to the device of the transport's host: by
  default the loopback device. Its segments of 8 and 64 KiB cost half of the bandwidth.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct

logger = logging.getLogger(__name__)

_ALL = ("0.0.0.0", "::", "")  # noqa: S104 - the user's choice
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s16s")

# Importing ucxx sets some, so this is what the user had set before.
_SET_BY_USER = frozenset(name for name in os.environ if name.startswith("UCX_"))

# Read when libucs is loaded: for the environment. What goes wrong is raised as an exception.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")


def ucx_settings(host: str, *, cuda: bool) -> dict[str, str]:
    """Return the settings of a UCX context, without the prefix `UCX_`.

    Args:
        host: the address of this machine to listen on. Who has chosen transports in the
            environment has chosen their devices, too.
        cuda: whether buffers lie in GPU memory.
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
    if host not in _ALL and _SET_BY_USER.isdisjoint({"UCX_TLS", "UCX_NET_DEVICES"}):
        if device := _device_of(host):
            settings["NET_DEVICES"] = device
        else:
            logger.warning(
                "no network device is known to have the IPv4 address %s, so UCX listens on all; "
                "give an IPv4 address, or set UCX_NET_DEVICES to the device, such as eth0",
                host,
            )
    return {name: value for name, value in settings.items() if f"UCX_{name}" not in _SET_BY_USER}


def _device_of(host: str) -> str | None:
    """Return the name of the network device that has an IPv4 address, None if none has."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, device in socket.if_nameindex():
            request = _IFREQ.pack(device.encode(), b"")
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            own = ipaddress.IPv4Address(answer[20:24])
            if own == address or (own.is_loopback and address.is_loopback):
                return device
    return None
