"""Where a request goes by predicted times: where its answer is soonest, and delays others least.

A prompt is computed where its first token comes soonest: by the worker that will decode it, between
the steps of the answers there, or by a prefill worker, whose KV has to be sent then. Each place has
a cost in seconds:

    queue + computing + sending the last KV            until the answer streams
    + decode steps of a usual answer                   of the worker that decodes it
    + `DELAY_WEIGHT` * delay of each answer there * their number

The sum is what all clients together wait for. A prompt goes where the roles say it should unless
another place is cheaper by a tenth, so that two places of about the same cost do not alternate.

If no decode worker has room, a prefill worker that has some decodes, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.services.router.placement.forecast import Forecast
from pagewire.services.router.placement.policy import (
    MAX_PREFILL_WORKERS,
    Candidate,
    Placement,
    PrefixPolicy,
    Prompt,
    require_decode_worker,
)

DELAY_WEIGHT = 0.2
USUAL_ANSWER = 128  # tokens
GAIN = 0.9  # what computing the prompt where it is decoded must cost, relative to elsewhere


@dataclass(frozen=True, slots=True)
class _Costs:
    """What a worker's parts of an answer cost, in seconds.

    Attributes:
        prefill_s: of computing the prompt, without the queue.
        first_s: until the first token, with the queue and what it costs the answers there.
        decode_s: of the steps that decode a usual answer.
        has_room: it can decode one more answer at once.
    """

    worker_id: str
    prefill_s: float
    first_s: float
    decode_s: float
    has_room: bool
    forecast: Forecast


class PredictedPolicy:
    """Chooses the place with the least predicted cost, at random among equal ones.

    As long as some worker's times are unknown, it chooses as `PrefixPolicy` does.
    """

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
        if any(each.forecast is None for each in (*decodes, *prefills)):
            return self._otherwise.place(prompt, decodes, prefills)
        decoding, computing = self._costs(prompt, decodes), self._costs(prompt, prefills)
        roomy = [each for each in decoding if each.has_room]
        spare = [each for each in computing if each.has_room]
        if spare and not roomy and not prompt.remote:
            decode = min(spare, key=_local_cost)
            return _placement(decode, [*spare, *decoding], [], prompt.block_size)
        roomy = roomy or decoding
        here = min(roomy, key=_local_cost)
        least_s = min(each.decode_s for each in roomy)
        there, sender = min(
            ((decode, each) for decode in roomy for each in computing),
            key=lambda pair: _remote_cost(prompt, *pair),
            default=(here, None),
        )
        if sender is None:
            return _placement(here, decoding, [], None)
        local_s = _local_cost(here) - least_s
        remote_s = _remote_cost(prompt, there, sender) - least_s
        if local_s < GAIN * remote_s and not prompt.remote:
            return _placement(here, decoding, [], prompt.block_size)
        computing.sort(key=lambda each: each.first_s)
        computing.remove(sender)
        local_tokens = 0 if prompt.remote else prompt.block_size
        return _placement(there, decoding, [sender, *computing], local_tokens)

    def _costs(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[_Costs]:
        """Return what each worker's parts would cost, in random order."""
        shuffled = self._rng.sample(candidates, len(candidates))
        return [_costs(prompt, each, each.forecast) for each in shuffled if each.forecast]


def _costs(prompt: Prompt, candidate: Candidate, forecast: Forecast) -> _Costs:
    load, worker_id = candidate.load, candidate.worker_id
    count, after = prompt.uncached_tokens(worker_id), prompt.cached_tokens(worker_id)
    delays_s = load.rows * forecast.delay_s(load, count, after)
    prefill_s = forecast.prefill_s(load, count, after)
    return _Costs(
        worker_id=worker_id,
        prefill_s=prefill_s,
        first_s=load.seconds + prefill_s + DELAY_WEIGHT * delays_s,
        decode_s=USUAL_ANSWER * forecast.decode_step_s(load, prompt.num_tokens),
        has_room=candidate.may_decode and forecast.has_room(load, prompt.missing_blocks(worker_id)),
        forecast=forecast,
    )


def _local_cost(worker: _Costs) -> float:
    return worker.first_s + worker.decode_s


def _remote_cost(prompt: Prompt, decode: _Costs, sender: _Costs) -> float:
    """Return the cost of one worker's computing a prompt, and another's decoding.

    KV is sent while later chunks are computed, so only that of the last one is waited for.
    """
    chunk = min(sender.forecast.chunk, prompt.uncached_tokens(decode.worker_id))
    sending_s = sender.forecast.transfer_s(decode.worker_id, chunk)
    return sender.first_s + sending_s + decode.decode_s


def _placement(
    decode: _Costs, decoding: list[_Costs], computing: list[_Costs], local_tokens: int | None
) -> Placement:
    others = sorted((each for each in decoding if each is not decode), key=_local_cost)
    workers, senders = [decode, *others], computing[:MAX_PREFILL_WORKERS]
    return Placement(
        tuple(each.worker_id for each in workers),
        tuple(each.worker_id for each in senders),
        {each.worker_id: each.prefill_s for each in (*workers, *senders)},
        local_tokens=local_tokens,
    )
