"""Sums and logits among ranks on the GPUs of one host, by kernels that write to others' memory.

Each rank allocates a buffer and maps those of the others by CUDA IPC. From then on the host takes
no part: kernels exchange values through these buffers (`kernels/_rank_exchange.py`), also when a
CUDA graph replays them. Ranks may share a GPU, which then runs their processes in turn, so that an
exchange takes milliseconds.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from pagewire.kernels._launch import sm_count
from pagewire.kernels.all_gather import Columns, all_gather
from pagewire.kernels.all_reduce import all_reduce
from pagewire.kernels.rank_memory import PROGRAMS, RankMemory, buffer_bytes, make_rank_memory
from pagewire.kernels.reduce_norm import reduce_norm, reduces_and_norms
from pagewire.shared.base.errors import ConfigError, RankError, TransferError
from pagewire.shared.engine.ranks.communicator import STEP_S, SocketCommunicator
from pagewire.shared.kv import device_memory

logger = logging.getLogger(__name__)

_ADVICE = (
    "the ranks of a model need GPUs with peer access to each other, see nvidia-smi topo -p2p rw, "
    "and CUDA IPC between their processes: choose other GPUs in CUDA_VISIBLE_DEVICES, or lower "
    "--tensor-parallel-size"
)


class _Offer(msgspec.Struct, frozen=True):
    """What a rank reports to the others while it opens.

    Attributes:
        gpu: name of its GPU, for errors.
        handle: CUDA IPC handle of its buffer, if it has one.
        problem: why it cannot go on; empty if it can.
        programs: how many of an exchange its GPU runs at once, one on each multiprocessor.
    """

    gpu: str
    handle: Annotated[bytes, Meta(max_length=device_memory.HANDLE_BYTES)] = b""
    problem: str = ""
    programs: Annotated[int, Meta(ge=1, le=PROGRAMS)] = PROGRAMS


@dataclass(slots=True, eq=False)
class CudaCommunicator:
    """The `Communicator` of a rank whose model is on a GPU.

    Its kernels are launched on the current stream, which must order them: those of one rank must
    not overlap. They allocate nothing but what they return.

    Attributes:
        control: the sockets to the other ranks; who made them closes them.
        device: this rank's GPU.
        memory: the buffers of all ranks, as this one sees them.
        timeout_s: how long a kernel waits for another rank.
    """

    control: SocketCommunicator
    device: torch.device
    memory: RankMemory
    timeout_s: float
    _alone: RankMemory  # in which nobody else is
    _resources: ExitStack
    _columns: dict[int, Columns] = field(default_factory=dict)  # by this rank's number of columns

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, added in their order in float32: the same bits on each.

        Args:
            x: of the same shape on each rank, in float32, float16 or bfloat16; overwritten.
        """
        return all_reduce(x.contiguous(), self.memory)

    def reduce_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what `RmsNorm` returns of the sum over the ranks; None for other sizes."""
        if not reduces_and_norms(x, self.memory):
            return None
        return reduce_norm(x, weight, eps, residual, self.memory)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[N, sum of n]` of each rank's `[N, n]`, in the order of the ranks.

        The numbers of columns are exchanged by the host in the first call with a new `n`.

        Raises:
            RankError: a rank is lost; or such a first call is in the capture of a CUDA graph.
        """
        return all_gather(x, self._columns_of(x.shape[1]), self.memory)

    def rehearse_reduce(self, x: torch.Tensor) -> None:
        """Compile and load the kernel of `reduce(x)`, without the other ranks: `x` stays."""
        all_reduce(x.clone(memory_format=torch.contiguous_format), self._alone)

    def rehearse_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> None:
        """Compile and load the kernel of `reduce_norm`, without the other ranks."""
        if reduces_and_norms(x, self._alone):
            reduce_norm(x, weight, eps, residual, self._alone)

    def rehearse_gather(self, x: torch.Tensor) -> None:
        """Compile and load the kernel of `gather(x)`, whose first call this may be.

        Raises:
            RankError: as `gather`.
        """
        all_gather(x, self._columns_of(x.shape[1]), self._alone)

    def check(self) -> None:
        """Check that no kernel has missed a rank; takes about a microsecond.

        What a step has computed is right if this is called after the step has ended, and returns.

        Raises:
            RankError: one has; names the rank.
        """
        if missing := int(self.memory.missing):
            rank = missing - 1
            raise RankError(f"rank {rank} has not come for {self.timeout_s:g} s", rank)

    def close(self) -> None:
        """Free the memory, once no rank launches anything any more; waits for the device.

        A kernel that waits for another rank gives up at once.
        """
        self._resources.close()

    def _columns_of(self, width: int) -> Columns:
        if (columns := self._columns.get(width)) is not None:
            return columns
        if torch.cuda.is_current_stream_capturing():
            raise RankError(
                f"ranks must gather {width} columns once before a CUDA graph that does is captured"
            )
        widths = self.control.gather(torch.tensor([[width]]))[0].tolist()
        columns = self._columns[width] = Columns.of(tuple(widths), self.device)
        return columns


