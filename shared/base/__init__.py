"""What every other package may use: errors, logs, addresses, asyncio tasks, queues.

    errors.py       all exceptions of ours
    aio.py          background tasks; logs.py and log_writer.py: log lines that nobody waits for
    addresses.py    names and addresses of services; listener.py: sockets that accept connections
    tracing.py      spans of requests, by OpenTelemetry
    fair_queue.py   takes turns between clients; shares.py: how much each of them may hold
    field_rules.py  bounds of a field's value
    surrogates.py   finds halves of surrogate pairs in JSON

Read first: `errors.py`.

May import: nothing of ours. Never torch.
"""
