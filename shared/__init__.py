"""What several services share, by subject; each package may import those above it.

    base/        errors, logs, addresses, asyncio tasks, queues
    settings/    settings of all services
    request/     what a client may ask for: sampling, log probabilities, structured output
    costs/       how long steps and transfers will take
    kv/          KV blocks: hashes, pool, layout
    control/     messages between services, over ZeroMQ
    cluster/     the directory of workers and routers, in Redis
    http/        bounds and deadlines of HTTP ports, API keys
    metrics/     Prometheus metrics of several services
    model/       configuration, weights, layers
    index/       the prefix index, in Redis
    text/        tokenizer, chat templates, text of answers
    grammar/     structured output
    tool_calls/  tool calls and reasoning in answers
    engine/      schedules steps and runs them on a device
    transfer/    moves KV blocks from worker to worker
    worker/      an engine with a network around it

Read first: `control/protocol.py`, `engine/__init__.py`, `transfer/endpoint/__init__.py`.
docs/decisions.md has decisions with their reasons.
"""
