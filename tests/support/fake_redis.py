"""The embedded Redis stand-in of `pagewire up`, in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fakeredis import TcpFakeServer


@contextmanager
def fake_redis_url() -> Iterator[str]:
    """Serve on a free port of loopback; yield the URL."""
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
