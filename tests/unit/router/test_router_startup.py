"""When `/health` says ok for the first time."""

from __future__ import annotations

from typing import Any

from pagewire.services.router.cluster.startup import Startup
from pagewire.shared.cluster.worker_record import LINK_WAIT_S


def prefill(state: str = "ready") -> dict[str, Any]:
    return {"id": "prefill-0", "state": state, "missing_links": []}


def decode(*, linked: bool = False, name: str = "decode-0") -> dict[str, Any]:
    missing = [] if linked else ["prefill-0"]
    return {"id": name, "state": "ready", "missing_links": missing}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_expectations_nothing_is_awaited() -> None:
    assert Startup([]).waiting_for([]) == []


def test_all_expected_workers_and_links_are_awaited() -> None:
    startup = Startup(["prefill-0", "decode-0"])
    assert startup.waiting_for([]) == ["decode-0", "prefill-0"]
    assert startup.waiting_for([decode(), prefill("draining")]) == ["prefill-0"]
    assert startup.waiting_for([decode(), prefill()]) == ["the KV link prefill-0 -> decode-0"]
    assert startup.waiting_for([decode(linked=True), prefill()]) == []


def test_the_start_is_over_once() -> None:
    startup = Startup(["prefill-0", "decode-0"])
    assert startup.waiting_for([decode(linked=True), prefill()]) == []
    assert startup.waiting_for([decode()]) == []


def test_links_that_cannot_be_had_are_awaited_for_a_while() -> None:
    clock = Clock()
    startup = Startup(["prefill-0", "decode-0"], clock)
    assert startup.waiting_for([decode(), prefill()])
    clock.now += LINK_WAIT_S
    assert startup.waiting_for([decode(), prefill()])
    assert startup.waiting_for([decode()]) == ["prefill-0"]  # it has died: from the beginning
    clock.now += 1
    assert startup.waiting_for([decode(), prefill()])
    clock.now += LINK_WAIT_S + 1
    assert startup.waiting_for([decode(), prefill()]) == []


def test_an_expected_worker_with_another_model_is_not_awaited() -> None:
    startup = Startup(["prefill-0", "decode-0"])
    assert startup.waiting_for([decode(linked=True), prefill("another model")]) == []


def test_strangers_are_not_awaited() -> None:
    assert Startup(["decode-0"]).waiting_for([decode(), prefill(), decode(name="other")]) == []
