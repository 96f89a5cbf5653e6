"""`pagewire batch`: sends the requests of one of OpenAI's batch files to an endpoint.

Entry point: `batch` (command.py).
Read first: `lines.py` (what the files contain), `output_file.py` (what makes a batch resumable),
`sender.py` (when a line is sent again).

May import: `services.cli.client`, modules of `services.cli`, `shared`.
"""
