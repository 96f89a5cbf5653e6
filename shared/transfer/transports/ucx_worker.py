"""UCX workers, each of which serves one link, and how broken ones are handled.

UCX 1.21 ends the process (a fault in `uct_tcp_iface_handle_events`) if a transfer is aborted, its
peer is alive and the worker that sent it is still progressed. So if an operation on a worker has
failed, or is under way when its link ends, the worker is abandoned: it is never progressed again,
and never destroyed, because ucxx's destructors progress, too. Receives that have not begun are
ended first. An abandoned worker costs memory and file descriptors, so a process that has abandoned
many should end.

ucxx's own asyncio layer polls without a pause, and its `progress` returns only when a large payload
is complete. So this module uses the plain classes and progresses in bounded steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.shared.base.errors import ConfigError, TransferError
from pagewire.shared.base.installing import install_command
from pagewire.shared.kv.device_memory import DeviceBytes

logger = logging.getLogger(__name__)

MAX_ABANDONED = 16  # workers of a process
_STEPS = 16  # a poll: over TCP a step moves up to 128 KiB
CLOSING_S = 0.03  # an empty message to this worker takes 0.1 to 10 ms

# Workers that are open or abandoned. At the interpreter's end ucxx's destructors would progress
# them, or wait for ten seconds; one reference that nobody releases keeps them from running.
_held: set[UcxWorker] = set()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_held))


class UcxLibrary:
    """UCX in this process: one context.

    Attributes:
        num_abandoned: workers so far.

    Args:
        settings: UCX's, as `ucx_settings` gives them.

    Raises:
        ConfigError: ucxx does not load.
        TransferError: UCX does not start.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        try:
            from ucxx import exceptions, libucxx, types
            from ucxx._lib.arr import Array
        except ImportError as exc:
            raise ConfigError(
                f"ucxx does not load ({exc}): choose KV transport 'zmq', or install it: "
                f"{install_command('ucx')}"
            ) from exc

        self.classes, self.tag, self.any_tag = libucxx, types.Tag, types.TagMask(0)
        self.array, self.error = Array, exceptions.UCXError
        self.num_abandoned = 0
        features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        try:
            self.context = libucxx.UCXContext(dict(settings), features)
        except self.error as exc:
            raise TransferError(f"UCX does not start: {exc}") from exc

    def new_worker(self) -> UcxWorker:
        """Return a worker for one link.

        Raises:
            TransferError: too many have been abandoned, or UCX cannot make one.
        """
        if self.num_abandoned >= MAX_ABANDONED:
            raise TransferError(
                f"{self.num_abandoned} UCX workers of this process are broken: it has to restart"
            )
        try:
            return UcxWorker(self)
        except self.error as exc:
            raise TransferError(f"UCX makes no worker: {exc}") from exc


@dataclass(slots=True, eq=False)
class UcxRequest:
    """A send or a receive that UCX has begun.

    Attributes:
        buffer: kept alive while UCX may use it.
    """

    worker: UcxWorker
    handle: Any
    buffer: torch.Tensor
    tag: int

    def poll(self) -> bool:
        """Note what has ended; return whether this has, well, so that UCX is done with its memory.

        Raises:
            TransferError: it has failed, or its worker has.
        """
        if self.handle.completed:
            self.worker.settle()
            if self not in self.worker.under_way:
                return True
        if self.worker.problem is not None:
            raise TransferError(f"UCX: {self.worker.problem}")
        return False