def open_cuda_communicator(
    control: SocketCommunicator, device: torch.device, count: int, timeout_s: float = STEP_S
) -> CudaCommunicator:
    """Connect the GPUs of all ranks; each calls this at the same time.

    Args:
        control: the sockets to the other ranks.
        device: this rank's GPU; ranks may have the same one.
        count: number of ranks.
        timeout_s: how long a kernel waits for another rank.

    Raises:
        ConfigError: memory cannot be allocated or shared, on any rank; one line.
        RankError: a rank is lost.
    """
    with ExitStack() as undo:
        offer, own = _allocate(device, count, undo)
        offers = _exchange(control, offer)
        addresses, problem = _map_others(offers, control.rank, device, undo)
        addresses.insert(control.rank, own)
        _exchange(control, _Offer(offer.gpu, problem=problem))
        programs = min(each.programs for each in offers)
        memory = make_rank_memory(control.rank, addresses, device, timeout_s, programs)
        alone = make_rank_memory(control.rank, [own] * count, device, 0.0, programs)
        undo.callback(_Stop(memory))
        torch.cuda.synchronize(device)
        return CudaCommunicator(control, device, memory, timeout_s, alone, undo.pop_all())


def _allocate(device: torch.device, count: int, undo: ExitStack) -> tuple[_Offer, int]:
    """Allocate this rank's buffer; return its address. If that fails, the offer says why."""
    is_gpu = device.type == "cuda"
    gpu = f"GPU {device.index} ({torch.cuda.get_device_name(device)})" if is_gpu else "a CPU"
    try:
        buffer = device_memory.allocate((buffer_bytes(count),), device, "exchanges among ranks")
        undo.callback(_free, buffer)
        handle = device_memory.export_handle(buffer)
    except ConfigError as exc:
        return _Offer(gpu, problem=str(exc)), 0
    except TransferError as exc:
        return _Offer(gpu, problem=f"its memory cannot be shared: {exc}; {_ADVICE}"), 0
    buffer.zero_()
    torch.cuda.synchronize(device)  # before another rank writes
    programs = min(PROGRAMS, sm_count(device)) if is_gpu else PROGRAMS
    return _Offer(gpu, handle, programs=programs), buffer.data_ptr()


def _map_others(
    offers: list[_Offer], rank: int, device: torch.device, undo: ExitStack
) -> tuple[list[int], str]:
    """Map the buffers of all other ranks; return the addresses, and why one cannot be mapped."""
    addresses: list[int] = []
    for other, offer in enumerate(offers):
        if other == rank:
            continue
        try:
            addresses.append(device_memory.map_handle(offer.handle, device))
        except TransferError as exc:
            of = f"the memory of rank {other}, on {offer.gpu},"
            return addresses, f"{of} cannot be mapped: {exc}; {_ADVICE}"
        undo.callback(_unmap, addresses[-1], device)
    return addresses, ""


def _exchange(control: SocketCommunicator, offer: _Offer) -> list[_Offer]:
    """Return the offers of all ranks, in their order.

    Raises:
        ConfigError: one has a problem.
        RankError: a rank is lost.
    """
    data = msgspec.msgpack.encode(offer)
    sizes = control.gather(torch.tensor([[len(data)]]))[0].tolist()
    row = control.gather(torch.frombuffer(bytearray(data), dtype=torch.uint8)[None])[0]
    parts = [bytes(part.tolist()) for part in row.split(sizes)]
    offers = [msgspec.msgpack.decode(part, type=_Offer) for part in parts]
    for rank, each in enumerate(offers):
        if each.problem:
            raise ConfigError(f"rank {rank}, on {each.gpu}: {each.problem}")
    return offers


class _Stop:
    """Has waiting kernels give up, and waits for the device.

    All that this needs is allocated before, since an allocation may wait for the kernels.
    """

    def __init__(self, memory: RankMemory) -> None:
        self._timeout = memory.state[:1]
        self._stream = torch.cuda.Stream(self._timeout.device)
        self._zero = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def __call__(self) -> None:
        with suppress(RuntimeError):  # the device may have failed
            with torch.cuda.stream(self._stream):
                self._timeout.copy_(self._zero, non_blocking=True)
            torch.cuda.synchronize(self._timeout.device)


def _free(buffer: torch.Tensor) -> None:
    try:
        device_memory.free(buffer)
    except TransferError as exc:
        logger.warning("cannot free the memory for exchanges among ranks: %s", exc)


def _unmap(address: int, device: torch.device) -> None:
    try:
        device_memory.unmap(address, device)
    except TransferError as exc:
        logger.warning("cannot unmap the memory of another rank: %s", exc)
