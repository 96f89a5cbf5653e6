"""Carriers: the ways of moving a segment's payload from one worker's staging to another's.

A carrier moves bytes between staging slots and knows nothing of jobs or blocks. `base.py` is the
interface; `zmq.py` the one that works everywhere. Adding one: a file here, a line in
`shared/worker/kv.py`, its name in `shared/config.py`.
"""