class UcxWorker:
    """A worker, and on the sender's side its endpoint; used by one thread.

    Attributes:
        fd: becomes readable when an armed worker has something to do.
        under_way: sends and receives that have not ended well.
        problem: why it may not be progressed any more.
    """

    def __init__(self, library: UcxLibrary) -> None:
        self._library = library
        self._worker = library.classes.UCXWorker(library.context)
        self._worker.init_blocking_progress_mode()
        self.fd = int(self._worker.epoll_file_descriptor)
        self._endpoint: Any = None
        self.under_way: list[UcxRequest] = []
        self.problem: str | None = None
        _held.add(self)

    @property
    def address(self) -> bytes:
        """The address that a peer's UCX worker connects to."""
        return bytes(self._worker.address)

    @property
    def endpoint(self) -> int:
        """UCX's handle of the connection (`ucp_ep_h`); valid once connected."""
        return int(self._endpoint.handle)

    def connect(self, address: bytes) -> None:
        """Make the UCX endpoint through which payloads are sent.

        Raises:
            TransferError: UCX knows no route there.
        """
        classes = self._library.classes
        try:
            remote = classes.UCXAddress.create_from_buffer(address)
            # With error handling: without it a dead peer ends this process, too.
            self._endpoint = classes.UCXEndpoint.create_from_worker_address(
                self._worker, remote, True
            )
        except self._library.error as exc:
            raise TransferError(f"UCX knows no route to the receiver: {exc}") from exc

    def send(self, tensor: torch.Tensor, nbytes: int, tag: int) -> UcxRequest:
        """Begin to send the first bytes of a tensor.

        Raises:
            TransferError: the worker is broken, or UCX refuses.
        """
        return self._begin(lambda: self._endpoint.tag_send, tensor, nbytes, tag)

    def receive(self, tensor: torch.Tensor, nbytes: int, tag: int) -> UcxRequest:
        """Begin to receive into the first bytes of a tensor.

        Raises:
            TransferError: the worker is broken, or UCX refuses.
        """
        return self._begin(lambda: self._worker.tag_recv, tensor, nbytes, tag)

    def _begin(self, verb: Any, tensor: torch.Tensor, nbytes: int, tag: int) -> UcxRequest:
        if self.problem is not None:  # there may be no endpoint or worker any more
            raise TransferError(f"UCX: {self.problem}")
        try:
            data = self._library.array(_first_bytes(tensor, nbytes))
            handle = verb()(data, self._library.tag(tag))
        except self._library.error as exc:
            raise TransferError(f"UCX: {exc}") from exc
        request = UcxRequest(self, handle, tensor, tag)
        self.under_way.append(request)
        return request

    def poll(self) -> bool:
        """Progress a little; returns whether a request has ended or the worker has broken."""
        for _ in range(_STEPS):
            if self.problem is not None or not self._progress():
                break
        return self.settle() or self.problem is not None

    def settle(self) -> bool:
        """Note which requests have ended; returns whether one has."""
        ended = [request for request in self.under_way if request.handle.completed]
        for request in ended:
            try:
                request.handle.check_error()
                self.under_way.remove(request)
            except self._library.error as exc:
                self._break(str(exc))
        return bool(ended)

    def _progress(self) -> bool:
        """One step; returns whether there may be more to do."""
        more = bool(self._worker.progress_once())
        if self._endpoint is not None and not self._endpoint.alive:
            self._break("UCX found the peer dead")
        return more

    def arm(self) -> bool:
        """Have `fd` report what comes from now on; False if something has come already."""
        try:
            return bool(self._worker.arm())
        except self._library.error as exc:
            self._break(str(exc))
            return False

    def _break(self, problem: str) -> None:
        """Note why it may not be progressed any more; of several problems, the first."""
        if self.problem is None:
            self.problem = problem

    def close(self) -> bool:
        """Free it if nothing is under way, else abandon it; returns whether it was freed.

        May wait for `CLOSING_S`, to end receives that have not begun.
        """
        self.settle()
        if self.under_way and self.problem is None and self._endpoint is None:
            self._end_receives()
        self._break("the link has ended")
        if self._is_quiet() and self._close_endpoint():
            self._endpoint = None
            del self._worker
            _held.discard(self)
            return True
        self._library.num_abandoned += 1
        logger.warning(
            "a KV link ended in mid-transfer: its UCX worker is left alone (%d of %d)",
            *(self._library.num_abandoned, MAX_ABANDONED),
        )
        return False

    def _end_receives(self) -> None:
        """End receives that have not begun, by empty messages to this worker.

        ucxx cannot cancel a receive. One that has begun does not match such a message.
        """
        with contextlib.suppress(TransferError):  # then it is abandoned
            self.connect(self.address)
            for receive in list(self.under_way):
                self.send(receive.buffer, 0, receive.tag)
            until = time.monotonic() + CLOSING_S
            while self.under_way and self.problem is None and time.monotonic() < until:
                self.poll()

    def _is_quiet(self) -> bool:
        """Whether all has ended well; the destructor would wait for what is to be received."""
        tag, mask = self._library.tag(0), self._library.any_tag
        return not self.under_way and not self._worker.tag_probe(tag, mask).matched

    def _close_endpoint(self) -> bool:
        """Close the endpoint; returns whether it is closed."""
        if self._endpoint is None or not self._endpoint.alive:  # UCX has closed it
            return True
        try:
            # By force: `close` would wait for the peer. With nothing under way this ends at once.
            self._endpoint.close_blocking()
        except self._library.error as exc:
            logger.warning("closing a UCX endpoint failed: %s", exc)
            return False
        return True


def _first_bytes(tensor: torch.Tensor, nbytes: int) -> object:
    """Return the first bytes of a uint8 tensor as something that ucxx's `Array` understands.

    A slice of a tensor in GPU memory takes the host tens of microseconds to make and to describe.
    """
    return DeviceBytes(tensor.data_ptr(), (nbytes,)) if tensor.is_cuda else tensor.numpy()[:nbytes]
