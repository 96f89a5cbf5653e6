"""Staging slots: the bounded memory that KV pieces are moved through.

A pool is one allocation, so that a transport registers it once. Slots are the credits of the flow
control: a receiver takes a free slot before it lets a payload come, and a sender packs into one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

import torch

from pagewire.shared.errors import ConfigError, IntegrityError, TransferError, TransferTimeoutError

_ALIGNMENT = 256  # of each slot: what kernels are quickest with


class StagingSlot:
    """One slot, held by whoever acquired it until `release`.

    Every acquisition makes a new object, so that a stale handle can never release a slot that
    belongs to somebody else by now.

    Attributes:
        index: position in the pool.
        buffer: 1-D uint8 tensor of the pool's `slot_bytes`.
    """

    __slots__ = ("_pool", "_released", "buffer", "index")

    def __init__(self, pool: StagingPool, index: int, buffer: torch.Tensor) -> None:
        self._pool = pool
        self._released = False
        self.index = index
        self.buffer = buffer

    def release(self) -> None:
        """Give the slot back; from any thread.

        Raises:
            TransferError: it was given back before.
        """
        self._pool._release(self)


class _Waiter:
    """Somebody in line for a slot.

    Attributes:
        slot: set under the pool's lock when it is this waiter's turn.
        arrived: resolves in the waiter's own loop, after `slot` was set.
    """

    __slots__ = ("arrived", "loop", "slot")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.arrived: asyncio.Future[None] = loop.create_future()
        self.slot: StagingSlot | None = None

    def wake(self) -> None:
        if not self.arrived.done():
            self.arrived.set_result(None)


class StagingPool:
    """A fixed number of equal slots, handed out first come, first served.

    `try_acquire`, `release` and the properties may be used from any thread, `acquire` from any
    event loop. Nobody waits while a slot is free: a slot that comes back goes straight to whoever
    waits longest.

    Attributes:
        num_slots: how many slots there are.
        slot_bytes: size of each.
        memory: the allocation, uint8 [num_slots, slot_bytes and what aligns the next slot].
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        device: torch.device,
        *,
        pin_memory: bool = False,
    ) -> None:
        """Allocate the slots.

        Args:
            num_slots: at least one.
            slot_bytes: at least one.
            device: where the slots lie. On CUDA the memory must come from plain cudaMalloc
                (PyTorch's expandable segments off), or the GPUs cannot map it for each other.
            pin_memory: page-lock slots in host memory, for copies from and to a GPU.

        Raises:
            ConfigError: a size is not positive.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ConfigError(
                f"staging needs at least one slot of one byte, not {num_slots} of {slot_bytes}"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        stride = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self.memory = torch.empty(
            (num_slots, stride), dtype=torch.uint8, device=device, pin_memory=pin_memory
        )
        self._lock = threading.Lock()
        self._free = deque(range(num_slots))
        self._held: dict[int, StagingSlot] = {}
        self._waiters: deque[_Waiter] = deque()
        self._watchers: tuple[Callable[[], None], ...] = ()  # replaced, never changed

    @property
    def device(self) -> torch.device:
        """Where the slots lie."""
        return self.memory.device

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory of each slot, uint8 [slot_bytes]."""
        return list(self.memory[:, : self.slot_bytes])

    @property
    def num_free(self) -> int:
        """How many slots nobody holds."""
        with self._lock:
            return len(self._free)

    def try_acquire(self) -> StagingSlot | None:
        """Return a free slot, or None if there is none; never waits."""
        with self._lock:
            return self._take() if self._free else None

    async def acquire(self, timeout: float | None = None) -> StagingSlot:
        """Wait for a slot, in line behind those who waited before.

        Args:
            timeout: seconds; None waits until cancelled.

        Raises:
            TransferTimeoutError: no slot came free in time.
        """
        with self._lock:
            if self._free:
                return self._take()
            waiter = _Waiter(asyncio.get_running_loop())
            self._waiters.append(waiter)
        served = False
        try:
            async with asyncio.timeout(timeout):
                await waiter.arrived
            served = True
        except TimeoutError as exc:
            raise TransferTimeoutError(f"no staging slot came free in {timeout} s") from exc
        finally:
            if not served:
                self._abandon(waiter)
        if waiter.slot is None:
            raise IntegrityError("a waiter was woken without a slot")
        return waiter.slot

    def watch(self, on_free: Callable[[], None]) -> None:
        """Tell those who use `try_acquire` when to try again.

        Args:
            on_free: called from the releasing thread, whenever a slot comes back for which nobody
                waits in `acquire`. Must be quick and must not raise.
        """
        with self._lock:
            self._watchers = (*self._watchers, on_free)

    def unwatch(self, on_free: Callable[[], None]) -> None:
        """Stop telling `on_free`; a call that is under way may still come."""
        with self._lock:
            self._watchers = tuple(watcher for watcher in self._watchers if watcher != on_free)

    def check_integrity(self, *, all_free: bool = False) -> None:
        """Check that free and held slots add up.

        Args:
            all_free: nobody may hold a slot.

        Raises:
            IntegrityError: they do not.
        """
        with self._lock:
            free, held = sorted(self._free), sorted(self._held)
            if sorted(free + held) != list(range(self.num_slots)):
                raise IntegrityError(f"{self.num_slots} slots, but {free} free and {held} held")
            if free and self._waiters:
                raise IntegrityError(f"{len(self._waiters)} wait while slots {free} are free")
            if all_free and held:
                raise IntegrityError(f"slots {held} of {self.num_slots} are still held")

    def _take(self) -> StagingSlot:
        """Hand out the slot that has been free longest; the lock is held."""
        index = self._free.popleft()
        slot = StagingSlot(self, index, self.memory[index, : self.slot_bytes])
        self._held[index] = slot
        return slot

    def _release(self, slot: StagingSlot) -> None:
        with self._lock:
            if slot._released:
                raise TransferError(f"staging slot {slot.index} was released twice")
            slot._released = True
            del self._held[slot.index]
            self._free.append(slot.index)
            served = self._serve_next()
            watchers = () if served else self._watchers
        for on_free in watchers:
            on_free()

    def _serve_next(self) -> bool:
        """Give a free slot to the longest waiter, if there is one; the lock is held."""
        while self._waiters:
            waiter = self._waiters.popleft()
            slot = waiter.slot = self._take()
            try:
                waiter.loop.call_soon_threadsafe(waiter.wake)
            except RuntimeError:  # its event loop is closed: nobody is there to take the slot
                slot._released = True
                del self._held[slot.index]
                self._free.appendleft(slot.index)
                continue
            return True
        return False

    def _abandon(self, waiter: _Waiter) -> None:
        """Take a waiter out of the line; a slot it was just given goes on to the next."""
        with self._lock:
            if waiter.slot is None:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                return
        waiter.slot.release()
