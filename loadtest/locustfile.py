"""Simulated users for locust: chat, shared system prompts, long documents, bursts, cancels.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless --rates 2,4,8

Locust's table shows, for each kind of user:

    TTFT     time to the first token, one entry a request
    ITL      time between two tokens, one entry a token but the first
    E2E      time to the last token of answers that were heard to the end; failures are errors
    CANCEL   time until the client hung up
    GOODPUT  all requests; those that missed the objectives count as failures, so the column of
             requests a second less that of failures a second is the goodput
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

import gevent
import requests
from gevent import GreenletExit
from locust import LoadTestShape, User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from pagewire.loadtest import workloads
from pagewire.loadtest.client import ChatClient
from pagewire.loadtest.cluster import key_headers, metrics
from pagewire.loadtest.records import BEGAN_FILE, MeasuredRequest, to_line
from pagewire.loadtest.sampler import cluster_sample
from pagewire.loadtest.shapes import SHAPES, AlignedPace, PoissonPace, schedule, stage_at
from pagewire.loadtest.slo import is_good
from pagewire.services.cli.bench.stats import Slo
from pagewire.services.cli.client.endpoint_url import usual_operator_url
from pagewire.shared.base.errors import ProtocolError

USER_RATE = 0.25  # requests a second of one user; many slow users are close to an open loop
SPAWN_RATE = 1000  # users a second: a stage begins at its full rate
SAMPLE_EVERY_S = 1.0
HTTP_TIMEOUT_S = 10.0


class SloMissedError(Exception):
    """Marks a request that came too late as a failure in locust's GOODPUT rows."""


class LoadTest:
    """The options, clock and files that the users of a test share."""

    def __init__(self, environment: Environment) -> None:
        options = environment.parsed_options
        if options is None or not environment.host:
            raise SystemExit("say which router to test: --host http://127.0.0.1:8000")
        self._events = environment.events
        self.host = environment.host.rstrip("/")
        self.seed: int = options.seed
        self.slo = Slo(options.slo_ttft_ms / 1000, options.slo_itl_ms / 1000)
        self.model: str = options.model or _served_model(self.host)
        self.stages = schedule(options.load_shape, options.rates, options.stage_s)
        self.has_errors = False
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        self._began = time.perf_counter()
        (out / BEGAN_FILE).write_text(repr(time.monotonic()), encoding="utf-8")
        self._records = (out / "records.jsonl").open("w", buffering=1, encoding="utf-8")
        self._samples = (out / "samples.jsonl").open("w", buffering=1, encoding="utf-8")
        self._operator_url = options.operator_url or usual_operator_url(self.host)
        self._sampler = gevent.spawn(self._sample)

    def close(self) -> None:
        """Take a last sample and close everything."""
        self._sampler.kill()
        self._sample_once()
        self._records.close()
        self._samples.close()

    def new_record(self, kind: str) -> MeasuredRequest:
        """Return the record of a request that is sent now."""
        now = time.perf_counter() - self._began
        stage = stage_at(self.stages, now) or self.stages[-1]
        return MeasuredRequest(kind, stage.rate, now)

    def report(self, record: MeasuredRequest) -> None:
        """Write a finished record, and report it to locust."""
        self._records.write(to_line(record))
        self.has_errors |= record.outcome == "error"
        if record.outcome == "unfinished":
            return
        error = RuntimeError(record.error) if record.outcome == "error" else None
        missed = None if is_good(record, self.slo) else SloMissedError("not within the objectives")
        entries: list[tuple[str, float, Exception | None]] = [
            *(("TTFT", first, None) for first in record.token_times[:1]),
            *(("ITL", gap, None) for gap in record.gaps),
            ("CANCEL" if record.outcome == "cancelled" else "E2E", record.end, error),
            ("GOODPUT", record.end, missed),
        ]
        for request_type, seconds, exception in entries:
            self._events.request.fire(
                request_type=request_type,
                name=record.kind,
                response_time=seconds * 1000,
                response_length=len(record.token_times),
                exception=exception,
                context={},
            )

    def _sample(self) -> None:
        """Note the cluster's state every second, until killed."""
        for tick in itertools.count():
            due = self._began + tick * SAMPLE_EVERY_S
            gevent.sleep(max(0.0, due - time.perf_counter()))
            self._sample_once()

    def _sample_once(self) -> None:
        try:
            values = metrics(self._operator_url)
        except (OSError, ProtocolError) as exc:
            print(f"no sample: {exc}", file=sys.stderr)
            return
        at = time.perf_counter() - self._began
        self._samples.write(to_line(cluster_sample(values, at)))


_tests: dict[Environment, LoadTest] = {}


class ChosenShape(LoadTestShape):
    """Follows the schedule that the options name."""

    def tick(self) -> tuple[int, float] | None:
        """Return how many users there should be now, and how fast they come; None at the end."""
        options = self.runner.environment.parsed_options if self.runner else None
        if options is None:
            return None
        stages = schedule(options.load_shape, options.rates, options.stage_s)
        stage = stage_at(stages, self.get_run_time())
        return None if stage is None else (max(1, round(stage.rate / USER_RATE)), SPAWN_RATE)


