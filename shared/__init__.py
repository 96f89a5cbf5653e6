"""What several services share, by subject; each package may import those above it.

    config.py       settings of all services
    sampling.py     a request's parameters: defaults, ranges, seeds of its n answers
    sampling_types.py   the parameters' types and bounds
    small modules   errors, logs, logprobs, aio, addresses, ...
    control/        messages between services, over ZeroMQ
    cluster/        the directory of workers and routers, in Redis
    http/           bounds and deadlines of HTTP ports, API keys
    metrics/        Prometheus metrics of several services
    model/          configuration, weights, layers
    kv/             KV blocks: hashes, pool, layout
    index/          the prefix index, in Redis
    text/           tokenizer, chat templates, text of answers
    tools/          tool calls and reasoning in answers
    grammar/        structured output
    engine/         schedules steps and runs them on a device
    kv/carriers/, kv/endpoint/   move blocks from worker to worker
    worker/         an engine with a network around it

Where another introduction says "small modules", it means the files of this directory.

Read first: `control/protocol.py`, `engine/__init__.py`, `kv/endpoint/__init__.py`.
docs/decisions.md says which file decides what.
"""
