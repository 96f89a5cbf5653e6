"""The control plane: typed messages over ZeroMQ between routers, decode and prefill workers.

    ControlClient --Ping, requests--> ControlServer --Pong, answers--> ControlClient

Entry points: `ControlServer` (server.py) for a worker, `ControlClient` (client.py) for its clients.
Read first: `channel.py` (what a connection promises; `client.py` and `server.py` see to it),
`protocol.py` (every message), `auth.py` (the cluster's keys).

May import: the small modules of `shared`. Never torch: routers import it.
"""
