"""Copies tensors from safetensors files to a device: in parts, by several threads.

Files are read, not mapped: a mapped file that is truncated meanwhile would kill the process by a
signal. A part is read directly into its tensor if that is on the CPU and has the same dtype, else
through a buffer. For a GPU, buffers are in pinned memory, so that one is filled while the one
before is copied: with as many parts as follow each other in the file, since a mixture of experts
has tens of thousands of small ones. Apart from the buffers, no host memory is needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.safetensors_header import TensorEntry, WeightsFile
from pagewire.shared.model.shard import Cuts
from pagewire.shared.model.weights_regions import regions

PART_BYTES = 8 << 20
# A rank reads its columns of each row with a call of their own. If the columns of other ranks in
# between have at most this many bytes, it reads them along: that is mostly quicker.
GAP_BYTES = 16 << 10
MAX_THREADS = 8
BUFFERS = 2  # buffers of one thread

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class TensorCopy(NamedTuple):
    """A tensor of a file, and the tensor to fill: any device and dtype.

    Attributes:
        cuts: which part of the file's tensor fills the target, which has that part's shape.
    """

    file: WeightsFile
    entry: TensorEntry
    target: torch.Tensor
    cuts: Cuts = ()

    @property
    def num_bytes(self) -> int:
        """The bytes that are needed of the file."""
        return self.target.numel() * DTYPES[self.entry.dtype].itemsize


class _Part(NamedTuple):
    """A `Region` of a file whose numbers have a dtype."""

    path: Path
    dtype: torch.dtype
    start: int
    target: torch.Tensor
    pitch: int

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize


def copy_weights(fills: Iterable[TensorCopy], on_bytes: Callable[[int], None]) -> None:
    """Fill tensors of one device from files.

    Args:
        fills: tensors with dtypes of `DTYPES`.
        on_bytes: called by any thread with the number of bytes of parts that it has read.

    Raises:
        ModelLoadError: a file is shorter than its header says, or cannot be read; one line.
    """
    ordered = sorted(fills, key=lambda fill: (fill.file.path, fill.entry.start))
    if not ordered:
        return
    device = ordered[0].target.device
    parts = _Parts(_batches(part for fill in ordered for part in _parts(fill)))
    count = num_threads(sum(fill.num_bytes for fill in ordered))
    paths = {fill.file.path for fill in ordered}
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(_opened(path)) for path in paths}
        pool = stack.enter_context(ThreadPoolExecutor(count, "weights"))
        stack.callback(parts.stop)  # also when the wait is interrupted
        ends = [
            pool.submit(_copy_parts, parts, files, device, on_bytes, parts.stop)
            for _ in range(count)
        ]
        for end in ends:
            end.result()


def num_threads(num_bytes: int) -> int:
    """Return how many threads copy a checkpoint of this size."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_THREADS, max(2, cores), -(-num_bytes // PART_BYTES)))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unreadable(path: Path, exc: OSError) -> ModelLoadError:
    return ModelLoadError(f"weights file {path} cannot be read ({exc.strerror}); download it again")


def _parts(fill: TensorCopy) -> Iterator[_Part]:
    dtype = DTYPES[fill.entry.dtype]
    start, itemsize = fill.entry.start, dtype.itemsize
    for region in regions(fill.target, fill.cuts, start, itemsize, PART_BYTES):
        yield _Part(fill.file.path, dtype, *region)


