from dataclasses import dataclass

from pagewire.shared.worker.engine_watch import POLL_INTERVAL_S, EngineWatch


@dataclass
class Engine:
    iterations: int = 0
    has_thread: bool = True

    def is_running(self) -> bool:
        return self.has_thread


class Watched:
    """An engine, looked at with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine = Engine()
        self.watch = EngineWatch(self.engine, lambda: self.now)
        assert self.looks_alive_behind(0.0)

    def looks_alive_behind(self, seconds: float) -> bool:
        self.now += seconds
        return self.watch.poll(5.0)


def test_an_engine_that_iterates_is_alive():
    watched = Watched()
    for _ in range(20):
        watched.engine.iterations += 1
        assert watched.looks_alive_behind(1.0)


def test_an_engine_that_hangs_is_silent_and_comes_back():
    watched = Watched()
    assert [watched.looks_alive_behind(0.5) for _ in range(12)] == [True] * 10 + [False] * 2
    watched.engine.iterations += 1
    assert watched.looks_alive_behind(0.5)
    assert watched.looks_alive_behind(0.5)


def test_a_process_that_was_stopped_does_not_count_against_the_engine():
    watched = Watched()
    assert watched.looks_alive_behind(3600.0)
    assert watched.looks_alive_behind(3600.0)
    assert [watched.looks_alive_behind(POLL_INTERVAL_S) for _ in range(4)] == [True] * 3 + [False]


def test_silence_before_the_start_does_not_count():
    watched = Watched()
    watched.engine.has_thread = False
    assert not any(watched.looks_alive_behind(1.0) for _ in range(20))
    watched.engine.has_thread = True
    assert watched.looks_alive_behind(1.0)


def test_an_engine_without_a_thread_is_not_alive():
    watched = Watched()
    watched.engine.has_thread = False
    watched.engine.iterations += 1
    assert not watched.looks_alive_behind(0.1)
