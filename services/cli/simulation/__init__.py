"""`pagewire simulate` and `pagewire plan`: loads on clusters that do not exist, in virtual time.

    trace_file.py, workload.py --> loads --> SimulatedCluster --> Answers --> Summary
                                                  |
           real: router policy, in-flight load, scheduler, engine loop, block pools, hashes
           simulated: devices (machine.py, device.py), messages, KV links (wire.py), Redis

A simulation depends on its load, its machine and its seed alone. Two policies or clusters get
exactly the same requests.

Entry points: `simulate` and `plan` (command.py, plan.py). Read first: `cluster.py`, `worker.py`.

May import: `shared` without torch, `services.router.placement`, of `cli` what has no package,
`bench` for lengths and percentiles.
"""
