import asyncio
import random
import threading
import time

import pytest
import torch

from pagewire.shared.errors import ConfigError, IntegrityError, TransferError, TransferTimeoutError
from pagewire.shared.transfer.staging import StagingPool, StagingSlot, _Waiter
from pagewire.tests.support.aio import run_async

CPU = torch.device("cpu")


def make_pool(num_slots: int = 2, slot_bytes: int = 8) -> StagingPool:
    return StagingPool(num_slots, slot_bytes, CPU)


def test_slots_are_disjoint_parts_of_one_allocation() -> None:
    pool = make_pool(num_slots=3, slot_bytes=5)
    slots = [pool.try_acquire() for _ in range(3)]
    for slot in slots:
        assert slot is not None
        assert slot.buffer.shape == (5,)
        assert slot.buffer.dtype == torch.uint8
        slot.buffer.fill_(slot.index)
    assert pool.memory[:, :5].tolist() == [[0] * 5, [1] * 5, [2] * 5]
    assert pool.device == CPU


def test_try_acquire_returns_none_when_all_slots_are_held() -> None:
    pool = make_pool(num_slots=1)
    slot = pool.try_acquire()
    assert slot is not None
    assert pool.num_free == 0
    assert pool.try_acquire() is None
    slot.release()
    assert pool.num_free == 1
    assert pool.try_acquire() is not None


def test_slots_are_aligned_as_the_allocation_is() -> None:
    pool = make_pool(num_slots=3, slot_bytes=257)
    slots = [pool.try_acquire() for _ in range(3)]
    starts = [slot.buffer.data_ptr() - pool.memory.data_ptr() for slot in slots if slot]
    assert [start % 256 for start in starts] == [0, 0, 0]


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 8), (2, 0), (-1, 8)])
def test_sizes_must_be_positive(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least one slot"):
        StagingPool(num_slots, slot_bytes, CPU)


def test_second_release_is_refused_and_harms_nobody() -> None:
    pool = make_pool(num_slots=1)
    stale = pool.try_acquire()
    assert stale is not None
    stale.release()
    with pytest.raises(TransferError, match="twice"):
        stale.release()
    current = pool.try_acquire()
    assert current is not None
    assert current.index == stale.index
    with pytest.raises(TransferError, match="twice"):
        stale.release()  # the slot belongs to somebody else now
    assert pool.num_free == 0
    pool.check_integrity()


def test_integrity_check_names_held_slots() -> None:
    pool = make_pool()
    pool.check_integrity(all_free=True)
    slot = pool.try_acquire()
    assert slot is not None
    pool.check_integrity()
    with pytest.raises(IntegrityError, match=r"slots \[0\] of 2"):
        pool.check_integrity(all_free=True)


def test_integrity_check_finds_lost_slot() -> None:
    pool = make_pool()
    pool._free.popleft()
    with pytest.raises(IntegrityError, match="2 slots"):
        pool.check_integrity()


def test_acquire_takes_a_free_slot_at_once() -> None:
    async def scenario() -> int:
        return (await make_pool().acquire(timeout=0)).index

    assert run_async(scenario()) == 0


def test_acquire_times_out_and_leaves_the_line() -> None:
    async def scenario() -> None:
        pool = make_pool(num_slots=1)
        slot = await pool.acquire()
        with pytest.raises(TransferTimeoutError, match=r"0\.01 s"):
            await pool.acquire(timeout=0.01)
        slot.release()
        assert pool.num_free == 1
        pool.check_integrity(all_free=True)

    run_async(scenario())


def test_waiters_are_served_in_the_order_of_their_coming() -> None:
    async def scenario() -> list[int]:
        pool = make_pool(num_slots=1)
        slot = await pool.acquire()
        served: list[int] = []

        async def wait(number: int) -> None:
            mine = await pool.acquire()
            served.append(number)
            await asyncio.sleep(0)
            mine.release()

        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(wait(number)))
            await asyncio.sleep(0)
        slot.release()
        assert pool.try_acquire() is None  # who waits comes first
        await asyncio.gather(*tasks)
        pool.check_integrity(all_free=True)
        return served

    assert run_async(scenario()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("when", ["before its turn", "at its turn"])
def test_cancelled_waiter_loses_no_slot(when: str) -> None:
    async def scenario() -> None:
        pool = make_pool(num_slots=1)
        slot = await pool.acquire()
        first = asyncio.create_task(pool.acquire())
        second = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        if when == "at its turn":
            slot.release()
            first.cancel()
        else:
            first.cancel()
            await asyncio.sleep(0)
            slot.release()
        await asyncio.wait({first})
        assert first.cancelled()
        (await second).release()
        pool.check_integrity(all_free=True)

    run_async(scenario())


def test_release_from_another_thread_wakes_a_waiter() -> None:
    async def scenario() -> None:
        pool = make_pool(num_slots=1)
        slot = await pool.acquire()
        timer = threading.Timer(0.05, slot.release)
        timer.start()
        (await pool.acquire(timeout=5)).release()
        await asyncio.to_thread(timer.join)
        pool.check_integrity(all_free=True)

    run_async(scenario())


def test_waiter_of_a_closed_loop_is_passed_over() -> None:
    pool = make_pool(num_slots=1)
    slot = pool.try_acquire()
    assert slot is not None
    loop = asyncio.new_event_loop()
    pool._waiters.append(_Waiter(loop))  # as a loop leaves it that is closed under its tasks
    loop.close()
    slot.release()
    assert pool.num_free == 1
    pool.check_integrity(all_free=True)


def test_watchers_hear_when_a_slot_is_there_for_try_acquire() -> None:
    async def scenario() -> list[int]:
        calls: list[int] = []
        pool = make_pool(num_slots=1)

        def on_free() -> None:
            calls.append(pool.num_free)

        pool.watch(on_free)
        (await pool.acquire()).release()
        slot = await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        slot.release()  # goes to the waiter: nothing to try for
        assert calls == [1]
        (await waiting).release()
        pool.unwatch(on_free)
        (await pool.acquire()).release()
        return calls

    assert run_async(scenario()) == [1, 1]


def test_threads_and_tasks_together_lose_nothing() -> None:
    pool = StagingPool(3, 8, CPU)
    until = time.monotonic() + 1.0
    owners: dict[int, str] = {}

    def use(slot: StagingSlot, name: str) -> None:
        assert owners.setdefault(slot.index, name) == name
        del owners[slot.index]
        slot.release()

    def engine(name: str) -> None:
        while time.monotonic() < until:
            slot = pool.try_acquire()
            if slot is not None:
                use(slot, name)

    async def waiter(name: str, rng: random.Random) -> None:
        while time.monotonic() < until:
            try:
                slot = await pool.acquire(timeout=rng.choice([0.0, 0.001, None]))
            except TransferTimeoutError:
                continue
            try:
                await asyncio.sleep(rng.choice([0.0, 0.001]))
            finally:
                use(slot, name)

    async def scenario() -> None:
        rng = random.Random(7)
        tasks = [asyncio.create_task(waiter(f"task {i}", rng)) for i in range(6)]
        while time.monotonic() < until:
            victim = rng.choice(tasks)
            victim.cancel()
            await asyncio.wait({victim}, timeout=0.05)
            pool.check_integrity()
            tasks[tasks.index(victim)] = asyncio.create_task(waiter("again", rng))
            await asyncio.sleep(0.005)
        await asyncio.wait(tasks, timeout=5)

    threads = [threading.Thread(target=engine, args=(f"thread {i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    run_async(scenario())
    for thread in threads:
        thread.join()
    pool.check_integrity(all_free=True)
