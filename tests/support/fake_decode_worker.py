"""A decode worker without an engine: real sockets, a real record in Redis, scripted tokens."""

import asyncio
import struct
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from pagewire.shared.cluster.redis_client import connect_redis
from pagewire.shared.cluster.registry import (
    LinkInfo,
    RecordPublisher,
    Registry,
    WorkerLoad,
    WorkerRecord,
)
from pagewire.shared.control.channel import ClusterKeys, ControlServer
from pagewire.shared.control.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    ControlMessage,
    Embed,
    Generate,
    LoadReport,
    PrefillSoon,
    Refused,
    Role,
    Timings,
    TokenBatch,
    TokenOutput,
)
from pagewire.shared.request.logprobs import PromptLogprobs
from pagewire.tests.support.fake_device import score
from pagewire.tests.support.worker_records import IDENTITY

HEARTBEAT_S = 0.1
LEASE_S = 1.0


def _record(**fields: Any) -> WorkerRecord:
    usual: dict[str, Any] = {
        "endpoint": "",
        "metrics_endpoint": "http://127.0.0.1:9",
        "model": "fake",
        "model_identity": IDENTITY,
        "max_model_len": 1 << 20,
        "kv_transports": ["zmq"],
        "protocol": PROTOCOL_VERSION,
        "load": WorkerLoad(free_blocks=64, total_blocks=64),
    }
    return WorkerRecord(**(usual | fields))


def fake_embedding(token_ids: list[int]) -> bytes:
    """Return the fake worker's embedding of a prompt: three numbers."""
    return struct.pack("<3f", token_ids[0] / 3, len(token_ids), token_ids[-1] / 7)