def _batches(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    """Yield the parts, those together that follow each other in a file and fit into a buffer."""
    batch: list[_Part] = []
    for part in parts:
        if batch and not _follows(batch, part):
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _follows(batch: list[_Part], part: _Part) -> bool:
    first, last = batch[0], batch[-1]
    offset = part.start - first.start
    return (
        part.path == last.path
        and part.start == last.start + last.num_bytes
        and not part.pitch
        and not last.pitch
        and offset % part.dtype.itemsize == 0
        and offset + part.num_bytes <= PART_BYTES
    )


class _Parts:
    """The parts that are still to be copied, in batches, for all threads."""

    def __init__(self, batches: Iterator[list[_Part]]) -> None:
        self._batches = batches
        self._lock = threading.Lock()
        self._is_stopped = False

    def stop(self) -> None:
        """Have the threads end: no more batches are handed out."""
        self._is_stopped = True

    def __iter__(self) -> Iterator[list[_Part]]:
        while True:
            with self._lock:
                batch = None if self._is_stopped else next(self._batches, None)
            if batch is None:
                return
            yield batch


def _copy_parts(
    parts: _Parts,
    files: Mapping[Path, int],
    device: torch.device,
    on_bytes: Callable[[int], None],
    stop_all: Callable[[], None],
) -> None:
    """Copy parts until none is left, in one thread. An error stops the others."""
    copier = _GpuCopier(device) if device.type == "cuda" else _CpuCopier()
    try:
        for batch in parts:
            copier.copy(batch, files[batch[0].path])
            on_bytes(sum(part.num_bytes for part in batch))
        copier.finish()
    except BaseException:  # the thread's future raises it again
        stop_all()
        raise


class _CpuCopier:
    """Reads into the target, or into a buffer if the target has another dtype or gaps."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._reader = _Reader()

    def copy(self, batch: list[_Part], descriptor: int) -> None:
        for part in batch:
            self._copy(part, descriptor)

    def _copy(self, part: _Part, descriptor: int) -> None:
        target = part.target
        if target.dtype == part.dtype and target.is_contiguous():
            flat = target.view(-1)
            if flat.stride() == (1,):  # one number of a matrix may have any stride
                self._reader.read([part], descriptor, flat.view(torch.uint8))
                return
        if self._buffer is None:
            self._buffer = torch.empty(PART_BYTES, dtype=torch.uint8)
        (read,) = self._reader.read([part], descriptor, self._buffer)
        target.copy_(read)

    def finish(self) -> None:
        """Do nothing: all copies are done."""


class _GpuCopier:
    """Reads into pinned buffers in turn, and copies them on its own stream."""

    def __init__(self, device: torch.device) -> None:
        # Of this thread. To switch to another GPU and back would take memory on that one, too.
        torch.cuda.set_device(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Queued kernels may still use memory that now belongs to a target.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [
            (torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(BUFFERS)
        ]
        self._next = 0
        self._reader = _Reader()

    def copy(self, batch: list[_Part], descriptor: int) -> None:
        buffer, is_free = self._buffers[self._next]
        self._next = (self._next + 1) % BUFFERS
        is_free.synchronize()  # wait for the last copy from this buffer
        tensors = self._reader.read(batch, descriptor, buffer)
        with torch.cuda.stream(self._stream):
            for part, read in zip(batch, tensors, strict=True):
                if part.target.dtype != part.dtype:  # converted on the GPU, not on the host
                    read = read.to(self._device, non_blocking=True)
                part.target.copy_(read, non_blocking=True)
            is_free.record()

    def finish(self) -> None:
        self._stream.synchronize()


class _Reader:
    """Reads parts of files, in one thread."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None  # whole rows, of which columns are needed

    def read(self, batch: list[_Part], descriptor: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Read a batch into the start of a byte buffer; return each part in its dtype and shape.

        Raises:
            ModelLoadError: the file ends before the last part, or cannot be read; one line.
        """
        first, sizes = batch[0], [part.num_bytes for part in batch]
        buffer = buffer[: sum(sizes)]
        if first.pitch:
            self._read_columns(first, descriptor, buffer.view(len(first.target), -1))
        else:
            _read_bytes(first, descriptor, memoryview(buffer.numpy().data), first.start)
        return [
            read.view(part.dtype).view(part.target.shape)
            for part, read in zip(batch, buffer.split(sizes), strict=True)
        ]

    def _read_columns(self, part: _Part, descriptor: int, columns: torch.Tensor) -> None:
        count, width = columns.shape
        if part.pitch - width > GAP_BYTES or count == 1:
            rows = memoryview(columns.view(-1).numpy().data)
            for index in range(count):
                row = rows[index * width : (index + 1) * width]
                _read_bytes(part, descriptor, row, part.start + index * part.pitch)
            return
        if self._rows is None:
            self._rows = torch.empty(PART_BYTES, dtype=torch.uint8)
        read = self._rows[: (count - 1) * part.pitch + width]
        _read_bytes(part, descriptor, memoryview(read.numpy().data), part.start)
        columns.copy_(read.as_strided((count, width), (part.pitch, 1)))


def _read_bytes(part: _Part, descriptor: int, rest: memoryview, start: int) -> None:
    """Fill memory from this byte of a part's file on.

    Raises:
        ModelLoadError: the file ends before, or cannot be read; one line.
    """
    while rest:
        try:
            count = os.preadv(descriptor, [rest], start)
        except OSError as exc:
            raise _unreadable(part.path, exc) from exc
        if not count:
            raise ModelLoadError(
                f"weights file {part.path} is truncated or corrupt: it ends at byte {start}; "
                "download it again"
            )
        rest, start = rest[count:], start + count
