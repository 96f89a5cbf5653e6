"""A worker: an engine with a network around it.

All workers can do the same: answer requests, compute prompts for other workers, and embed. The
prefill and the decode service differ only in what they prefer: it decides which requests routers
send to a worker, and which workers offer links to which (`offers_link` in prefill_links.py).

Entry point: `run_worker` (process.py), which both services' `main` calls.
Read first: `runtime.py` (the order of start and stop), `lifetime.py` (ends a worker whose engine
hangs, or that has lost too many UCX links), `service.py` (what peers may ask, and which file does
it), `compose.py` (makes the service), `engine_handle.py` (what it may use of the engine),
`engine_watch.py` (detects an engine that hangs), `engine_loss.py` (what such a worker reports),
`crash_reporter.py` (the process that reports a crash in native code), `crash_watch.py` (starts
that), `step_record.py` (the step under way, for that), `kv.py` (opens the KV endpoint and its
transports).

Where a prompt is computed: the scheduler (shared/engine/scheduling/admission.py) keeps short
prompts on the worker that decodes (`--local-prefill-tokens`). For longer ones, the router names
workers in order of preference (services/router/placement/policy.py). `remote_jobs.py` sends the job
to the first of them that has a working link, and to the next one if that fails. If none is left,
the worker computes the prompt itself.

May import: everything in `shared`, `kernels`.
"""
