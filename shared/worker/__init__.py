"""What prefill and decode services have in common: an engine with a network around it.

Entry point: `run_worker` (process.py), which both services' `main` calls.
Read first: `runtime.py` (the order of start and stop; ends a worker whose engine hangs, or that has
lost too many UCX links), `service.py` (the interface that a role implements), `engine_handle.py`
(what a service may use of the engine), `engine_watch.py` (detects an engine that hangs),
`engine_loss.py` (what such a worker reports), `crash_reporter.py` (the process that reports a crash
in native code), `crash_watch.py` (starts that, and records the steps for it), `kv.py` (opens the KV
endpoint and its carriers).

May import: everything in `shared`, `kernels`.
"""
