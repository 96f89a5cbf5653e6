"""Where a request goes: what is known about the workers, and pure decisions that use it.

Entry point: `WorkerSelector.place` (worker_selector.py).
Read first: `predicted.py` (the default policy: the soonest first token), `policy.py` (types of all
policies, and two simpler ones; all are pure functions), `policies.py` (their names), `forecast.py`
(predicts times from workers' prices), `worker_selector.py` (collects what the policy needs; leaves
out workers of another model), `in_flight_load.py` (load that was sent to a worker and that its
reports do not show yet), `pace.py` (how slow workers are, relative to predictions),
`placed_sessions.py` (which sessions have a home), `admission.py` (refuses requests when the queue
is full).

May import: `cluster` of the router, `shared.control.protocol`, `shared.cluster`, `shared.index`,
`shared.kv.block_hash`, `base`, `settings`, `request`. No HTTP.
"""
