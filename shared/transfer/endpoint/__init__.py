"""The KV endpoint: moves KV blocks from one worker's pool into another's.

    worker that computes a prompt                         worker that decodes
    pool --pack--> staging --transport: payload-----------> staging --unpack, check--> pool
                   sender.py --Segment, Return-> socket-> receiver.py
                   credits.py <-Ack, Grant, Reclaim------ credits.py

Each worker has both halves, a `KvSender` (sender.py) and a `KvReceiver` (receiver.py), which share
its staging. `KvEndpoint` (kv_endpoint.py) makes a step hook of them: they run in the engine's
thread, between steps. Nothing here waits: what takes time is polled.

Read first: `shared/transfer/messages.py` (the protocol), `sender.py`, `receiver.py`. Who decides
what:

- `segments.py` cuts a prompt's blocks into segments. No I/O.
- `credits.py` says how many links may be open, and which staging slots each of them and the own
  sender may use. No I/O.
- `events.py` says what the owner of jobs and links, `WorkerService`, has to handle.
- `choose_transport` (sender_link.py) chooses a link's transport.
- `sender.py` sends a corrupt segment again, and ends a link whose segment is not acknowledged in
  time. If a request ends during a transfer, segments that are being packed are still sent; the
  receiver drops them.
- `receiver.py` activates a sequence when all of its blocks have arrived. If a request ends during a
  transfer, it keeps the blocks pinned until nothing is written to them any more.

`shared/worker/prefill_links.py` opens links, also again after a loss. The messages of prefill
jobs use the same links (`shared/transfer/job_messages.py`); the services handle them
(`shared/worker/remote_jobs.py`, `shared/worker/prefill_jobs.py`).

May import: `shared.kv`, `shared.transfer.transports`, `shared.engine`, `shared.control`, `base`,
`settings`, `request`.
"""
