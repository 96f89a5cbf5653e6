"""What bodies cost the process that reads them: CPU time and memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from pagewire.services.router.http.api.openai.generation import GenerationInput, PromptInput
from pagewire.services.router.http.body_processes.body_messages import (
    BodyJob,
    BodyKind,
    BodyRefusal,
    BodyReply,
)
from pagewire.services.router.http.body_processes.child_process import ChildProcess
from pagewire.services.router.http.body_processes.framing import receive_message
from pagewire.shared.settings.config import RouterSettings
from pagewire.tests.support.costly_schemas import chat_body

PROGRAM = "pagewire.services.router.http.body_processes.body_process"
CONTEXT = 1 << 22
TIMEOUT_S = 20.0


class Cost(NamedTuple):
    """What one body cost.

    Attributes:
        added_bytes: memory at most while it was read, in addition to what was held before.
    """

    result: GenerationInput | BodyRefusal
    cpu_s: float
    added_bytes: int


class BodyMeter:
    """A process that reads bodies. Close it with `close`."""

    def __init__(self, model: Path, tool_parser: str = "auto") -> None:
        settings = RouterSettings(
            model=str(model),
            served_model_name="m",
            tool_parser=tool_parser,
        )
        own = settings.model_dump(mode="json", exclude={"cluster_secret", "redis_url"})
        self._process = ChildProcess(PROGRAM, own, TIMEOUT_S)
        self.read("chat", chat_body())

    def read(self, kind: BodyKind, raw: bytes) -> Cost:
        """Read a body.

        Raises:
            OSError, ChannelError: it takes too long, or the process ends.
        """
        with contextlib.suppress(OSError):  # else the most of all bodies so far counts
            self._file("clear_refs").write_text("5", encoding="ascii")
        began_s, held = self._cpu_s(), self._memory("VmRSS")
        self._process.send(BodyJob(kind, CONTEXT, len(raw)))
        self._process.connection.sendall(raw)
        reply = receive_message(self._process.connection, BodyReply)
        for _ in range(reply.num_prompts):
            receive_message(self._process.connection, PromptInput)
        return Cost(reply.result, self._cpu_s() - began_s, self._memory("VmHWM") - held)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _file(self, name: str) -> Path:
        return Path(f"/proc/{self._process.pid}/{name}")

    def _cpu_s(self) -> float:
        tasks = self._file("task").glob("*/schedstat")
        return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9

    def _memory(self, name: str) -> int:
        lines = self._file("status").read_text(encoding="ascii").splitlines()
        (line,) = [line for line in lines if line.startswith(f"{name}:")]
        return int(line.split()[1]) << 10
