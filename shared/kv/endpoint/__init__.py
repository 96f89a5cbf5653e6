"""The KV endpoint: moves KV blocks from a prefill worker's pool into a decode worker's.

    prefill worker                                        decode worker
    pool --pack--> staging --carrier: payload-----------> staging --unpack, check--> pool
                   sender.py --Segment, Return-> socket-> receiver.py
                   credits.py <-Ack, Grant, Reclaim------ credits.py

A prefill worker has a `KvSender` (sender.py), a decode worker a `KvReceiver` (receiver.py): hooks
of the engine that run in the engine's thread, between steps. Nothing here waits: what takes time is
polled. Read first: `shared/kv/messages.py` (the protocol), `sender.py`, `receiver.py`. Two files
decide without any I/O: `credits.py` says how many links may be open and which staging slots each
may use, `segments.py` cuts a prompt's blocks into segments. `choose_carrier` (sender_link.py)
chooses a link's carrier; `KvSender` sends a corrupt segment again, and ends a link whose segment is
not acknowledged in time. If a request ends during a transfer, `receiver.py` keeps its blocks pinned
until they are written, and `sender.py` drops what it has packed of them.

`services/decode/prefill_links.py` opens links, and opens lost ones again.

The messages of prefill jobs cross the same links (`shared/kv/job_messages.py`); the services handle
them (`services/decode/remote_jobs.py`, `services/prefill/service.py`).

May import: `shared.kv` with its carriers, `shared.engine`, `shared.control.protocol`,
`kernels`.
"""
