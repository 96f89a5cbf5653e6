"""Starts a local cluster of processes, waits until it is ready, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from pagewire import __version__
from pagewire.services.cli.cluster_view import ClusterView, fetch_cluster_view
from pagewire.services.cli.running_clusters import RunningCluster
from pagewire.services.cli.up import redis_process
from pagewire.services.cli.up.cluster_plan import (
    ClusterOptions,
    RouterSockets,
    crowded_gpus,
    plan_services,
    ranks_on_shared_gpus,
    restarted_router,
)
from pagewire.services.cli.up.log_lines import as_json_line
from pagewire.services.cli.up.machine import LOOPBACK, Machine, local_url
from pagewire.services.cli.up.processes import ChildSpec
from pagewire.services.cli.up.progress import ProgressDisplay
from pagewire.services.cli.up.ready_box import ReadyFacts, show_ready_box
from pagewire.services.cli.up.ready_file import ReadyFile
from pagewire.services.cli.up.run_dir import private_dir
from pagewire.services.cli.up.supervisor import Supervisor
from pagewire.shared.base.addresses import is_loopback
from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.listener import bound_socket
from pagewire.shared.base.logs import LogForm, json_line
from pagewire.shared.cluster.redis_client import without_password

OWN_REDIS_START_S = 15.0
FOREIGN_REDIS_ANSWER_S = 3.0
LEAVE_S = 15.0  # for a service to leave once its requests have ended or are cut
STARTING_POLL_S = 0.2
RUNNING_POLL_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Store:
    """The cluster's Redis.

    Attributes:
        spec: how to run it; None if `pagewire up` did not start it.
        description: for the ready box, without a password.
    """

    url: str
    description: str
    spec: ChildSpec | None = None


@dataclass(frozen=True)
class ClusterContext:
    """The parameters of a cluster that are not options: secret, Redis, output.

    Attributes:
        secret: the cluster secret of all services.
        redis_url: URL of the Redis to use; None starts one.
        drain_timeout_s: time for requests to finish at the end.
        echo: print the children's output, too.
        log_format: format of log lines and of this process's messages.
        needs_key: clients must send an API key.
        trusts_placement: requests may have a prefill worker compute their prompts.
        ready_file: shows other programs when the cluster is ready.
        model: the name that clients ask for.
    """

    options: ClusterOptions
    machine: Machine
    secret: str
    redis_url: str | None
    drain_timeout_s: float
    log_dir: Path
    console: Console
    echo: bool = False
    log_format: LogForm = "text"
    needs_key: bool = False
    trusts_placement: bool = False
    ready_file: ReadyFile | None = None
    model: str = ""

    def say(self, message: str) -> None:
        """Print a message with the time."""
        if self.log_format == "json":
            self._print(json_line("info", "pagewire.up", message, "up"))
        else:
            self._print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}")

    def echo_line(self, name: str, line: str) -> None:
        """Print a service's line, which has a time, and in JSON the service's name."""
        if self.log_format == "json":
            self._print(as_json_line(name, line))
        else:
            self._print(f"{name} | {line}")

    def _print(self, message: str) -> None:
        """Print a message as it is, as long as there is a terminal to print to."""
        try:
            self.console.print(message, markup=False, highlight=False, emoji=False, soft_wrap=True)
        except OSError:  # closed under us: serving goes on, and so does stopping
            self.console.quiet = True

    @property
    def url(self) -> str:
        """The routers' URL for clients on this machine."""
        return local_url(self.options.host, self.options.port)

    @property
    def operator_url(self) -> str:
        """The operator port's URL on this machine."""
        return local_url(LOOPBACK, self.options.operator_port)


# Work to do with a cluster, instead of serving until a signal comes.
Work = Callable[[ClusterContext, Supervisor], Awaitable[None]]


async def run_cluster(context: ClusterContext, work: Work | None = None) -> None:
    """Run a cluster until Ctrl-C, SIGTERM or SIGHUP; when it returns no process is left.

    Args:
        context: what it runs with.
        work: begins once the cluster is ready; the cluster stops when it has ended.

    Raises:
        ConfigError: a service refuses its configuration, or Redis does not answer.
        ClusterStartError: a service keeps dying before the cluster was ready.
    """
    options = context.options
    with (
        bound_socket(options.host, options.port) as listener,
        bound_socket(LOOPBACK, options.operator_port, "--operator-port") as operator,
        private_dir() as private,
        _record(context, operator.getsockname()[1]).kept_in(private),
    ):
        options = replace(options, operator_port=operator.getsockname()[1])
        context = replace(context, options=options)
        sockets = RouterSockets(listener.fileno(), operator.fileno())
        if not (context.needs_key or is_loopback(listener.getsockname()[0])):
            context.say(
                f"no API keys are set: anybody who reaches {options.host} port {options.port} can "
                "use it (--api-key-file, PAGEWIRE_API_KEY)"
            )
        store = choose_store(context, private)
        grace_s = context.drain_timeout_s + LEAVE_S
        echo = context.echo_line if context.echo else None
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            Supervisor(context.log_dir, context.say, echo=echo, grace_s=grace_s) as supervisor,
        ):
            stop = asyncio.Event()
            with _stop_on_signals(stop, supervisor, context):
                cluster = _Cluster(supervisor, context, store, sockets, client, work)
                await cluster.run_until(stop)
                listener.close()  # new clients are refused; routers close theirs as they drain
                await supervisor.stop()
                context.say("stopped")


