"""What passes between rank 0 and another rank, over a socket that only these two processes have.

rank 0                       rank 1, 2, ...
--Setup------------------->  loads its part of the model
<------------------Loaded--
--Begin------------------->  allocates its KV pool
<-------------------Ready--  after its first steps, on a GPU
--StepPlan, GrammarMasks-->  runs steps
<-----------------Sampled--  once in 100 steps
--Stage------------------->  maps the staging slots of KV transfer
--Pack, Unpack, Fence----->  moves its part of KV blocks
<-------------------Moved--
<------------------Failed--  at any time; its process ends
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any

import msgspec
import torch

from pagewire.shared.base.errors import RankError
from pagewire.shared.base.logs import LogForm
from pagewire.shared.engine.scheduling.step import GrammarMasks, StepPlan

LENGTH_BYTES = 4
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
SEND_S = 5.0  # a rank reads its commands between steps, and these are small


class Setup(msgspec.Struct, frozen=True, tag=True):
    """What a rank loads.

    Attributes:
        count: number of ranks.
        patience_s: see `SocketCommunicator`.
        settings: of the engine, by name.
        log_level, log_format, service: see `configure_logging`.
    """

    count: int
    patience_s: float
    settings: dict[str, Any]
    log_level: str
    log_format: LogForm
    service: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """With what all ranks run steps.

    Attributes:
        num_blocks: of each rank's KV pool.
        max_model_len: tokens of the longest sequence.
        threads: of torch; with another number, a rank's values could differ in their last bits.
    """

    num_blocks: int
    max_model_len: int
    threads: int


class Stage(msgspec.Struct, frozen=True, tag=True):
    """The memory that all ranks share has `num_bytes` from now on: the staging slots.

    Attributes:
        handle: of memory on rank 0's GPU, see `export_handle`; empty: it is the shared file.
    """

    num_bytes: int
    handle: bytes = b""


class Fence(msgspec.Struct, frozen=True, tag=True):
    """Later plans wait for the moves so far; see `BlockMoves.fence`."""


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Gather a rank's part of blocks into staging; see `BlockMoves.pack`.

    Attributes:
        number: of the move.
        start: where the parts of all ranks begin in the shared memory, in bytes; in their order.
        size: of those of each rank, in bytes.
        parts: how many each rank has.
        first_group, num_groups: layer groups of each block.
    """

    number: int
    start: int
    size: int
    parts: int
    block_ids: list[int]
    first_group: int
    num_groups: int
    seed: int
    after: int


class Unpack(Pack, frozen=True, tag=True):
    """Scatter a rank's part of staging into blocks, and check it; see `BlockMoves.unpack`."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """A rank has moved its part.

    Attributes:
        number: of the move.
        is_intact: its checksums are right.
    """

    number: int
    is_intact: bool = True


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has its weights, and room for this many blocks."""

    num_blocks: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank awaits its first plan."""


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """What a rank has sampled in its first `steps` steps, as a hash."""

    steps: int
    digest: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on.

    Attributes:
        error: why.
        is_config: the settings are wrong, or the machine does not have what they need.
        is_blameless: no request is to blame.
        missing: the rank that it has waited for in vain, if that is why.
    """

    error: str
    is_config: bool = False
    is_blameless: bool = False
    missing: int | None = None


Command = Setup | Begin | StepPlan | GrammarMasks | Stage | Pack | Unpack | Fence
Report = Loaded | Ready | Sampled | Moved | Failed


def encode(message: Command | Report) -> bytes:
    """Return a message with its length, as it is sent."""
    raw = msgspec.msgpack.encode(message)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


class RankPipe:
    """One end of the socket between rank 0 and another rank.

    Attributes:
        rank: the rank at the other end.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self._socket = connection
        self._commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, encoded: bytes) -> None:
        """Send what `encode` has returned.

        Raises:
            RankError: the rank has ended, or has read nothing for seconds.
        """
        try:
            self._socket.settimeout(SEND_S)
            self._socket.sendall(encoded)
        except TimeoutError as exc:
            raise RankError(
                f"rank {self.rank} has read nothing for {SEND_S:g} s", self.rank
            ) from exc
        except OSError as exc:
            raise RankError(f"rank {self.rank} has ended", self.rank) from exc

    def next_command(self) -> Command | None:
        """Wait for rank 0's next command; None: its process has ended, or has ended this one."""
        with contextlib.suppress(RankError):
            return self._commands.decode(self._receive(None))
        return None

    def has_command(self, timeout_s: float) -> bool:
        """Wait until rank 0 has sent something or has ended; return whether it has."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def next_report(self, timeout_s: float) -> Report:
        """Wait for the rank's next report.

        Raises:
            RankError: the rank has ended, or reports nothing in time.
        """
        return self._reports.decode(self._receive(timeout_s))

    def close(self) -> None:
        """Close this end; the other rank then ends."""
        self._socket.close()

    def _receive(self, timeout_s: float | None) -> bytearray:
        try:
            self._socket.settimeout(timeout_s)
            length = int.from_bytes(self._read(LENGTH_BYTES), "little")
            return self._read(length)
        except TimeoutError as exc:
            problem = f"rank {self.rank} has reported nothing for {timeout_s:g} s"
            raise RankError(problem, self.rank) from exc
        except OSError as exc:
            raise RankError(f"rank {self.rank} has ended", self.rank) from exc

    def _read(self, count: int) -> bytearray:
        """Return this many bytes.

        Raises:
            OSError: the other end is closed.
        """
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            if not (taken := self._socket.recv_into(rest)):
                raise ConnectionResetError
            rest = rest[taken:]
        return found
