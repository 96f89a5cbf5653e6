"""Prefill jobs in virtual time, from reserved blocks to an activated sequence.

reserved --> job --> chunks --+--> blocks, step by step --------+-- both are there: activated
                              +--> first token, once it is known --+
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from pagewire.services.cli.simulation.events import Events
from pagewire.services.cli.simulation.machine import MachinePrices
from pagewire.services.cli.simulation.requests import SimulatedRequest
from pagewire.services.cli.simulation.wire import KvLink
from pagewire.services.cli.simulation.worker import SimulatedWorker
from pagewire.services.cli.simulation.workload import ANSWER_TOKEN
from pagewire.shared.base.errors import OverloadedError
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.step import Expect, Export, StepPlan
from pagewire.shared.engine.step_output import StepOutput


@dataclass(slots=True, eq=False)
class _Job:
    """A prompt that a prefill worker computes for a decode worker.

    Attributes:
        sent_until: number of the first block that has not been sent.
        missing: what the decode worker still waits for: "blocks", "first token".
    """

    request: SimulatedRequest
    prefill: SimulatedWorker
    decode: SimulatedWorker
    sent_until: int
    missing: set[str] = field(default_factory=lambda: {"blocks", "first token"})


@dataclass(slots=True)
class JobHook:
    """A step hook of a worker's engine: reads what a plan means for prefill jobs.

    Attributes:
        worker: name of the worker.
    """

    worker: str
    jobs: SimulatedPrefillJobs

    def before_launch(self, plan: StepPlan) -> None:
        """Do nothing: no simulated step waits for a transfer."""

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Begin the jobs that a launched plan reserves blocks for, and send what it exports."""
        for work in () if plan is None else plan.kv:
            if isinstance(work, Expect):
                self.jobs.begin(self.worker, work.request_id, work.first)
            elif isinstance(work, Export):
                self.jobs.export(work)
        return False

    def poll(self) -> bool:
        """Return whether there is something to do: never, since arrivals are commands."""
        return False


@dataclass(slots=True)
class SimulatedPrefillJobs:
    """The jobs of all workers.

    Attributes:
        workers: all of them, by name.
        requests: the requests in progress, by name.
        links: by the names of sender and receiver.
        on_first_token: called when the router has a first token, with the request, the prefill
            worker, and the load that this worker reported with it.
    """

    events: Events
    machine: MachinePrices
    workers: Mapping[str, SimulatedWorker]
    requests: Mapping[str, SimulatedRequest]
    links: Mapping[tuple[str, str], KvLink]
    on_first_token: Callable[[SimulatedRequest, SimulatedWorker, LoadReport], None]
    _jobs: dict[str, _Job] = field(default_factory=dict)

    @property
    def _hop_s(self) -> float:
        return self.machine.host.hop_ms * 1e-3

    def begin(self, worker: str, name: str, first_block: int) -> None:
        """Have a prefill worker compute a prompt; if none is left, the decode worker.

        Args:
            worker: name of the decode worker, which has reserved the blocks.
            name: of the request.
            first_block: the first one that the decode worker lacks.
        """
        request, decode = self.requests[name], self.workers[worker]
        if not request.prefills:
            decode.submit(partial(_recompute, name))
            return
        prefill = self.workers[request.prefills.pop(0)]
        job = self._jobs[name] = _Job(request, prefill, decode, first_block)
        self.events.after(self._hop_s, lambda: prefill.submit(partial(self._add, job)))

    def _add(self, job: _Job, core: EngineCore) -> None:
        """Queue a job's sequence. Runs in the prefill worker's iteration."""
        sequence = job.request.sequence()
        sequence.prefill_only = True
        try:
            core.sequences.add(sequence)
        except OverloadedError:
            again = partial(self.begin, job.decode.name, sequence.request_id, job.sent_until)
            self.events.after(self._hop_s, again)

    def export(self, work: Export) -> None:
        """Send blocks that become final during the step that was just launched."""
        job = self._jobs[work.request_id]
        step, link = job.prefill.device.last, self.links[job.prefill.name, job.decode.name]
        if step is None:
            return
        end = work.first + len(work.block_ids)
        count = max(0, end - max(work.first, job.sent_until))  # others were sent, or are there
        job.sent_until = max(job.sent_until, end)
        groups = self.machine.wire.layer_groups
        num_bytes = count * self.machine.block_size * self.machine.kv_token_bytes // groups
        usable_s = step.ends_s
        for group in range(1, groups + 1):
            final_s = step.began_s + (step.ends_s - step.began_s) * group / groups
            usable_s = max(usable_s, link.send(final_s, num_bytes))
        if work.is_last:
            self.events.at(usable_s, partial(self._note, job, "blocks"))
            acknowledged_s = usable_s + self.machine.wire.latency_ms * 1e-3
            forget = partial(_abort, work.request_id)
            self.events.at(acknowledged_s, lambda: job.prefill.submit(forget))

    def take(self, worker: SimulatedWorker, output: StepOutput) -> bool:
        """Report the first token of a job; return whether the output is one."""
        job = self._jobs.get(output.request_id)
        if job is None or job.prefill is not worker:
            return False
        answer, heard_s = job.request.answer, self.events.now + 2 * self._hop_s
        answer.is_remote, answer.cached_tokens = True, output.cached_tokens or 0
        answer.times.append(heard_s + self.machine.host.answer_ms * 1e-3)
        self.events.after(self._hop_s, partial(self._note, job, "first token"))
        heard = partial(self.on_first_token, job.request, worker, worker.report())
        self.events.at(heard_s, heard)
        return True

    def _note(self, job: _Job, arrived: str) -> None:
        """Note what the decode worker has now; activate the sequence if that was all."""
        job.missing.discard(arrived)
        if not job.missing:
            del self._jobs[job.request.name]
            job.decode.submit(partial(_activate, job.request.name))


def _activate(name: str, core: EngineCore) -> None:
    if (sequence := core.sequences.get(name)) is not None:
        core.sequences.activate(sequence, ANSWER_TOKEN)


def _recompute(name: str, core: EngineCore) -> None:
    if (sequence := core.sequences.get(name)) is not None:
        core.sequences.recompute_locally(sequence, None)


def _abort(name: str, core: EngineCore) -> None:
    core.sequences.abort(name)
