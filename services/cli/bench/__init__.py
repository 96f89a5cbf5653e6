"""`pagewire bench`: puts a load on any OpenAI-compatible endpoint and measures its answers.

Entry point: `bench` (command.py).
Read first: `load.py` (requests and their start times: pure functions), `runner.py`, `stats.py`
(pure arithmetic).
The tokens of a reply and the gaps between them are counted in `services/cli/client`.

May import: `services.cli.client`, modules of `services.cli`, `shared`.
"""
