"""A whole cluster in virtual time: routers, workers, prefill jobs and KV transfer.

Scheduling, block pools, prefix caches, placement and in-flight load are the product's own code.
Steps, messages and transfers take the time that the machine's prices say.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from pagewire.services.cli.simulation.device import SimulatedDevice
from pagewire.services.cli.simulation.events import Events
from pagewire.services.cli.simulation.jobs import JobHook, SimulatedPrefillJobs
from pagewire.services.cli.simulation.machine import MachinePrices
from pagewire.services.cli.simulation.requests import SimulatedClient, SimulatedRequest
from pagewire.services.cli.simulation.results import (
    Promise,
    SimulatedAnswer,
    SimulationSummary,
    summarize,
)
from pagewire.services.cli.simulation.router import SimulatedIndex, SimulatedRouter
from pagewire.services.cli.simulation.wire import KvLink
from pagewire.services.cli.simulation.worker import (
    SimulatedWorker,
    WorkerLimits,
    hasher_of,
    make_core,
)
from pagewire.services.cli.simulation.workload import ANSWER_TOKEN, Conversation
from pagewire.services.router.placement.policies import POLICIES
from pagewire.shared.base.errors import InvalidRequestError, NoWorkerError, OverloadedError
from pagewire.shared.cluster.worker_record import LinkInfo
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import Load
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_output import StepOutput, StepOutputs
from pagewire.shared.kv.block_pool import run_length


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Number and roles of a cluster's workers, its routers, and its placement policy.

    Attributes:
        prefill: number of prefill workers.
        decode: number of decode workers; without prefill workers they are aggregated.
        policy: a name in `POLICIES`.
    """

    prefill: int
    decode: int
    policy: str = "prefix"
    routers: int = 1

    @property
    def label(self) -> str:
        """The plan's name in tables, such as 1P1D."""
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} aggregated"


