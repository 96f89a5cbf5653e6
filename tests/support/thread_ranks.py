"""The ranks of a model as threads of one process, each with its part of the weights and the KV."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from pagewire.kernels import BackendName, load_ops
from pagewire.shared.model.config import load_config
from pagewire.shared.model.inputs import ForwardBatch, LayerKv, OnLayerEnd
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.loader import LoadFormat, load_model
from pagewire.shared.model.shard import Communicator, Shard
from pagewire.shared.settings.types import Quantization

WAIT_S = 60.0
T = TypeVar("T")


class ThreadRanks:
    """Threads that meet at a barrier, and read what the others have put down before.

    They compute in turn, as Triton's interpreter can run one kernel at a time.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=WAIT_S)
        self._values: list[torch.Tensor | None] = [None] * count
        self._pool = ThreadPoolExecutor(count, "rank")
        self._turn = threading.Lock()

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call a function with each rank, at the same time, and return what each returned."""

        def call(rank: int) -> T:
            try:
                with self._turn:
                    return function(rank)
            except BaseException:  # the future raises it again
                self._barrier.abort()
                raise

        calls = [self._pool.submit(call, rank) for rank in range(self.count)]
        errors = [error for each in calls if (error := each.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [each.result() for each in calls]

    def exchange(
        self, rank: int, own: torch.Tensor, use: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Return what `use` makes of the tensors of all ranks."""
        self._values[rank] = own
        self._meet()
        result = use(self._values)
        self._meet()
        return result

    def _meet(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    def close(self) -> None:
        self._pool.shutdown()


@dataclass
class ThreadCommunicator:
    """A `Communicator` of one of the threads."""

    ranks: ThreadRanks
    rank: int
    calls: int = 0

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.ranks.exchange(self.rank, x, _summed)

    def reduce_norm(self, *_args: Any) -> None:
        """Return None: there is no kernel for both."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.exchange(self.rank, x, lambda parts: torch.cat(parts, dim=1))


def _summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class RankedModel:
    """Models of all ranks that look like one to `PagedModel`; each has its own pool of KV blocks.

    Fails if hidden states or logits of two ranks differ in any bit.

    Args:
        ranks: number of ranks.
        load: loads one rank's model.
    """

    def __init__(self, ranks: int, load: Callable[[Shard, Communicator], DecoderModel]) -> None:
        self._ranks = ThreadRanks(ranks)
        self.communicators = [ThreadCommunicator(self._ranks, rank) for rank in range(ranks)]
        self.shards = [Shard(rank, ranks) for rank in range(ranks)]
        self.models = [load(*each) for each in zip(self.shards, self.communicators, strict=True)]
        self.config = self.models[0].config
        self.embed_tokens = self.models[0].embed_tokens
        self.layers = self.models[0].layers
        self._pools: dict[int, list[list[LayerKv]]] = {}

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[LayerKv],
        on_layer_end: OnLayerEnd | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pools = self._pools.setdefault(id(kv), [self._pool(kv, shard) for shard in self.shards])
        return self._same(lambda rank: self.models[rank].forward(batch, pools[rank], rows=rows))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._same(lambda rank: self.models[rank].compute_logits(hidden))

    def _pool(self, kv: Sequence[LayerKv], shard: Shard) -> list[LayerKv]:
        """Return a rank's caches: those given, with the rank's heads."""
        block_size = kv[0].cache.shape[-2]
        heads = self.config.kv_layout(block_size, "float32", shard).token.heads
        return [LayerKv(each.group, each.cache[:, :, :heads].clone()) for each in kv]

    def _same(self, function: Callable[[int], torch.Tensor]) -> torch.Tensor:
        first, *others = self._ranks.run(function)
        assert all(torch.equal(first, other) for other in others)
        return first

    def close(self) -> None:
        self._ranks.close()


@contextmanager
def load_ranks(
    path: Path,
    count: int,
    backend: BackendName = "torch",
    device: str = "cpu",
    *,
    quantization: Quantization = "auto",
    load_format: LoadFormat = "safetensors",
    batch_invariant: bool = False,
) -> Iterator[Any]:
    """Yield a checkpoint's model in float32, divided among ranks that share a device.

    The type is Any, as tests pass it on in place of a `DecoderModel`.
    """
    config = load_config(path, quantization=quantization)

    def load(shard: Shard, communicator: Communicator) -> DecoderModel:
        return load_model(
            path,
            config,
            torch.device(device),
            torch.float32,
            load_ops(backend, device, batch_invariant),
            load_format,
            shard=shard,
            communicator=communicator,
        )

    model = RankedModel(count, load)
    try:
        yield model
    finally:
        model.close()
