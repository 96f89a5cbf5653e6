"""Places requests by predicted times: where the answer is soonest and delays others least.

A prompt is computed where its first token comes soonest: by the worker that will decode it, between
the steps of the answers there, or by a prefill worker, whose KV has to be sent then. A prefill
worker may also decode. Each place has a cost in seconds:

    queue + computing + sending the last KV            until the answer streams
    + decode steps of a usual answer                   of the worker that decodes it
    + `DELAY_WEIGHT` * delay of each answer there * their number

Each worker's times are multiplied by its pace: what first tokens took, relative to predictions. The
sum is what all clients together wait for, as far as the choice matters: the decode steps count
as far as they take longer than on the fastest worker. A delay weighs less than a first token: an
answer has all of its own time to make up for it. For a later turn of a named session, the computing
of what the decode worker lacks is one more cost, see policy.py. A prefill worker must be much
cheaper than others to decode, since prompts to come will delay the answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from pagewire.services.router.placement.forecast import Forecast, chunk_of
from pagewire.services.router.placement.policy import (
    MAX_PREFILL_WORKERS,
    Candidate,
    Placement,
    PrefixPolicy,
    Prompt,
    require_decode_worker,
)

DELAY_WEIGHT = 0.05
TYPICAL_ANSWER_TOKENS = 128
ON_PREFILL_WORKER = 0.5  # share of other places' cost that decoding there may have


@dataclass(frozen=True, slots=True)
class _Costs:
    """The predicted seconds of an answer's parts on one worker.

    Attributes:
        rank: place in the order that breaks ties, from 0 on.
        queue_s: of prompts before this one, without the worker's pace.
        prefill_s: of computing this one, likewise.
        first_s: until the first token, with the queue and what it costs the answers there.
        decode_s: of the steps that decode a usual answer, and of what a session lacks there.
        has_room: it can decode one more answer at once.
        chunk: prompt tokens of a step.
    """

    worker_id: str
    rank: int
    queue_s: float
    prefill_s: float
    first_s: float
    decode_s: float
    has_room: bool
    chunk: int
    forecast: Forecast


class _Option(NamedTuple):
    """A worker that decodes a request, and the one that computes its prompt, if another.

    The least option is the best one. Those of equal cost are in the order of their ranks: of the
    decode worker, then of the sender; the decode worker itself comes after all senders.
    """

    cost: float
    ranks: tuple[int, int]
    decode: _Costs
    sender: _Costs | None = None


class PredictedPolicy:
    """Chooses the place with the least predicted cost, at random among equal ones.

    As long as some worker's times are unknown, it chooses as `PrefixPolicy` does.
    """

    uses_forecasts = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._otherwise = PrefixPolicy(rng)

    def needs_hits(self, num_decodes: int, num_prefills: int) -> bool:
        """Whether there is a choice, be it only of the worker that computes the prompt."""
        return num_decodes + num_prefills > 1

    def place(
        self, prompt: Prompt, decodes: Sequence[Candidate], prefills: Sequence[Candidate]
    ) -> Placement:
        """Order the workers by predicted cost."""
        require_decode_worker(decodes)
        if any(candidate.forecast is None for candidate in (*decodes, *prefills)):
            return self._otherwise.place(prompt, decodes, prefills)
        decoding, computing = self._costs(prompt, decodes), self._costs(prompt, prefills)
        best = _cheapest(prompt, decoding, computing)
        return _placement(prompt, best, decoding, computing)

    def _costs(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[_Costs]:
        """Return what each worker's parts would cost, in an order that breaks ties."""
        if prompt.session is None:
            ordered = self._rng.sample(candidates, len(candidates))
        else:
            tie_breaker = prompt.tie_breaker(self._rng)
            ordered = sorted(candidates, key=lambda each: tie_breaker(each.worker_id))
        return [
            _costs(prompt, rank, candidate, candidate.forecast)
            for rank, candidate in enumerate(ordered)
            if candidate.forecast
        ]


