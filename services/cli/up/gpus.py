"""Which GPUs the workers of a local cluster get: a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from pagewire.shared.base.errors import ConfigError


def place(
    ranks: Iterable[int], num_gpus: int, links: frozenset[tuple[int, int]] = frozenset()
) -> list[tuple[int, ...]]:
    """Return the GPUs of each worker, by index: one for each of its ranks.

    A worker takes GPUs that have the fewest ranks so far, and of these such as are linked.

    Args:
        ranks: each worker's number of ranks.
        num_gpus: number of GPUs.
        links: pairs of GPUs with a link between them, the smaller index first.

    Raises:
        ConfigError: a worker has more ranks than there are GPUs.
    """
    load = [0] * num_gpus
    placed = []
    for count in ranks:
        if count > num_gpus:
            raise ConfigError(
                f"--tensor-parallel-size {count} needs {count} GPUs, and {num_gpus} can be used: "
                "lower it, or see CUDA_VISIBLE_DEVICES"
            )
        groups = combinations(range(num_gpus), count)
        chosen = min(groups, key=lambda group: _rating(group, load, links))
        for gpu in chosen:
            load[gpu] += 1
        placed.append(chosen)
    return placed


def _rating(
    group: tuple[int, ...], load: Sequence[int], links: frozenset[tuple[int, int]]
) -> tuple[int, int, tuple[int, ...]]:
    """Return what is smaller for a better group."""
    return sum(load[gpu] for gpu in group), -len(links.intersection(combinations(group, 2))), group


def visible(gpus: Sequence[str], own: tuple[int, ...]) -> list[str]:
    """Return all GPUs with a worker's own first, which its ranks take in this order.

    The others stay visible because CUDA IPC reaches only devices that a process can see.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them.
        own: indices of the worker's.
    """
    others = [*range(own[0], len(gpus)), *range(own[0])]
    return [gpus[index] for index in (*own, *(gpu for gpu in others if gpu not in own))]
