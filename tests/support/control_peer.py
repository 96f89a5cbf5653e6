"""One end of a control channel in a process of its own, so that it can be killed and frozen.

    python -P -m pagewire.tests.support.control_peer server SECRET EPOCH
    python -P -m pagewire.tests.support.control_peer client SECRET ENDPOINT

It prints one line when it is ready (the server prints its endpoint), and one for each lost peer. A
server sends each message back. The process ends when its standard input does.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.shared.control.channel import (
    ClusterKeys,
    ControlClient,
    ControlServer,
    make_client_id,
)

HEARTBEAT_S = 0.1
LEASE_S = 0.5


def say(line: str) -> None:
    print(line, flush=True)


async def serve(secret: str, epoch: str) -> None:
    def echo(peer: str, message: object) -> None:
        server.post(peer, message)

    server = ControlServer(
        "127.0.0.1",
        0,
        ClusterKeys.derive(secret),
        "remote",
        int(epoch),
        echo,
        lambda peer: say(f"lost {peer}"),
        lease_s=LEASE_S,
        heartbeat_s=HEARTBEAT_S,
    )
    say(await server.start())
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


async def call(secret: str, endpoint: str) -> None:
    client = ControlClient(
        endpoint,
        ClusterKeys.derive(secret),
        make_client_id("remote"),
        lambda message: None,
        lambda reason: say(f"lost: {reason}"),
        lease_s=LEASE_S,
        heartbeat_s=HEARTBEAT_S,
    )
    await client.connect(5)
    say("ready")
    await asyncio.to_thread(sys.stdin.read)
    client.close()


class RemotePeer:
    """Handle of such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def remote_peer(*arguments: str) -> Iterator[RemotePeer]:
    """Run this module with the arguments; kill the process at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pagewire.tests.support.control_peer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield RemotePeer(process)
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run({"server": serve, "client": call}[sys.argv[1]](*sys.argv[2:]))
