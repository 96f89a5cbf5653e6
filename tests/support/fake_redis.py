"""The embedded Redis stand-in of `pagewire up`, in this process."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagewire.services.cli.up.fake_redis import UnixFakeServer


@contextmanager
def fake_redis_url() -> Iterator[str]:
    """Serve on a socket of its own; yield the URL."""
    # Not pytest's tmp_path: a unix socket's path may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pw-fake-") as directory:
        server = UnixFakeServer(Path(directory) / "redis.sock")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"unix://{directory}/redis.sock"
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5)
