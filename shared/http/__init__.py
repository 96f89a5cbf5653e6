"""How HTTP ports are served: uvicorn's httptools protocol with deadlines and bounds.

    connection --> bounded_protocol.py --> connections.py (bounds, deadlines) --> phases.py (waits)

Entry points: `Connections` (connections.py), one for each port, and its `protocol`, for
`uvicorn.Config`.
Read first: `bounded_protocol.py` (what is added to uvicorn's protocol), `phases.py` (which
connection makes room for a new one), `proxy_header.py` (the client's address as a gateway reports
it), `api_keys.py` (which keys are valid), `browser_check.py` (what another site's page may not
send), `request_id.py` (how a request is named in logs).

May import: `base`, `settings`, `request`. Never torch: routers import it.
"""
