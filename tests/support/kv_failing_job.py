"""A prefill job that a worker played by the test will fail, while another worker could do it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pagewire.tests.support.aio import eventually
from pagewire.tests.support.kv_by_hand import KvLinkByHand, kv_link_by_hand, prefill_by_hand
from pagewire.tests.support.kv_router import Router, router_of
from pagewire.tests.support.kv_services import decode_worker, prefill_worker
from pagewire.tests.support.kv_workers import DecodeWorker, PrefillWorker


@dataclass(frozen=True)
class FailingJob:
    """The job and its surroundings.

    Attributes:
        link: the link by which the job was requested, played by the test.
        other: the other prefill worker.
        decode: the decode worker.
        router: the router that asked for the answer.
        job: the job's name.
    """

    link: KvLinkByHand
    other: PrefillWorker
    decode: DecodeWorker
    router: Router
    job: str


@asynccontextmanager
async def failing_job(then: str, **asked: Any) -> AsyncIterator[FailingJob]:
    """Ask for an answer; the job goes to the worker that the test plays.

    Args:
        then: "next": the decode worker knows the other prefill worker, too; "local": it does not.
        asked: see `Router.generate`.
    """
    async with (
        prefill_by_hand("prefill-0") as failing,
        prefill_worker("prefill-1") as other,
        decode_worker() as d,
        router_of(d) as router,
    ):
        is_next = then == "next"
        d.records = [failing.record(), *([other.record()] if is_next else [])]
        await eventually(lambda: failing.hellos)
        with kv_link_by_hand(failing.hellos[0][1]) as link:
            await link.granted()
            link.pass_test()
            await eventually(
                lambda: (
                    link.gives_credits_back()
                    and d.is_linked()
                    and d.is_linked("prefill-1") == is_next
                )
            )
            router.generate(**asked)
            await eventually(link.tickets)
            yield FailingJob(link, other, d, router, link.tickets()[0].job_id)