def _record(context: ClusterContext, operator_port: int) -> RunningCluster:
    return RunningCluster(
        pagewire=__version__,
        pid=os.getpid(),
        url=context.url,
        operator_url=local_url(LOOPBACK, operator_port),
        model=context.model,
        started_s=time.time(),
    )


def choose_store(context: ClusterContext, private: Path) -> Store:
    """Return the Redis to use: the one asked for, an installed server, or the embedded one."""
    if context.redis_url is not None:
        address = without_password(context.redis_url)
        return Store(context.redis_url, address)
    program = redis_process.find_server()
    if program is not None:
        spec, url = redis_process.server_spec(program, private)
        return Store(url, f"{Path(program).name} on a private socket", spec)
    context.say(
        "no redis-server or valkey-server found: using the embedded one, which is slow "
        "(install redis-server for more than a try)"
    )
    spec, url = redis_process.embedded_spec(private)
    return Store(url, "embedded (no redis-server found)", spec)


@dataclass(frozen=True)
class _Cluster:
    """The processes of a cluster, and what they run with."""

    supervisor: Supervisor
    context: ClusterContext
    store: Store
    sockets: RouterSockets
    client: httpx.AsyncClient
    work: Work | None

    async def run_until(self, stop: asyncio.Event) -> None:
        """Run the cluster until it is to stop.

        Raises:
            PagewireError: it is pointless to go on.
        """
        life = asyncio.create_task(self._live())
        stopping = asyncio.create_task(stop.wait())
        failure = self.supervisor.failure
        try:
            watched: set[asyncio.Future[Any]] = {life, stopping, failure}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            if life.done():
                life.result()
        finally:
            await end_task(life)
            await end_task(stopping)

    async def _live(self) -> None:
        """Start everything in order, show the ready box, then watch the cluster."""
        supervisor, context = self.supervisor, self.context
        is_json = context.log_format == "json"
        console = Console(quiet=True) if is_json else context.console
        with ProgressDisplay(console, lambda: supervisor.statuses) as progress:
            await self._start_all()
            view = await self._wait_until_ready(progress)
        supervisor.mark_cluster_ready()
        for name in context.options.router_names:
            supervisor.replace(restarted_router(supervisor.spec(name)))
        if is_json:
            context.say(f"{view.model} is ready at {context.url}/v1; logs: {context.log_dir}")
        urls = (context.url, context.operator_url)
        facts = ReadyFacts(
            *urls,
            self.store.description,
            context.log_dir,
            context.needs_key,
            context.trusts_placement,
        )
        show_ready_box(console, view, facts)
        with _announced(context, view):
            watching = start_task(self._watch(), "watching")
            try:
                await (watching if self.work is None else self.work(context, supervisor))
            finally:
                await end_task(watching)

    async def _watch(self) -> None:
        """Keep the supervisor's view of a cluster that was ready up to date."""
        while True:
            await self._poll()
            await asyncio.sleep(RUNNING_POLL_S if self.supervisor.all_ready else STARTING_POLL_S)

    async def _start_all(self) -> None:
        context, store = self.context, self.store
        if store.spec is None:
            await redis_process.wait_until_answering(store.url, FOREIGN_REDIS_ANSWER_S)
        else:
            self.supervisor.start(store.spec)
            await redis_process.wait_until_answering(store.url, OWN_REDIS_START_S)
        env = {"PAGEWIRE_CLUSTER_SECRET": context.secret, "PAGEWIRE_REDIS_URL": store.url}
        for find in (crowded_gpus, ranks_on_shared_gpus):
            if note := find(context.options, context.machine):
                context.say(note)
        for spec in plan_services(context.options, context.machine, env, self.sockets):
            self.supervisor.start(spec)

    async def _wait_until_ready(self, progress: ProgressDisplay) -> ClusterView:
        """Wait until all routers, which know which workers to expect, say that all are ready."""
        while True:
            view = await self._poll()
            progress.update([] if view is None else view.waiting_for)
            if view is not None and view.ok and self.supervisor.all_ready:
                return view
            await asyncio.sleep(STARTING_POLL_S)

    async def _poll(self) -> ClusterView | None:
        """Ask a router which workers and routers are there, and notify the supervisor."""
        view = await fetch_cluster_view(self.client, self.context.operator_url)
        epochs = {} if view is None else view.ready_epochs
        if self.store.spec is not None and await redis_process.is_answering(self.store.url):
            epochs[self.store.spec.name] = None
        self.supervisor.mark_ready(epochs)
        return view


def _announced(context: ClusterContext, view: ClusterView) -> AbstractContextManager[None]:
    """Show other programs that the cluster is ready, for as long as the context lasts."""
    if context.ready_file is None:
        return contextlib.nullcontext()
    content = {
        "pagewire": __version__,
        "pid": os.getpid(),
        "url": context.url,
        "operator_url": context.operator_url,
        "model": view.model,
        "log_dir": str(context.log_dir),
        "services": msgspec.to_builtins(view.services),
    }
    return context.ready_file.present(content)


@contextlib.contextmanager
def _stop_on_signals(
    stop: asyncio.Event, supervisor: Supervisor, context: ClusterContext
) -> Iterator[None]:
    """Let the first signal stop the cluster and a second one stop it at once."""

    def on_signal() -> None:
        if stop.is_set():
            supervisor.end_grace_period()
        else:
            stop.set()
            limit = f"{context.drain_timeout_s:g} s"
            context.say(f"stopping: requests have {limit} to finish (Ctrl-C again ends them now)")

    loop = asyncio.get_running_loop()
    heard = [number for number in STOP_SIGNALS if not _is_under_nohup(number)]
    for number in heard:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


def _is_under_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
