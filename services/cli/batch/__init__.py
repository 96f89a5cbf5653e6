"""`pagewire batch`: sends the requests of a batch file in OpenAI's format to an endpoint.

Entry point: `batch` (command.py).
Read first: `lines.py` (what the files contain), `output_file.py` (what makes a batch resumable),
`sender.py` (when a line is sent again).

May import: `services.cli.client`, modules of `services.cli`, `shared`.
"""
