"""What the bench of many clients counts of an answer, and how its clients differ."""

from __future__ import annotations

from itertools import pairwise

from pagewire.loadtest.bench.client import Answer, Client
from pagewire.loadtest.bench.crowd import SPREAD, Job, Seen, jobs_of
from pagewire.tests.support.aio import run_async


def test_only_what_arrives_in_the_measured_time_counts() -> None:
    seen = Seen()
    seen.add(Answer([0.5, 1.5, 1.5, 2.0, 3.5], [1] * 5), began=10.0, span=(11.0, 13.0))
    assert seen.tokens == [0, 2, 1, 0, 0]
    assert list(seen.gaps) == [1000.0, 500.0], "tokens of one chunk have one gap"
    assert not seen.ttft
    seen.add(Answer([0.25], [1]), began=12.0, span=(11.0, 13.0))
    assert list(seen.ttft) == [250.0]
    assert seen.tokens == [0, 2, 1, 1, 0]


def _jobs(clients: int) -> list[Job]:
    urls = ["http://nowhere"]
    return jobs_of(3, clients, urls=urls, start=0.0, warm_up_s=20.0, seconds=5.0, vocab=1000)


def test_clients_start_one_after_the_other() -> None:
    starts = sorted(delay for job in _jobs(10) for delay in job.delays)
    gaps = {round(after - before, 6) for before, after in pairwise(starts)}
    assert (len(starts), starts[0], gaps) == (10, 0.0, {SPREAD * 20 / 10})


def test_no_two_processes_and_no_two_crowds_send_the_same_prompt() -> None:
    async def prompts(job: Job) -> set[bytes]:
        client = Client(list(job.urls), vocab=job.vocab, seed=job.seed)
        try:
            return {bytes(client.prepare(256, 1).prompt) for _ in range(5)}
        finally:
            await client.close()

    seen: set[bytes] = set()
    for job in (*_jobs(10), *_jobs(20)):
        seen |= run_async(prompts(job))
    assert len(seen) == 6 * 5
