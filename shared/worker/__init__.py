"""What prefill and decode services have in common: an engine with a network around it.

Entry point: `run_worker` (runtime.py), which both services' `main` calls.
Read first: `runtime.py` (order of start and stop; ends a worker whose engine hangs, or that has
lost too many UCX links), `service.py` (what a role adds), `engine_watch.py` (whether an engine
hangs), `engine_handle.py` (what a service sees of the engine), `kv.py` (opens the KV endpoint and
its carriers).

May import: everything in `shared`.
"""
