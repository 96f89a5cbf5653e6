"""The `pagewire` command.

    up/       a whole cluster on one machine
    client/   chat, complete, status, top
    batch/    the requests of a batch file, sent to any OpenAI-compatible endpoint
    bench/    load on any OpenAI-compatible endpoint
    simulation/ simulate, plan: loads on clusters that do not exist
    doctor/   checks of this machine

Entry point: `app` (main.py); services.py has the commands that start one service each, and
estimate.py and convert.py work on a model's files.
Read first: `main.py`, `up/cluster.py`, `client/openai_client.py`.

May import: `shared`; services only when a command starts one.
"""
