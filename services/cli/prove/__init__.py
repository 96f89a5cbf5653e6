"""`pagewire prove`: a cluster's answers keep their tokens while its workers are killed and frozen.

Entry point: `prove` (command.py).
Read first: `run.py` (a calm run, then a disturbed one), `faults.py` (which faults, and when),
`judgement.py` (lines with marks out of the measured facts: a pure function), `worker.py` (the
prefill worker of this command alone, which flips a byte or dies when it is asked to).

May import: `shared`, modules of `services.cli`, and in `worker.py` the prefill service's entry
point.
"""
