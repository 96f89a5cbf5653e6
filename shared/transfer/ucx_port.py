"""One UCX worker, progressed by the running event loop.

ucxx's own asyncio layer spins: whoever awaits a transfer there asks for its state in every turn of
the loop, and its progress task does not re-arm the worker. A service that waits for pieces would
burn a core, so this uses ucxx's plain classes: the worker's file descriptor wakes the loop, and
arming it again tells whether there is more to do.

Nothing is received ahead of its sender: messages wait in UCX until they are probed, which tells
their tag and size. So UCX never holds memory of ours into which nothing moves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagewire.shared.errors import ConfigError, TransferError

logger = logging.getLogger(__name__)

# UCX may miss to wake us (a known bug), so it is looked after this often whatever happens.
_TICK_S = 0.5
# How long UCX is asked without a break for what is expected next, where the memory is a GPU's:
# there a piece takes a fraction of a millisecond, and each wake-up through the descriptor as much.
_SPIN_S = 0.001
_PROBES_PER_TURN = 64
_CLOSE_TURNS = 1000
_ANY = 0  # as a tag mask


@dataclass(eq=False, slots=True)
class _Transfer:
    """A send or receive that UCX works on.

    Attributes:
        buffer: kept alive until UCX has done with it.
        done: called once, with what went wrong if something did.
    """

    request: Any
    buffer: Any
    owner: object
    done: Callable[[TransferError | None], None]


class UcxPort:
    """Sends and receives by tag.

    Args:
        on_arrival: called with tag and size of a message that has come. It must take it at once,
            by `receive` or `discard`.
        settings: UCX's, as `ucx_settings` gives them.
        awaits_more: whether a message is due, as an answer to another. While one is, or a
            transfer moves, UCX is asked without a break for a moment after each event: quicker,
            for a busy core. None never does this. Nothing else keeps the port awake: whoever turns
            idly here takes the interpreter from the thread that scatters what has come.
    """

    def __init__(
        self,
        on_arrival: Callable[[int, int], None],
        settings: Mapping[str, str],
        *,
        awaits_more: Callable[[], bool] | None = None,
    ) -> None:
        try:
            from ucxx import exceptions, libucxx, types
            from ucxx._lib.arr import Array
        except ImportError as exc:
            raise ConfigError(f"ucxx does not load: {exc}; choose KV transport 'zmq'") from exc

        self._ucx, self._tag, self._array = libucxx, types.Tag, Array
        self._error: type[Exception] = exceptions.UCXError
        self._any_mask = types.TagMask(_ANY)
        self._on_arrival = on_arrival
        self._transfers: dict[_Transfer, None] = {}  # in the order of their beginning
        self._scratch = bytearray(1)
        self._loop = asyncio.get_running_loop()
        self._awaits_more = awaits_more
        self._awake_until = 0.0
        try:
            features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
            self._worker = libucxx.UCXWorker(libucxx.UCXContext(dict(settings), features))
            self._worker.init_blocking_progress_mode()
        except self._error as exc:
            raise TransferError(f"UCX does not start: {exc}") from exc
        self._fd = int(self._worker.epoll_file_descriptor)
        self._loop.add_reader(self._fd, self._progress)
        self._turn: asyncio.Handle | None = None
        self._tick = self._loop.call_later(_TICK_S, self._on_tick)
        self._wake()

    @property
    def address(self) -> bytes:
        """What other workers make endpoints from."""
        return bytes(self._worker.address)

    def open_endpoint(self, address: bytes, on_error: Callable[[], None]) -> Any:
        """Return an endpoint to another worker.

        Args:
            address: the other's `address`.
            on_error: called in a later turn of the loop if UCX finds the peer dead.

        Raises:
            TransferError: UCX knows no way there.
        """
        try:
            remote = self._ucx.UCXAddress.create_from_buffer(address)
            endpoint = self._ucx.UCXEndpoint.create_from_worker_address(self._worker, remote, True)
        except self._error as exc:
            raise TransferError(f"UCX knows no way to the peer: {exc}") from exc
        endpoint.set_close_callback(lambda: self._loop.call_soon(on_error))
        self._wake()
        return endpoint

    def busy(self, owner: object) -> bool:
        """Whether UCX works on transfers of an owner."""
        return any(transfer.owner is owner for transfer in self._transfers)

    def close_endpoint(self, endpoint: Any, owner: object) -> None:
        """Close an endpoint by force: the owner's transfers have ended when this returns."""
        endpoint.remove_close_callback()
        try:
            endpoint.close_blocking(10**9)
        except self._error as exc:
            logger.warning("closing a UCX endpoint failed: %s", exc)
        for _ in range(_CLOSE_TURNS):
            self._worker.progress()
            self._settle()
            if not self.busy(owner):
                break
        else:  # not seen so far; the transfer's buffer stays alive, and its slot held
            logger.error("UCX did not end a transfer when its endpoint was closed")
        self._wake()

    def send(
        self,
        endpoint: Any,
        owner: object,
        buffer: Any,
        tag: int,
        done: Callable[[TransferError | None], None],
    ) -> None:
        """Begin to send; `done` is called later, or at once."""
        buffer = _exportable(buffer, len(buffer))
        try:
            request = endpoint.tag_send(self._array(buffer), self._tag(tag))
        except self._error as exc:
            done(_mapped(exc))
            return
        self._follow(_Transfer(request, buffer, owner, done))

    def receive(
        self,
        owner: object,
        buffer: Any,
        nbytes: int,
        tag: int,
        done: Callable[[TransferError | None], None],
    ) -> None:
        """Begin to receive a message that has come; `done` is called later, or at once.

        Args:
            owner: whose transfer it is.
            buffer: of bytes, where it goes.
            nbytes: so many at most, from the buffer's beginning on, which has them.
            tag: of the message.
            done: called with what went wrong if something did.
        """
        buffer = _exportable(buffer, nbytes)
        try:
            request = self._worker.tag_recv(self._array(buffer), self._tag(tag))
        except self._error as exc:
            done(_mapped(exc))
            return
        self._follow(_Transfer(request, buffer, owner, done))
        self._settle()  # a short message is there already, and may announce the next

    def discard(self, tag: int) -> None:
        """Throw away a message that has come."""
        self.receive(None, self._scratch, len(self._scratch), tag, lambda error: None)

    def close(self) -> None:
        """Free the worker; all endpoints have been closed."""
        self._tick.cancel()
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._fd)
        # The worker's destructor would wait, without bound, for messages still to be received.
        self._on_arrival = lambda tag, nbytes: self.discard(tag)
        self._worker.progress()
        while self._deliver():
            self._worker.progress()
            self._settle()
        if self._turn is not None:  # a message thrown away just now has asked for one
            self._turn.cancel()
        self._transfers.clear()
        del self._worker

    def _follow(self, transfer: _Transfer) -> None:
        self._transfers[transfer] = None
        self._note_event()
        self._wake()

    def _wake(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._progress)

    def _on_tick(self) -> None:
        self._tick = self._loop.call_later(_TICK_S, self._on_tick)
        self._progress()

    def _progress(self) -> None:
        """Let UCX work, then hand out what it has done; again in the next turn if there is more."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._worker.progress()
        self._settle()
        more = self._deliver()
        if more or self._stays_awake() or not self._worker.arm():
            self._wake()

    def _note_event(self) -> None:
        """Something has happened, so that more is likely to."""
        self._awake_until = self._loop.time() + _SPIN_S

    def _stays_awake(self) -> bool:
        if self._awaits_more is None or self._loop.time() >= self._awake_until:
            return False
        return bool(self._transfers) or self._awaits_more()

    def _settle(self) -> None:
        """Report the transfers that have ended."""
        for transfer in [t for t in self._transfers if t.request.completed]:
            if transfer not in self._transfers:  # reported by a call from within `done`
                continue
            del self._transfers[transfer]
            self._note_event()
            try:
                transfer.request.check_error()
            except self._error as exc:
                transfer.done(_mapped(exc))
            else:
                transfer.done(None)

    def _deliver(self) -> bool:
        """Announce messages that have come; whether there may be more."""
        for _ in range(_PROBES_PER_TURN):
            probe = self._worker.tag_probe(self._tag(0), self._any_mask)
            if not probe.matched:
                return False
            self._on_arrival(int(probe.sender_tag.value), int(probe.length))
        return True


def _mapped(exc: Exception) -> TransferError:
    error = TransferError(f"UCX: {exc}")
    error.__cause__ = exc
    return error


class _DeviceBytes:
    """The first bytes of a tensor in GPU memory, in the form in which ucxx's `Array` takes them.

    A tensor's own slice of them takes the host tens of microseconds to make and to describe, if it
    does so only now and then.
    """

    __slots__ = ("__cuda_array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self._tensor = tensor  # kept alive
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _exportable(buffer: Any, nbytes: int) -> Any:
    """Return the first bytes of a buffer as something that ucxx's `Array` understands."""
    if not isinstance(buffer, torch.Tensor):
        return np.frombuffer(buffer, dtype=np.uint8, count=nbytes)
    return _DeviceBytes(buffer, nbytes) if buffer.is_cuda else buffer.numpy()[:nbytes]
