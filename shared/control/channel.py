"""The control channel: typed messages over ZeroMQ between one server and its clients.

    ControlClient (DEALER) --Ping, requests--> ControlServer (ROUTER) --Pong, answers--> client

A connection is never resumed. A client that loses its server (closed connection, silence for a
lease, a new epoch) reports that once and ends. A server forgets a client that disconnected, fell
silent or does not read; if the client sends anything afterwards, the server answers with a `Pong`
of epoch 0. So neither side continues after messages may have been lost: the owner starts again.

All calls are made in the event loop's thread. `post` never waits; queues are bounded.
"""

from __future__ import annotations

from pagewire.shared.control.auth import ClusterKeys
from pagewire.shared.control.client import ControlClient, make_client_id
from pagewire.shared.control.server import ControlServer

__all__ = ["ClusterKeys", "ControlClient", "ControlServer", "make_client_id"]
