"""Two prefill and two decode workers, to which things happen at random."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.shared.base.errors import TransferError
from pagewire.tests.support.kv_pair import KvLink, KvPair, kv_pair
from pagewire.tests.support.kv_sides import KINDS, TIMEOUT_S

pytestmark = pytest.mark.timeout(60)
EVENTS = [
    *["step"] * 8,
    *["ask"] * 2,
    "abort",
    "hold moves",
    "hold writes",
    "hold payloads",
    "hold staging slots",
    "let go",
    "corrupt",
    "fail",
    "lose",
    "lose silently",
    "report",
    "link",
    "wait",
]
FAILURES = ["send", "sent", "receive"]
Event = tuple[str, int, int]


class World:
    """Applies events to a pair."""

    def __init__(self, pair: KvPair) -> None:
        self.pair = pair
        self.half_ended: list[KvLink] = []

    def apply(self, event: Event) -> None:
        kind, n, m = event
        pair = self.pair
        side = pair.sides[n % 4]
        transport = side.transport
        match kind:
            case "step":
                for _ in range(m % 3 + 1):
                    pair.step(side)
            case "ask":
                prompt = [m % 2] * 6 + [k * n % 7 for k in range(n)]
                pair.ask(prompt, pair.decodes[m % 2], max_tokens=1 + m % 5)
            case "abort" if pair.requests:
                pair.abort(list(pair.requests.values())[n % len(pair.requests)])
            case "hold moves":
                side.device.has_moved = False
            case "hold writes":
                transport.holds_writes = True
            case "hold payloads":
                transport.holds_payloads = True
            case "hold staging slots":
                transport.holds_slots = True
            case "let go":
                pair.let_go()
            case "corrupt":
                transport.num_corrupt = m % 4
            case "fail":
                transport.fails = FAILURES[m % len(FAILURES)]
            case "lose" if pair.links:
                pair.end(pair.links[n % len(pair.links)])
            case "lose silently" if pair.links:
                self.lose_silently(pair.links[n % len(pair.links)], at_sender=m % 2 == 0)
            case "report":
                self.report()
            case "link":
                self.link(n, m)
            case "wait":
                pair.clock.now += TIMEOUT_S * 0.6

    def lose_silently(self, link: KvLink, *, at_sender: bool) -> None:
        """Close one half; the other side hears of it later."""
        self.half_ended.append(link)
        if at_sender:
            link.prefill.sender.close(link.sent)
        else:
            link.decode.receiver.close(link.received)

    def report(self) -> None:
        for link in self.half_ended:
            self.pair.end(link)
        self.half_ended.clear()

    def link(self, n: int, m: int) -> None:
        """Open a link where there is none."""
        prefill, decode = self.pair.prefills[n % 2], self.pair.decodes[m % 2]
        if any((k.prefill, k.decode) == (prefill, decode) for k in self.pair.links):
            return
        try:
            self.pair.connect(prefill, decode)
        except TransferError as exc:
            assert "links are open" in str(exc)

    def end(self) -> None:
        """Let nothing go wrong any more."""
        for side in self.pair.sides:
            side.transport.fails = ""
        self.pair.let_go()
        self.report()
        self.pair.finish()
        for side in self.pair.sides:
            links = [link for link in self.pair.links if side in (link.prefill, link.decode)]
            # A link that is being opened is known to its sender first.
            self.pair.until(lambda: side.transport.num_open == len(links))  # noqa: B023 - called now


WORLDS = given(
    kind=st.sampled_from(KINDS),
    slots=st.tuples(st.integers(1, 4), st.integers(4, 6), st.integers(1, 2)),
    chunk=st.integers(3, 12),
    overlap=st.booleans(),
    divided_bytes=st.sampled_from([0, 1 << 20]),
    events=st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 24), st.integers(0, 11)),
        min_size=10,
        max_size=80,
    ),
)


def examples(number: int) -> settings:
    return settings(
        max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@examples(30)
@WORLDS
def test_every_request_ends_with_its_own_tokens_whatever_happens(**world: Any) -> None:
    run(**world)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@examples(500)
@WORLDS
def test_every_request_of_many_worlds_ends_with_its_own_tokens(**world: Any) -> None:
    run(**world)


def run(
    kind: str,
    slots: tuple[int, int, int],
    chunk: int,
    overlap: bool,
    divided_bytes: int,
    events: list[Event],
) -> None:
    ours, theirs, blocks_per_slot = slots
    engine = {"max_num_batched_tokens": chunk, "overlap": overlap}
    with kv_pair(
        kind,
        num_prefills=2,
        num_decodes=2,
        prefill_slots=ours,
        decode_slots=theirs,
        blocks_per_slot=blocks_per_slot,
        divided_bytes=divided_bytes,
        prefill={"num_blocks": 11, **engine},
        decode={"num_blocks": 16, **engine},
    ) as pair:
        world = World(pair)
        for event in events:
            world.apply(event)
        world.end()