class SimulatedCluster:
    """A cluster and its clients; `run` simulates all of their requests.

    Args:
        plan: the workers and routers that there are.
        machine: what each of them runs on.
        limits: their settings.
        seed: of the choice between equal places.
        price_factors: by which routers see the workers' prices multiplied, in turn.

    Attributes:
        answers: of all requests so far.
        workers: by name.
        links: by the names of sender and receiver.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        machine: MachinePrices,
        limits: WorkerLimits,
        seed: int = 0,
        price_factors: Sequence[float] = (1.0,),
    ) -> None:
        self.machine = machine
        self.events = Events()
        self.index = SimulatedIndex(self.events)
        self.answers: list[SimulatedAnswer] = []
        self.workers: dict[str, SimulatedWorker] = {}
        self.links: dict[tuple[str, str], KvLink] = {}
        self._requests: dict[str, SimulatedRequest] = {}
        self._jobs = SimulatedPrefillJobs(
            self.events, machine, self.workers, self._requests, self.links, self._on_first_token
        )
        decodes = [self._add_worker(f"decode-{i}", False, limits) for i in range(plan.decode)]
        prefills = [self._add_worker(f"prefill-{i}", True, limits) for i in range(plan.prefill)]
        for prefill in prefills:
            for decode in decodes:
                credits = max(1, machine.wire.segments // plan.prefill)
                self.links[prefill.name, decode.name] = KvLink(machine.wire, credits)
        for worker, factor in zip(self.workers.values(), cycle(price_factors), strict=False):
            worker.price_factor = factor
        rng = random.Random(f"{seed}/ties")
        wire, policy = machine.wire, POLICIES[plan.policy]
        link = partial(LinkInfo, transport="sim", gbps=wire.gb_s, latency_s=wire.latency_ms * 1e-3)
        links: dict[str, dict[str, LinkInfo]] = {name: {} for name in self.workers}
        for sender, receiver in self.links:
            links[sender][receiver] = link(peer=receiver)
        self.routers = [
            SimulatedRouter(number, self.events, self.workers, self.index, policy(rng), links)
            for number in range(plan.routers)
        ]
        self._hasher = hasher_of(machine)
        self._streams: dict[tuple[str, int], int] = {}  # worker and router -> running answers
        self._num_clients = 0

    def _add_worker(self, name: str, is_prefill: bool, limits: WorkerLimits) -> SimulatedWorker:
        device = SimulatedDevice(self.events, self.machine)
        hook = JobHook(name, self._jobs)
        core = make_core(limits, device, self.index.cache_of(name), hook)
        worker = SimulatedWorker(name, is_prefill, core, device, self._on_outputs)
        self.workers[name] = worker
        return worker

    def run(self, load: Sequence[Conversation], until_s: float = math.inf) -> list[SimulatedAnswer]:
        """Simulate requests until each has ended, or until a time; returns the answers so far."""
        self._num_clients += len(load)
        for conversation in load:
            self.events.at(conversation.start_s, partial(self._send, SimulatedClient(conversation)))
        was_enabled = gc.isenabled()
        gc.disable()  # hardly anything here is part of a cycle
        try:
            self.events.run_until(lambda: self._num_clients == 0 or self.events.now >= until_s)
        finally:
            if was_enabled:
                gc.enable()
        return self.answers

    def summary(self, promise: Promise) -> SimulationSummary:
        """Return latencies, promises kept and worker use up to now."""
        workers = self.workers.values()
        preemptions = sum(worker.core.scheduler.table.num_preemptions for worker in workers)
        busy_s = {worker.name: worker.device.busy_s for worker in workers}
        return summarize(self.answers, promise, preemptions, busy_s)

    # A request's way to its decode worker

    def _send(self, client: SimulatedClient) -> None:
        turn = client.conversation.turns[client.turn]
        if not turn.continues:
            client.tokens, client.hashes = [], []
        for content, count in turn.new:
            client.tokens += [content] * count
        self._hasher.extend(client.hashes, client.tokens)
        number = len(self.answers)
        answer = SimulatedAnswer(self.events.now, len(client.tokens))
        self.answers.append(answer)
        router = self.routers[number % len(self.routers)]
        request = SimulatedRequest(f"r{number}", client, answer, turn.answer_tokens, router)
        self.events.after(self.machine.host.request_ms * 1e-3, partial(self._place, request))

    def _place(self, request: SimulatedRequest) -> None:
        client, router, block_size = request.client, request.router, self.machine.block_size
        known = run_length(self.index.ever, client.hashes) * block_size
        request.answer.known_tokens = min(known, len(client.tokens) - 1)
        try:
            placement, prompt = router.place(
                client.hashes,
                len(client.tokens),
                block_size,
                request.refused_by,
                client.conversation.session,
            )
        except NoWorkerError:
            request.answer.outcome = "refused"
            self._next_turn(request)
            return
        decode = self.workers[placement.decode_workers[0]]
        request.prefills = list(placement.prefill_workers)
        load = Load(blocks=prompt.missing_blocks(decode.name), rows=1)
        request.load = router.in_flight.add(decode.name, load)
        request.local_tokens = placement.local_tokens
        computing = next(iter(request.prefills), decode.name)
        prefill_load = placement.prefill_load(prompt, computing)
        expected_s = placement.expected_s.get(computing)
        request.prefill_load = router.in_flight.add(computing, prefill_load, expected_s)
        router.record_sent(prompt, {decode.name, computing})
        add = partial(self._add, request, decode)
        self.events.after(self.machine.host.start_ms * 1e-3, lambda: decode.submit(add))

    def _add(self, request: SimulatedRequest, decode: SimulatedWorker, core: EngineCore) -> None:
        """Queue a request's sequence. Runs in the decode worker's iteration."""
        sequence = request.sequence()
        sequence.remote_prefill = bool(request.prefills)
        sequence.local_prefill_tokens = request.local_tokens
        try:
            core.sequences.add(sequence)
        except (OverloadedError, InvalidRequestError) as exc:
            request.unload()
            request.answer.is_too_long = isinstance(exc, InvalidRequestError)
            refused = self.workers if request.answer.is_too_long else {decode.name}
            request.refused_by.update(refused)  # all workers refuse what is too long
            self.events.after(2 * self.machine.host.hop_ms * 1e-3, partial(self._place, request))
            return
        self._requests[request.name] = request
        key = decode.name, request.router.number
        self._streams[key] = self._streams.get(key, 0) + 1

    # Tokens

    def _on_first_token(
        self, request: SimulatedRequest, prefill: SimulatedWorker, report: LoadReport
    ) -> None:
        """Handle a prefill worker's first token, which the router has now."""
        request.end_prompt(prefill.name)
        request.router.in_flight.record_report(prefill.name, report)

    def _on_outputs(self, decode: SimulatedWorker, outputs: StepOutputs) -> None:
        """Send a step's tokens to their routers and clients, or to who asked for a job."""
        host, requests = self.machine.host, self._requests
        others = [other for other in outputs.individual if not self._jobs.take(decode, other)]
        if not (outputs.request_ids or others):
            return
        arrives_s = self.events.now + (host.hop_ms + host.answer_ms) * 1e-3
        for name in outputs.request_ids:
            requests[name].answer.times.append(arrives_s)
        individual = [self._take(decode, output, arrives_s) for output in others]
        heard = partial(self._hear, decode, decode.recent(), individual)
        self.events.after(host.hop_ms * 1e-3, heard)

    def _take(
        self, decode: SimulatedWorker, output: StepOutput, arrives_s: float
    ) -> SimulatedRequest:
        """Note a first or last token of an answer."""
        request = self._requests[output.request_id]
        answer = request.answer
        answer.times.extend([arrives_s] * len(output.token_ids))
        if output.cached_tokens is not None and not answer.is_remote:
            answer.cached_tokens = output.cached_tokens
        if output.finish_reason is not None:
            answer.outcome = "ok"
            del self._requests[request.name]
            self._streams[decode.name, request.router.number] -= 1
        return request

    def _hear(
        self, decode: SimulatedWorker, report: LoadReport, individual: list[SimulatedRequest]
    ) -> None:
        """Handle a step's tokens at the routers of its answers."""
        for router in self.routers:
            is_running = self._streams.get((decode.name, router.number), 0) > 0
            if is_running or any(request.router is router for request in individual):
                router.in_flight.record_report(decode.name, report)
        for request in individual:
            request.end_prompt(decode.name)
            if request.answer.outcome == "ok":
                request.unload()
                delay_s = self.machine.host.answer_ms * 1e-3
                self.events.after(delay_s, partial(self._next_turn, request))

    def _next_turn(self, request: SimulatedRequest) -> None:
        """Let the client send its next request, after its pause; all others depend on it."""
        client = request.client
        client.turn += 1
        turns = client.conversation.turns
        if client.turn == len(turns):
            self._num_clients -= 1
            return
        if request.answer.outcome == "ok":
            client.tokens += [ANSWER_TOKEN] * request.answer_tokens
        self.events.after(turns[client.turn].pause_s, partial(self._send, client))