class FakeDecodeWorker:
    """Answers every request with the same tokens, a step apart.

    Attributes:
        answer: the tokens of every answer; a migrated request continues after its tokens.
        step_s: pause before each token, in seconds.
        hold: while it is cleared, no tokens are sent.
        most_parts: largest number of messages with a prompt's log probabilities, four tokens each.
        load: load that is reported with tokens, if any.
        prefilled_by: a prefill worker that is reported to have sampled first tokens, and its load.
        refuse: reason with which every request is refused, if any.
        error: error with which every answer ends, if any.
        error_param: name of the request's field in that error, if any.
        error_is_busy: the reason of that error is that the worker had no time.
        cached_tokens: number of cached prompt tokens that is reported.
        generated: requests for tokens that came, in order, each by itself.
        groups: number of requests of each message.
        embedded: requests for an embedding that came, in order.
        embedding_repeats: how often an embedding has its numbers.
        most_active: largest number of requests that ran at the same time.
        cancelled: ids of cancelled requests.
        record: the worker record; a new one is published with the next heartbeat.
    """

    def __init__(
        self,
        redis_url: str,
        secret: str,
        worker_id: str = "decode-0",
        *,
        answer: list[int] | None = None,
        step_s: float = 0.0,
        epoch: int = 1,
        role: Role = "decode",
        lease_s: float = LEASE_S,
        **record: Any,
    ) -> None:
        self.answer = answer or list(range(100, 116))
        self.step_s = step_s
        self.hold = asyncio.Event()
        self.hold.set()
        self.most_parts = 1 << 20
        self.load: LoadReport | None = None
        self.prefilled_by: tuple[str, LoadReport] | None = None
        self.refuse: str | None = None
        self.error: str | None = None
        self.error_param: str | None = None
        self.error_is_busy = False
        self.cached_tokens = 0
        self.generated: list[Generate] = []
        self.groups: list[int] = []
        self.embedded: list[Embed] = []
        self.times_woken = 0
        self.embedding_repeats = 1
        self.most_active = 0
        self.cancelled: list[str] = []
        self._redis_url, self._secret, self._lease_s = redis_url, secret, lease_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stack = AsyncExitStack()
        self._server = ControlServer(
            "127.0.0.1",
            0,
            ClusterKeys.derive(secret),
            worker_id,
            epoch,
            self._on_message,
            self._on_peer_lost,
            lease_s=lease_s,
            heartbeat_s=HEARTBEAT_S,
        )
        self.record = _record(worker_id=worker_id, role=role, epoch=epoch, **record)

    @property
    def active(self) -> int:
        """Requests that still run."""
        return len(self._tasks)

    @property
    def num_routers(self) -> int:
        """Routers that are connected."""
        return len(self._server.peers)

    async def __aenter__(self) -> "FakeDecodeWorker":
        endpoint = await self._server.start()
        self._stack.push_async_callback(self._stop_serving)
        self.record = msgspec.structs.replace(self.record, endpoint=endpoint)
        redis = await connect_redis(self._redis_url)
        self._stack.push_async_callback(redis.aclose)
        registry = Registry(redis, self._secret, self._lease_s)
        publisher = RecordPublisher(registry, lambda: self.record, HEARTBEAT_S)
        await publisher.start()
        self._stack.push_async_callback(publisher.close)
        self._publisher = publisher
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def die(self) -> None:
        """Stop serving at once; the record stays until its lease ends, as after a crash."""
        await self._stop_serving()

    async def stop_renewing(self) -> None:
        """Withdraw the record, but continue to serve, as a worker whose engine is stuck does."""
        await self._publisher.close()

    def put_record(self, **changes: Any) -> None:
        """Change fields of the worker record."""
        self.record = msgspec.structs.replace(self.record, **changes)

    async def _stop_serving(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await self._server.close()

    def _on_message(self, peer_id: str, message: ControlMessage) -> None:
        if isinstance(message, Cancel):
            self.cancelled.append(message.request_id)
            if (task := self._tasks.pop(message.request_id, None)) is not None:
                task.cancel()
        elif isinstance(message, Generate):
            requests = message.each()
            self.generated += requests
            self.groups.append(len(requests))
            for request in requests:
                self._on_request(peer_id, request)
        elif isinstance(message, Embed):
            self.embedded.append(message)
            self._on_request(peer_id, message)
        elif isinstance(message, PrefillSoon):
            self.times_woken += 1

    def _on_request(self, peer_id: str, request: Generate | Embed) -> None:
        if self.refuse is not None:
            refused = Refused(request_id=request.request_id, reason=self.refuse, message="scripted")
            self._server.post(peer_id, refused)
            return
        if isinstance(request, Embed):
            work = self._embed(peer_id, request)
        else:
            work = self._generate(peer_id, request)
        self._tasks[request.request_id] = asyncio.create_task(work)
        self.most_active = max(self.most_active, self.active)

    def _on_peer_lost(self, peer_id: str) -> None:
        for request_id in list(self._tasks):
            self.cancelled.append(request_id)
            self._tasks.pop(request_id).cancel()

    async def _embed(self, peer_id: str, request: Embed) -> None:
        await asyncio.sleep(self.step_s)
        await self.hold.wait()
        output = TokenOutput(
            request_id=request.request_id,
            finish_reason="stop",
            embedding=fake_embedding(request.token_ids) * self.embedding_repeats,
        )
        if self.error is not None:
            output = TokenOutput(
                request_id=request.request_id, finish_reason="error", error=self.error
            )
        self._server.post(peer_id, TokenBatch(outputs=[output]))
        self._tasks.pop(request.request_id, None)

    async def _generate(self, peer_id: str, request: Generate) -> None:
        first = len(request.output_token_ids)
        self._send_prompt_logprobs(peer_id, request)
        tokens = self.answer[: request.spec.max_tokens]
        for position in range(first, len(tokens)):
            await asyncio.sleep(self.step_s)
            await self.hold.wait()
            is_last = position == len(tokens) - 1
            is_early = request.timed and position == first
            reason = "length" if len(tokens) == request.spec.max_tokens else "stop"
            output = TokenOutput(
                request_id=request.request_id,
                token_ids=[tokens[position]],
                cached_tokens=self.cached_tokens if position == first else None,
                finish_reason=reason if is_last else None,
                timings=Timings(queue_s=0.01, prefill_s=0.02) if is_last or is_early else None,
                logprobs=None if request.spec.logprobs is None else score([tokens[position]]),
            )
            if self.error is not None:
                output = TokenOutput(
                    request_id=request.request_id,
                    finish_reason="error",
                    error=self.error,
                    param=self.error_param,
                    is_busy=self.error_is_busy,
                )
            if position == first and self.prefilled_by is not None:
                worker_id, load = self.prefilled_by
                output = msgspec.structs.replace(
                    output, prefill_worker=worker_id, prefill_load=load
                )
            self._server.post(peer_id, TokenBatch(outputs=[output], load=self.load))
            if output.finish_reason is not None:
                break
        self._tasks.pop(request.request_id, None)

    def _send_prompt_logprobs(self, peer_id: str, request: Generate) -> None:
        if request.spec.prompt_logprobs is None:
            return
        whole = score(request.prompt_token_ids[1:])
        for start in range(0, min(len(whole), 4 * self.most_parts), 4):
            part = PromptLogprobs(1 + start, whole.part(start, start + 4))
            output = TokenOutput(request_id=request.request_id, prompt_logprobs=part)
            self._server.post(peer_id, TokenBatch(outputs=[output]))


def fake_prefill_worker(
    redis_url: str, secret: str, worker_id: str, **record: Any
) -> FakeDecodeWorker:
    """Return a prefill worker as a router sees it: it gets embeddings, and is woken for jobs."""
    return FakeDecodeWorker(redis_url, secret, worker_id, role="prefill", **record)


def link(peer: str, gbps: float = 0.0) -> LinkInfo:
    """Return a KV link to a peer."""
    return LinkInfo(peer=peer, transport="zmq", gbps=gbps)
