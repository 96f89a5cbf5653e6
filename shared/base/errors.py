"""The exception tree: everything that Pagewire raises on purpose.

    PagewireError
    +-- ConfigError            a setting is wrong  (CLI exit code 2)
    |   +-- ModelLoadError     the model directory, its configuration or weights
    |   +-- RedisSetupError    Redis refuses or cannot be reached at start-up
    +-- InvalidRequestError    the client's fault; names the field  (HTTP 400)
    |   +-- ModelNotFoundError  (HTTP 404)
    |   +-- ForeignPageError    (HTTP 403)
    +-- OverloadedError        a bounded queue is full  (HTTP 429)
    +-- BusyError              the machine is too busy to do the work in time  (HTTP 503)
    +-- NoWorkerError          no live worker can do the work  (HTTP 503)
    +-- RequestFailedError     a request died inside the system  (HTTP 500)
    |   +-- HarmfulRequestError    it makes workers hang or die; it must not be sent again
    +-- ProtocolError          a control message that does not decode or is not allowed
    |   +-- VersionMismatchError   the peer speaks another protocol version
    |   +-- SealError              a record in Redis that no member of the cluster wrote
    +-- ChannelError           a control connection refuses, is full or is gone
    +-- RedisUnavailableError  Redis did not answer, or answered nonsense, at run time
    +-- TransferError          KV blocks could not be transferred
    |   +-- TransferTimeoutError
    |   +-- LayoutMismatchError    the two sides' caches are shaped differently
    +-- RankError              one of the processes that compute a model together is lost
    |   +-- RankKilledError      somebody has killed it, or the system, whose memory ran out
    +-- IllegalTransitionError a request status change that the table does not allow: a bug
    +-- SchedulingError        the scheduler failed on some sequences: a bug
    +-- IntegrityError         block accounting does not add up: a bug

Errors of libraries are mapped to these at the edge, raised `from` what caused them.
"""

from __future__ import annotations

import msgspec

# What msgspec raises for bytes that are not a message of a type: text that is not UTF-8, in tags,
# map keys and lists, is a plain UnicodeDecodeError there.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class PagewireError(Exception):
    """Base of all errors that Pagewire raises on purpose."""


class ConfigError(PagewireError):
    """A setting is wrong. The message says what and what to do, in one line."""


class ModelLoadError(ConfigError):
    """The model directory, its configuration or its weights cannot be used."""


class RedisSetupError(ConfigError):
    """Redis refuses or cannot be reached while a service starts."""


class InvalidRequestError(PagewireError):
    """The client asked for something that cannot be done.

    Attributes:
        param: name of the offending field, if one can be named.
        code: OpenAI's name of the problem; None if a field's value is wrong.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class ForeignPageError(InvalidRequestError):
    """The page of another site made a browser send the request.

    Attributes:
        code: which header shows it.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code=code)


class OverloadedError(PagewireError):
    """A bounded queue is full; trying again later helps.

    Attributes:
        retry_after_s: seconds after which the client should try again.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KeyLimitError(OverloadedError):
    """An API key, or an address where there are no keys, holds as much as it may.

    The message is for the client. Trying again helps once some of it has ended.

    Attributes:
        limit: name of the setting that bounds it.
    """

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(f"{message}, as many as {limit} allows")
        self.limit = limit


class BusyError(PagewireError):
    """The clock ran out before the work was done, through no fault of the client.

    Trying again helps. The message is for the client.
    """


class NoWorkerError(PagewireError):
    """No live worker can do the work.

    Attributes:
        waited_s: seconds that the request waited for one.
    """

    def __init__(self, message: str, waited_s: float = 0.0) -> None:
        super().__init__(message)
        self.waited_s = waited_s


class RequestFailedError(PagewireError):
    """A request died inside the system, through no fault of the client."""


class HarmfulRequestError(RequestFailedError):
    """A request made workers hang or die, and would do so again; the message says what happened."""


class ProtocolError(PagewireError):
    """A control message does not decode, is too large or is not allowed here."""


class VersionMismatchError(ProtocolError):
    """The peer speaks another version of the protocol."""


class SealError(ProtocolError):
    """A record does not have the cluster's seal."""


class ChannelError(PagewireError):
    """A control connection cannot be made, its queue is full, or its peer is gone."""


class RedisUnavailableError(PagewireError):
    """Redis did not answer in time, or answered with an error, at run time."""


class TransferError(PagewireError):
    """KV blocks could not be sent from one worker to another."""


class TransferTimeoutError(TransferError):
    """A transfer did not finish in time."""


class LayoutMismatchError(TransferError):
    """The two sides' KV blocks are shaped differently and cannot be exchanged."""


class RankError(PagewireError):
    """One of the processes that compute a model together is lost, so that all end.

    Attributes:
        rank: the one that the others miss; None if it is not known, or if its own error is known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class BlamelessRankError(RankError):
    """No request is suspected: a rank was killed, was stopped, or ran out of memory."""


class IllegalTransitionError(PagewireError):
    """A request's current status does not allow a change to the new one."""


class SchedulingError(PagewireError):
    """The scheduler failed in the middle of a decision; the cause says how.

    Attributes:
        request_ids: the sequences that it had changed.
    """

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(f"the scheduler failed on {len(request_ids)} sequences")
        self.request_ids = request_ids


class IntegrityError(PagewireError):
    """Block accounting does not add up."""
