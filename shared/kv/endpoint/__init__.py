"""The KV endpoint: moves KV blocks from a prefill worker's pool into a decode worker's.

    prefill worker                                        decode worker
    pool --pack--> staging --carrier: payload-----------> staging --unpack, check--> pool
                   sender.py --Segment, Return-> socket-> receiver.py
                   credits.py <-Ack, Grant, Reclaim------ credits.py

A prefill worker has a `KvSender` (sender.py), a decode worker a `KvReceiver` (receiver.py): hooks
of the engine that run in the engine's thread, between steps. Nothing here waits: what takes
time is polled. Read first: `shared/kv/messages.py` (the protocol), `sender.py`, `receiver.py`. The
state of both halves of a link is pure (`credits.py`, `segments.py`). `choose_carrier`
(sender_link.py) chooses a link's carrier; `KvSender` sends a corrupt segment again.

May import: `shared.kv` with its carriers, `shared.engine`, `shared.control.protocol`,
`kernels`.
"""