def _costs(prompt: Prompt, rank: int, candidate: Candidate, forecast: Forecast) -> _Costs:
    load, worker_id = candidate.load, candidate.worker_id
    after = prompt.cached_tokens(worker_id)
    count = prompt.num_tokens - after
    prefill_s = forecast.prefill_s(load, count, after)
    first_s = load.seconds + prefill_s
    if load.rows:
        first_s += DELAY_WEIGHT * load.rows * forecast.delay_s(load, count, prefill_s)
    decode_s = TYPICAL_ANSWER_TOKENS * forecast.decode_step_s(load, prompt.num_tokens)
    if prompt.has_home:
        decode_s += forecast.alone_s(count, after)
    pace = candidate.pace
    has_room = candidate.may_decode and forecast.has_room(load, prompt.missing_blocks(worker_id))
    return _Costs(
        worker_id,
        rank,
        load.seconds,
        prefill_s,
        pace * first_s,
        pace * decode_s,
        has_room,
        chunk_of(load),
        forecast,
    )


def _cheapest(prompt: Prompt, decoding: list[_Costs], computing: list[_Costs]) -> _Option:
    """Return the best of all places that a request may have."""
    is_free = not (prompt.remote and computing)
    spare = [option for option in computing if option.has_room and is_free]
    roomy = [option for option in decoding if option.has_room] or ([] if spare else decoding)
    least_s = min([costs.decode_s for costs in (*roomy, *spare)])
    after_all = len(decoding), len(computing)
    best = _Option(math.inf, after_all, decoding[0])
    for worker in spare:
        cost = (worker.first_s + worker.decode_s - least_s) / ON_PREFILL_WORKER
        best = min(best, _Option(cost, (len(decoding), worker.rank), worker))
    for decode in roomy if is_free else ():
        cost = decode.first_s + (decode.decode_s - least_s)
        best = min(best, _Option(cost, (decode.rank, len(computing)), decode))
    soonest = sorted(computing, key=attrgetter("first_s"))
    for decode in sorted(roomy, key=attrgetter("decode_s")) if soonest else ():
        own_s = decode.decode_s - least_s
        if soonest[0].first_s + own_s > best.cost:
            break  # sending comes on top: no further pair can be better
        best = _with_sender(prompt, decode, own_s, soonest, best)
    return best


def _with_sender(
    prompt: Prompt, decode: _Costs, own_s: float, soonest: list[_Costs], best: _Option
) -> _Option:
    """Return the best option so far, or a better one in which another worker sends the prompt.

    Args:
        prompt: of the request.
        decode: who decodes it.
        own_s: what that costs.
        soonest: who may send it, the soonest first.
        best: so far.
    """
    worker_id = decode.worker_id
    linked = [option for option in soonest if worker_id in option.forecast.links]
    for sender in linked or soonest:
        if sender.first_s + own_s > best.cost:
            break
        cost = sender.first_s + _sending_s(prompt, decode, sender) + own_s
        best = min(best, _Option(cost, (decode.rank, sender.rank), decode, sender))
    return best


def _sending_s(prompt: Prompt, decode: _Costs, sender: _Costs) -> float:
    """Return the seconds of sending the last chunk's KV; that of others is sent meanwhile."""
    chunk = min(sender.chunk, prompt.uncached_tokens(decode.worker_id))
    return sender.forecast.transfer_s(decode.worker_id, chunk)


def _placement(
    prompt: Prompt, best: _Option, decoding: list[_Costs], computing: list[_Costs]
) -> Placement:
    """Return a place with its alternates."""

    def first(chosen: _Costs, others: list[_Costs]) -> list[_Costs]:
        ranked = sorted(others, key=lambda each: each.first_s + each.decode_s)
        return [chosen, *(choice for choice in ranked if choice is not chosen)]

    decodes = first(best.decode, decoding)
    senders = [] if best.sender is None else first(best.sender, computing)[:MAX_PREFILL_WORKERS]
    local_tokens = 0 if prompt.remote else prompt.block_size
    return Placement(
        tuple(worker.worker_id for worker in decodes),
        tuple(sender.worker_id for sender in senders),
        {candidate.worker_id: candidate.prefill_s for candidate in (*decodes, *senders)},
        {
            candidate.worker_id: candidate.queue_s + candidate.prefill_s
            for candidate in (*decodes, *senders)
            if best.decode.has_room and candidate.queue_s <= candidate.prefill_s
        },
        local_tokens=local_tokens if computing else None,
    )
