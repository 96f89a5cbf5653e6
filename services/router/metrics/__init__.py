"""What the router shows to Prometheus: requests, its own state, other routers' and the workers'.

Read first: `requests.py` (names that vLLM's dashboards know, and Pagewire's own), `state.py`,
`routers.py`, `workers.py`. `numbers.py` has what is counted with each token.

May import: `placement` of the router, `shared.control.protocol`, `shared.cluster`, `shared.index`,
`shared.metrics`. No HTTP.
"""
