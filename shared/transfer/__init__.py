"""Moves KV blocks from one worker's pool to another's.

    endpoint/        both halves: links, segments, credits
    transports/        send the bytes: CUDA IPC, UCX or ZeroMQ
    messages.py      the protocol of a link; job_messages.py: of prefill jobs
    staging.py       page-locked or GPU memory that blocks pass through
    peer_process.py  who maps another process's memory

Entry point: `KvEndpoint` (endpoint/).
Read first: `endpoint/__init__.py`, `messages.py`.

May import: `engine`, `kv`, `control` and what is above them in `shared`.
"""
