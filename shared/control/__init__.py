"""The control plane: typed messages over ZeroMQ between routers, decode and prefill workers.

    ControlClient --Ping, requests--> ControlServer --Pong, answers--> ControlClient

Entry points: a worker has a `ControlServer` (server.py); whoever sends it requests has a
`ControlClient` (client.py).
Read first: `protocol.py` (every message), `channel.py` (what a connection guarantees; `client.py`
and `server.py` implement it), `auth.py` (the cluster's keys).

May import: `base`, `settings`, `request`. Never torch: routers import it.
"""
