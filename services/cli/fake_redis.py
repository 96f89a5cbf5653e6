"""A Redis stand-in in a process of its own, for machines without a Redis server.

    python -m pagewire.services.cli.fake_redis PORT

Listens on loopback only. Good for trying Pagewire out; it is slow and keeps everything in memory.
"""

from __future__ import annotations

import sys

from fakeredis import TcpFakeServer


def main(argv: list[str]) -> None:
    """Serve until killed."""
    server = TcpFakeServer(("127.0.0.1", int(argv[1])), server_type="redis")
    server.daemon_threads = True  # a signal ends the process at once, clients or not
    print(f"embedded Redis on 127.0.0.1:{argv[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv)
