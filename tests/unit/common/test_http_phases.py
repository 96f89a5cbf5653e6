"""Which connection makes room, and which is overdue."""

from __future__ import annotations

from pagewire.shared.http.phases import FRESH_S, Phase, Phases

DEADLINES = {Phase.ENDING: 2.0, Phase.HEADER: 10.0}


def test_the_longest_waiting_of_the_first_phase_makes_room() -> None:
    phases: Phases[str] = Phases(DEADLINES)
    assert phases.longest_waiting(100) is None
    for at, peer in enumerate(("served", "body", "idle", "old", "new", "ending")):
        phases.add(peer, Phase.HEADER, at)
    phases.move("served", None, 10)
    phases.move("idle", Phase.IDLE, 10)
    phases.move("body", Phase.BODY, 10)
    phases.move("ending", Phase.ENDING, 10)
    phases.move("old", Phase.HEADER, 10)  # it waits for the same as before, and as long
    found = []
    while (peer := phases.longest_waiting(100)) is not None:
        found.append(peer)
        phases.remove(peer)
    assert found == ["ending", "old", "new", "idle", "body"]
    assert len(phases) == 1


def test_those_that_have_just_come_do_not_close_one_another() -> None:
    phases: Phases[str] = Phases(DEADLINES)
    for at, (peer, phase) in enumerate({"idle": Phase.IDLE, "body": Phase.BODY}.items()):
        phases.add(peer, Phase.HEADER, at)
        phases.move(peer, phase, at)
    for peer in ("new", "newer"):
        phases.add(peer, Phase.HEADER, 100)
    assert phases.longest_waiting(100 + FRESH_S) == "new"
    assert phases.longest_waiting(100) == "idle"
    phases.remove("idle")
    assert phases.longest_waiting(100) == "new"


def test_a_connection_is_overdue_by_its_time_in_a_phase() -> None:
    phases: Phases[str] = Phases(DEADLINES)
    phases.add("first", Phase.HEADER, 0)
    phases.add("second", Phase.HEADER, 5)
    assert phases.overdue(9.9) == []
    assert phases.overdue(10) == [("first", Phase.HEADER)]
    phases.move("first", Phase.ENDING, 10)
    assert phases.overdue(12) == [("first", Phase.ENDING)]
    assert phases.overdue(15) == [("first", Phase.ENDING), ("second", Phase.HEADER)]
    phases.move("second", Phase.BODY, 15)
    phases.remove("first")
    assert phases.overdue(1000) == []


def test_one_removed_stays_so() -> None:
    phases: Phases[str] = Phases(DEADLINES)
    phases.add("peer", Phase.HEADER, 0)
    phases.remove("peer")
    phases.remove("peer")
    phases.move("peer", Phase.IDLE, 1)
    phases.move("peer", None, 1)
    assert (len(phases), phases.longest_waiting(100)) == (0, None)
