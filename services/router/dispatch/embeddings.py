"""Has workers compute the embeddings of a request's prompts, several at a time.

    open --> todo --Embed--> waiting --embedding--> done
              ^                |
              +--refused, lost-+

A prompt that is refused, or that loses its worker, goes to another one. A prompt that loses two
workers without an explanation fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from pagewire.services.router.cluster.worker_links import WorkerLink
from pagewire.services.router.dispatch.attempt import Attempt, WorkerLost
from pagewire.services.router.dispatch.dispatcher import Dispatcher
from pagewire.services.router.placement.in_flight_load import InFlightLoad
from pagewire.shared.base.aio import end_task
from pagewire.shared.base.errors import (
    ChannelError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestFailedError,
)
from pagewire.shared.control.protocol import Embed, Refused, TokenOutput

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 64  # prompts of one request that workers compute at the same time
MAX_LOSSES = 1  # lost workers per prompt: a prompt that kills workers must not reach them all


class EmbeddingSet:
    """The embeddings of one request's prompts. Call `run`, and always `close`.

    Attributes:
        num_tokens: tokens of all prompts.
        workers: ids of the workers that have computed embeddings, each once.

    Args:
        dispatcher: selects workers and counts their load.
        prompts: at least one; each has at least one token.
        template: the message for each prompt, except its request id and tokens.

    Raises:
        OverloadedError: the queue is full (raised by the constructor).
    """

    def __init__(
        self, dispatcher: Dispatcher, prompts: Sequence[list[int]], template: Embed
    ) -> None:
        self._dispatcher, self._template = dispatcher, template
        self.num_tokens = sum(map(len, prompts))
        self.workers: list[str] = []
        self._vectors = [b""] * len(prompts)
        self._todo = enumerate(prompts)
        admission = dispatcher.admission
        num_places = min(len(prompts), MAX_AT_ONCE, admission.max_request)
        self._tickets = admission.enter(num_places, template.owner)

    async def run(self) -> list[bytes]:
        """Return the embeddings in the order of their prompts, as little-endian float32.

        Raises:
            InvalidRequestError: a worker cannot compute a prompt.
            OverloadedError: every worker's queue is full.
            NoWorkerError: no worker can be reached, or one prompt has lost two workers.
            RequestFailedError: a worker failed, or did not answer in time.
        """
        tasks = [asyncio.create_task(self._work()) for _ in self._tickets]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                await end_task(task)
        return self._vectors

    def close(self) -> None:
        """Release the request's places in the queue. Idempotent."""
        for ticket in self._tickets:
            ticket.leave()

    async def _work(self) -> None:
        """Have one prompt after another computed, until none is left."""
        for index, token_ids in self._todo:
            self._vectors[index] = await self._embed(token_ids)
            self._dispatcher.metrics.count_embedding(len(token_ids))

    async def _embed(self, token_ids: list[int]) -> bytes:
        excluded: set[str] = set()
        overloaded, losses, strikes = False, 0, 0
        while True:
            attempt = self._send(token_ids, excluded, overloaded, strikes)
            worker_id = attempt.link.worker_id
            outcome = await attempt.result(self._dispatcher.request_timeout_s)
            strikes = attempt.strikes
            match outcome:
                case bytes(vector):
                    if worker_id not in self.workers:
                        self.workers.append(worker_id)
                    return vector
                case WorkerLost(reason, is_explained):
                    logger.warning("the worker of an embedding was lost: %s", reason)
                    if is_explained:
                        continue  # not excluded: the crash or hang is counted as strikes
                    losses += 1
                    if losses > MAX_LOSSES:
                        raise NoWorkerError(f"{losses} workers of one embedding were lost")
                case Refused() as refused:
                    if refused.reason == "invalid":
                        raise InvalidRequestError(refused.message, refused.param)
                    logger.info("%s is %s: %s", worker_id, refused.reason, refused.message)
                    overloaded = overloaded or refused.reason == "overloaded"
            excluded.add(worker_id)

    def _send(
        self, token_ids: list[int], excluded: set[str], overloaded: bool, strikes: int
    ) -> _Attempt:
        """Send a prompt to the least loaded worker.

        Raises:
            OverloadedError: there is none that has room.
            NoWorkerError: there is none.
        """
        dispatcher = self._dispatcher
        for link, load in dispatcher.selector.embedding_workers(len(token_ids), excluded):
            attempt = _Attempt(link, dispatcher.in_flight, strikes)
            message = msgspec.structs.replace(
                self._template,
                request_id=attempt.request_id,
                token_ids=token_ids,
                strikes=strikes,
            )
            try:
                attempt.start(message, load)
            except ChannelError as exc:
                logger.info("%s cannot be reached: %s", link.worker_id, exc)
            else:
                return attempt
        if overloaded:
            raise OverloadedError("the queues of all workers are full")
        raise NoWorkerError("no worker that computes embeddings can be reached")


class _Attempt(Attempt):
    """One attempt to have one worker compute one prompt's embedding."""

    def __init__(self, link: WorkerLink, in_flight: InFlightLoad, strikes: int) -> None:
        super().__init__(link, self._take, in_flight, strikes)
        self._vector = b""

    async def result(self, timeout: float) -> bytes | Refused | WorkerLost:
        """Return the embedding, or why there is none. The attempt has ended then.

        Raises:
            RequestFailedError: the worker failed, or did not answer in time.
        """
        try:
            outcome = await self.outcome(timeout)
        except TimeoutError as exc:
            problem = f"no embedding from {self.link.worker_id} within {timeout:g} s"
            raise RequestFailedError(problem) from exc
        finally:
            self.end(cancel=not self._has_ended)
        if isinstance(outcome, Exception):
            raise outcome
        return self._vector if outcome is None else outcome

    def _take(self, output: TokenOutput, _now: float) -> None:
        if output.finish_reason == "abort":
            self.on_lost("the worker aborted the request")
        elif output.embedding is None:
            raise RequestFailedError(output.error or "the worker gave no embedding")
        else:
            self._vector = output.embedding
            self.end(cancel=False)
