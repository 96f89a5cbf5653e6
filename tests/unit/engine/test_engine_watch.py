from dataclasses import dataclass

from pagewire.shared.worker.engine_watch import POLL_INTERVAL_S, EngineWatch


@dataclass
class Engine:
    iterations: int = 0
    has_thread: bool = True

    def is_running(self) -> bool:
        return self.has_thread


class Watched:
    """An engine, polled with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine = Engine()
        self.watch = EngineWatch(self.engine, lambda: self.now)
        assert self.is_alive_after(0.0)

    def is_alive_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.watch.poll(5.0)


def test_an_engine_that_iterates_is_alive():
    watched = Watched()
    for _ in range(20):
        watched.engine.iterations += 1
        assert watched.is_alive_after(1.0)


def test_an_engine_that_hangs_is_silent_and_comes_back():
    watched = Watched()
    assert [watched.is_alive_after(0.5) for _ in range(12)] == [True] * 10 + [False] * 2
    watched.engine.iterations += 1
    assert watched.is_alive_after(0.5)
    assert watched.is_alive_after(0.5)


def test_a_process_that_was_stopped_does_not_count_against_the_engine():
    watched = Watched()
    assert watched.is_alive_after(3600.0)
    assert watched.is_alive_after(3600.0)
    assert [watched.is_alive_after(POLL_INTERVAL_S) for _ in range(4)] == [True] * 3 + [False]


def test_silence_before_the_start_does_not_count():
    watched = Watched()
    watched.engine.has_thread = False
    assert not any(watched.is_alive_after(1.0) for _ in range(20))
    watched.engine.has_thread = True
    assert watched.is_alive_after(1.0)


def test_an_engine_without_a_thread_is_not_alive():
    watched = Watched()
    watched.engine.has_thread = False
    watched.engine.iterations += 1
    assert not watched.is_alive_after(0.1)
