"""One HTTP request: its body is received, its stream is sent, its client may leave.

`http_io.py` receives bodies and sends streams, and cancels a request whose client has left or reads
too slowly. `direct_writer.py` writes events to the transport from where tokens arrive. `record.py`
has what is known of a request so far. `error_forms.py` writes an error in the form of its route.

Read first: `http_io.py`.

May import: `api.openai`, `api.anthropic`.
"""