class PagewireUser(User):
    """The common part of all kinds of users."""

    abstract = True
    kind = ""
    _numbers = itertools.count()

    def __init_subclass__(cls) -> None:
        cls._numbers = itertools.count()

    def on_start(self) -> None:
        """Connect to the server and choose the user's pace."""
        self.test = _tests[self.environment]
        self.rng = random.Random(f"{self.test.seed}:{self.kind}:{next(self._numbers)}")
        self.client = ChatClient(self.test.host, self.test.model)
        self.pace: PoissonPace | AlignedPace = PoissonPace(self.rng, USER_RATE)
        self._has_waited = False
        self.prepare()

    def prepare(self) -> None:
        """Set up what the kind needs."""

    def on_stop(self) -> None:
        """Close the user's connection to the server."""
        self.client.close()

    @task
    def act(self) -> None:
        """Send a request; the first time only wait, so that not all users begin at once."""
        if self._has_waited:
            self.turn()
        self._has_waited = True

    def turn(self) -> None:
        """Send a request of the kind."""
        raise NotImplementedError

    def wait_time(self) -> float:
        """Return the seconds to the next request."""
        return self.pace.wait(time.monotonic())

    def send(self, ask: workloads.Ask) -> str | None:
        """Send a request; returns the answer's text, None after an error."""
        record = self.test.new_record(self.kind)
        try:
            text = self.client.ask(ask, record)
        except GreenletExit:
            self.test.report(record)
            raise
        self.test.report(record)
        return text if record.outcome == "ok" else None


class ChatUser(PagewireUser):
    """Talks in turns; each prompt carries all turns before it."""

    kind, weight = "chat", 4

    def prepare(self) -> None:
        """Begin a conversation of several questions."""
        self.conversation = workloads.UserConversation(self.rng)

    def turn(self) -> None:
        """Ask the conversation's next question and keep its answer."""
        text = self.send(self.conversation.next_ask())
        if text is not None:
            self.conversation.add_answer(text)


class SharedPromptUser(PagewireUser):
    """Asks a question after one of a few long system prompts."""

    kind, weight = "shared prompt", 3

    def turn(self) -> None:
        """Ask a short question after the system prompt that all users share."""
        self.send(workloads.shared_prompt_ask(self.rng, self.test.seed))


class DocumentUser(PagewireUser):
    """Asks about a long text, a new one each time."""

    kind, weight = "document", 1

    def turn(self) -> None:
        """Ask about a long text that no prompt had before."""
        self.send(workloads.document_ask(self.rng))


class BurstUser(PagewireUser):
    """Sends at the same moments as all others of its kind."""

    kind, weight = "burst", 1

    def prepare(self) -> None:
        """Ask by the clock, at the same times as all such users."""
        self.pace = AlignedPace(USER_RATE)

    def turn(self) -> None:
        """Ask at the same moment as all other users of this kind."""
        self.send(workloads.burst_ask(self.rng))


class CancelUser(PagewireUser):
    """Hangs up in the middle of an answer."""

    kind, weight = "cancel", 1

    def turn(self) -> None:
        """Ask for more than it will listen to."""
        self.send(workloads.cancelled_ask(self.rng))


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser, **_: Any) -> None:
    """Add this file's options to locust's."""
    group = parser.add_argument_group("Pagewire")
    group.add_argument("--load-shape", choices=SHAPES, default="steps", help="shape of the load")
    group.add_argument("--rates", type=_rates, default=[1.0, 2.0, 4.0], help="requests/s: 1,2,4")
    group.add_argument("--stage-s", type=float, default=20.0, help="seconds a rate")
    group.add_argument("--slo-ttft-ms", type=float, default=500.0, help="bound of the first token")
    group.add_argument("--slo-itl-ms", type=float, default=50.0, help="bound of the mean gap")
    group.add_argument("--model", default="", help="name to ask for; default: the first served")
    group.add_argument("--operator-url", default="", help="default: the host's port plus 1000")
    group.add_argument("--seed", type=int, default=0, help="equal seeds give equal prompts")
    group.add_argument("--out", default="loadtest/report/run", help="directory of the raw data")


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    """Open the files and start sampling."""
    _tests[environment] = LoadTest(environment)


@events.test_stop.add_listener
def end(environment: Environment, **_: Any) -> None:
    """Close the files; objectives that were missed are a result and not a failure."""
    test = _tests.pop(environment)
    test.close()
    environment.process_exit_code = 1 if test.has_errors else 0


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text} is not a list such as 1,2,4") from exc
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError("rates must be above 0")
    return rates


def _served_model(host: str) -> str:
    answer = requests.get(f"{host}/v1/models", timeout=HTTP_TIMEOUT_S, headers=key_headers())
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])
