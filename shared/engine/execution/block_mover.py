"""Packs KV blocks into staging and unpacks them, whole or by layer group, alongside steps.

If staging slots are known in advance, each gets a CUDA graph of its move. Without a graph, the host
would need several times as long to launch the copies and the kernel as the device needs for a small
segment. A graph's kernel reads the copy list from the host's memory, and reports there whether a
checksum is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.kernels import Ops
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.kv_staging import empty_copy_list, fill_copy_list
from pagewire.shared.engine.execution.cuda_graph import DeviceEvent, GraphPool, launch_graph
from pagewire.shared.engine.execution.host_copies import downloaded, uploaded
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.packing import max_blocks, packed_bytes, part_bytes, pool_rows

# Launches a move, given the list of blocks, the buffer, and where to report a wrong checksum.
_Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
_NO_ROWS = np.zeros(0, np.int64)


class BlockMove(NamedTuple):
    """Which blocks are moved between a pool and staging.

    Attributes:
        block_ids: rows of the pool; what is unpacked for a row below 0 is only checked.
        groups: the layer groups to move of each block, contiguous in staging.
        staging: [>= packed_bytes(layout, len(block_ids), len(groups))] uint8, the beginning of a
            staging slot; nothing else may touch its bytes before the move is done.
        seed: added to the checksums, a signed 64-bit integer.
        parts: of the heads, which follow each other in staging with checksums of their own; on
            all ranks, a multiple of their number.
    """

    block_ids: list[int]
    groups: range
    staging: torch.Tensor
    seed: int
    parts: int = 1


class PendingMove:
    """A move of KV blocks that has been launched and may not have ended.

    Attributes:
        end: event at the end of the move; None if the move has already been made.
        is_of_one_device: what waits for `end` on a device comes after the move.
    """

    __slots__ = ("end",)
    is_of_one_device: ClassVar[bool] = True

    def __init__(self, end: DeviceEvent) -> None:
        self.end = end

    def poll(self) -> bool:
        """Whether the blocks have been moved, without waiting."""
        return self.end is None or self.end.query()


class PendingCheck(PendingMove):
    """Blocks that are being moved and checked.

    Args:
        corrupt: [] int64 on the host: whether a checksum is wrong. Valid once the move is done and
            until the next move of the same staging slot.
    """

    __slots__ = ("_corrupt",)

    def __init__(self, corrupt: NDArray[np.int64], end: DeviceEvent) -> None:
        super().__init__(end)
        self._corrupt = corrupt

    def verify(self) -> bool:
        """Wait for the move; return whether all checksums are right."""
        if self.end is not None:
            self.end.synchronize()
        return int(self._corrupt) == 0


@dataclass(frozen=True, slots=True)
class _MoveGraph:
    """A CUDA graph of the move between the pool and one staging slot.

    Its buffers and its event are used again for each move, because making new ones would take
    the host as long as launching the graph. So the caller must wait for a move before the next one.

    Attributes:
        words: [2 + capacity] int64, pinned: the copy list, read by the kernel.
        corrupt: [] int64, pinned: written by the kernel if it unpacks.
        end: recorded after each replay.
    """

    graph: torch.cuda.CUDAGraph
    words: NDArray[np.int64]
    corrupt: NDArray[np.int64]
    end: torch.cuda.Event

    def replay(self, rows: NDArray[np.int64], seed: int, stream: torch.cuda.Stream) -> None:
        """Launch the move on a stream."""
        fill_copy_list(self.words, rows, seed)
        self.corrupt[()] = 0
        launch_graph(self.graph, stream)
        self.end.record(stream)


@dataclass(slots=True)
class BlockMover:
    """Moves blocks of one pool, on its own stream so that a long step does not delay a transfer.

    Attributes:
        ops: the operations for the pool's device.
        kv_pool: [NB, L, N, KH, BS, D].
        layout: of the blocks.
    """

    ops: Ops
    kv_pool: torch.Tensor
    layout: KvLayout
    _rows: torch.Tensor = field(init=False)  # the pool, a row a layer group
    _stream: torch.cuda.Stream | None = None
    _packing: dict[int, _MoveGraph] = field(default_factory=dict)  # by the buffer's address
    _unpacking: dict[int, _MoveGraph] = field(default_factory=dict)
    _empty_move: _MoveGraph | None = None  # moves nothing, so a launch need not wait for another
    _empty_staging: torch.Tensor | None = None  # its staging

    def __post_init__(self) -> None:
        self._rows = self.kv_pool.view(self.kv_pool.shape[0] * len(self.layout.layer_groups), -1)

    def record_event(self, *, in_graph: bool = False) -> DeviceEvent:
        """Record an event after all work launched so far on the current stream.

        Args:
            in_graph: the stream is being captured: each replay of the graph records the event.
        """
        if not self.kv_pool.is_cuda:
            return None
        event = torch.cuda.Event(external=in_graph)
        event.record()
        return event

    def pack(self, move: BlockMove, after: DeviceEvent) -> PendingMove:
        """Gather blocks into a staging buffer, after an event.

        Args:
            move: which blocks, and where to.
            after: an event that `record_event` returned.

        Raises:
            UnsupportedShapeError: staging is too short.
        """
        rows = pool_rows(self.layout, move.block_ids, move.groups)
        if move.parts > 1:
            with self._moving(after):
                self._pack_parts(rows, move)
                return PendingMove(self.record_event())
        graph = self._packing.get(move.staging.data_ptr())
        if graph is not None:
            graph.replay(rows, move.seed, self._stream_after(after))
            return PendingMove(graph.end)
        with self._moving(after):
            self.ops.pack_blocks(self._rows, self._copy_list(rows, move.seed), move.staging)
            return PendingMove(self.record_event())

    def unpack(self, move: BlockMove, after: DeviceEvent) -> PendingCheck:
        """Scatter a staging buffer into blocks, after an event; arguments as in `pack`."""
        rows = pool_rows(self.layout, move.block_ids, move.groups)
        if move.parts > 1:
            with self._moving(after):
                corrupt = self._unpack_parts(rows, move)
                return PendingCheck(downloaded(corrupt).numpy(), self.record_event())
        graph = self._unpacking.get(move.staging.data_ptr())
        if graph is not None:
            graph.replay(rows, move.seed, self._stream_after(after))
            return PendingCheck(graph.corrupt, graph.end)
        with self._moving(after):
            corrupt = torch.zeros((), dtype=torch.int64, device=self.kv_pool.device)
            copy_list = self._copy_list(rows, move.seed)
            self.ops.unpack_blocks(move.staging, self._rows, copy_list, corrupt)
            return PendingCheck(downloaded(corrupt).numpy(), self.record_event())

    # The heads in several parts, for a worker with more ranks

    def _pack_parts(self, rows: NDArray[np.int64], move: BlockMove) -> None:
        index, copy_list = self._upload(rows), self._copy_list(np.arange(len(rows)), move.seed)
        for heads, part in self._parts(len(rows), move.staging, move.parts):
            self.ops.pack_blocks(heads[index].flatten(1), copy_list, part)

    def _unpack_parts(self, rows: NDArray[np.int64], move: BlockMove) -> torch.Tensor:
        """Return whether a checksum is wrong, as `ops.unpack_blocks` reports it."""
        device = self.kv_pool.device
        corrupt = torch.zeros((), dtype=torch.int64, device=device)
        # Chosen on the host: to count what a mask on the device selects would wait for the device.
        written = np.flatnonzero(rows >= 0)
        sources, targets = self._upload(written), self._upload(rows[written])
        copy_list = self._copy_list(np.arange(len(rows)), move.seed)
        for heads, part in self._parts(len(rows), move.staging, move.parts):
            own = torch.empty((len(rows), *heads.shape[1:]), dtype=torch.uint8, device=device)
            self.ops.unpack_blocks(part, own.flatten(1), copy_list, corrupt)
            heads[targets] = own[sources]
        return corrupt

    def _parts(
        self, num_rows: int, staging: torch.Tensor, parts: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each part of the heads in the pool, and its place in staging.

        In the pool it is `[rows, layers * components, heads, bytes]` uint8.

        Raises:
            UnsupportedShapeError: the heads have no such parts, or staging is too short.
        """
        layout = self.layout
        if (divided := layout.divided(layout.ranks * parts)) is None:
            raise UnsupportedShapeError(f"{layout.token.heads} heads do not make {parts} parts")
        head_bytes = layout.block_size * layout.token.size * self.kv_pool.element_size()
        rows = self._rows.view(torch.uint8)
        heads = rows.view(len(rows), -1, layout.token.heads, head_bytes).chunk(parts, 2)
        size = part_bytes(divided, num_rows, 1)
        if staging.numel() < parts * size:
            raise UnsupportedShapeError(f"{parts} parts of {size} bytes do not fit into staging")
        yield from zip(heads, staging.narrow(0, 0, parts * size).split(size), strict=True)

    def queue(self, work: Callable[[], object]) -> PendingMove:
        """Launch other work after the moves so far, by calling `work`."""
        with self._moving(None):
            work()
            return PendingMove(self.record_event())

    def warm_launch_path(self) -> None:
        """Launch an unpacking of no blocks, if there are graphs; see `BlockMoves`."""
        if self._empty_move is not None:
            self._empty_move.replay(_NO_ROWS, 0, self._stream_after(None))

    def fence(self) -> None:
        """Have later work on the current stream wait for the moves so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.kv_pool.device).wait_stream(self._stream)

    def capture_packing(self, buffers: Iterable[torch.Tensor]) -> None:
        """Capture CUDA graphs of packing into these staging slots; nothing else may run."""
        self._capture(
            buffers,
            self._packing,
            lambda copy_list, buffer, corrupt: self.ops.pack_blocks(self._rows, copy_list, buffer),
        )

    def capture_unpacking(self, buffers: Iterable[torch.Tensor]) -> None:
        """Capture CUDA graphs of unpacking from these staging slots; nothing else may run."""
        size, device = packed_bytes(self.layout, 1), self.kv_pool.device
        self._empty_staging = torch.empty(size, dtype=torch.uint8, device=device)
        self._capture(
            [*buffers, self._empty_staging],
            self._unpacking,
            lambda copy_list, buffer, corrupt: self.ops.unpack_blocks(
                buffer, self._rows, copy_list, corrupt
            ),
        )
        self._empty_move = self._unpacking.pop(self._empty_staging.data_ptr(), None)

    @torch.inference_mode()
    def _capture(
        self, buffers: Iterable[torch.Tensor], graphs: dict[int, _MoveGraph], move: _Move
    ) -> None:
        if not self.kv_pool.is_cuda:
            return
        pool = GraphPool(self.kv_pool.device)  # moves are launched one after the other
        stream = self._stream_after(None)
        for buffer in buffers:
            graphs[buffer.data_ptr()] = graph = self._capture_move(pool, buffer, move)
            graph.replay(_NO_ROWS, 0, stream)  # the first launch of a graph takes longer
        stream.synchronize()

    def _capture_move(self, pool: GraphPool, buffer: torch.Tensor, move: _Move) -> _MoveGraph:
        copy_list = empty_copy_list(max_blocks(self.layout, buffer.shape[0], 1)).pin_memory()
        corrupt = torch.zeros((), dtype=torch.int64).pin_memory()

        def step() -> torch.Tensor:
            move(copy_list, buffer, corrupt)
            return corrupt

        graph, _ = pool.capture(step, "a move of KV blocks")
        # The arrays keep the memory.
        return _MoveGraph(graph, copy_list.numpy(), corrupt.numpy(), torch.cuda.Event())

    def _copy_list(self, rows: NDArray[np.int64], seed: int) -> torch.Tensor:
        host = empty_copy_list(len(rows))
        fill_copy_list(host.numpy(), rows, seed)
        return self._upload(host.numpy())

    def _upload(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        return uploaded(torch.from_numpy(numbers), self.kv_pool.device)

    def _stream_after(self, after: DeviceEvent) -> torch.cuda.Stream:
        """Return the stream of the moves, after making it wait for an event."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.kv_pool.device, priority=-1)
        if after is not None:
            self._stream.wait_event(after)
        return self._stream

    @contextmanager
    def _moving(self, after: DeviceEvent) -> Iterator[None]:
        with torch.inference_mode():
            if not self.kv_pool.is_cuda:
                yield
                return
            with torch.cuda.stream(self._stream_after(after)):
                yield
