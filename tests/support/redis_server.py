"""A real redis-server of a test's own, which can be frozen, killed and restarted."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import redis

from pagewire.tests.support.aio import wait_until


class RedisServer:
    """Runs `redis-server` in a temporary directory, without persistence.

    Args:
        password: if given, clients must authenticate.
    """

    def __init__(self, password: str | None = None) -> None:
        # Not pytest's tmp_path: a unix socket's path may have no more than 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="pw-redis-"))
        self.password = password
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        credentials = f":{self.password}@" if self.password else ""
        return f"unix://{credentials}{self.directory / 'redis.sock'}"

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", "redis.sock", "--save", ""]
        if self.password:
            command += ["--requirepass", self.password]
        self._process = subprocess.Popen(command, cwd=self.directory, stdout=subprocess.DEVNULL)
        wait_until(self._answers, 10, lambda: "redis-server did not start")

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory)

    def client(self) -> redis.Redis:
        """Return a blocking client, with which a test can read the data."""
        return redis.Redis.from_url(self.url)

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False
