"""Prompts that a decode worker computes itself, and how they are counted."""

from __future__ import annotations

import pytest

from pagewire.shared.protocol import Prefill, PrefillFailed
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.decode_side import ROUTER, Links, decoding, generate, has_ended
from pagewire.tests.support.service_runtimes import ServiceRuntime

REASONS = ("short", "no_worker", "no_link", "failed")


def counts(runtime: ServiceRuntime) -> dict[str, float | None]:
    name = "pagewire_local_prefills_total"
    return {reason: runtime.metric(name, reason=reason) for reason in REASONS}


@pytest.mark.parametrize(
    ("reason", "named", "linked", "limit"),
    [
        ("short", ["p"], ["p"], 100),
        ("no_worker", [], ["p"], 0),
        ("no_worker", [], [], 100),
        ("no_link", ["p"], [], 0),
        ("failed", ["p"], ["p", "q"], 0),
    ],
)
def test_each_is_counted_once_by_its_reason(
    monkeypatch: pytest.MonkeyPatch, reason: str, named: list[str], linked: list[str], limit: int
) -> None:
    async def scenario() -> None:
        async with decoding(local_prefill_tokens=limit) as (runtime, service):
            assert counts(runtime) == dict.fromkeys(REASONS, 0)
            remote, links = service._remote, Links(*linked)
            monkeypatch.setattr(remote, "_links", links)
            service.on_message(ROUTER, generate(prefill_workers=named))
            if reason == "failed":
                for number, link in enumerate(links.links, 1):
                    await eventually(lambda: _num_tickets(links) == number)  # noqa: B023
                    job_id = links.posted[-1].job_id
                    remote._on_message(link, PrefillFailed(job_id=job_id, reason="scripted"))
            await eventually(lambda: has_ended(runtime))
            assert counts(runtime) == dict.fromkeys(REASONS, 0) | {reason: 1}

    run_async(scenario())


def _num_tickets(links: Links) -> int:
    return sum(isinstance(message, Prefill) for message in links.posted)
