"""The application around the routes.

Before a body is read, each request passes `access_log.py` (gives it an id; writes its log line at
the end), `BrowserCheck` (did another site's page send it?), CORS, and `key_check.py` (its API key).
`acceptor.py` accepts connections. `drain_cutoff.py` ends requests that outlast the drain time.

Entry point: `create_app` (app.py).

May import: all of `http`.
"""
