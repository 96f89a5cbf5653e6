"""The page for people who watch a cluster: `/dashboard` on the operator port.

Read first: `pages.py` (its addresses, and what a browser may load), `cluster_data.py` (one document
of all routers), `recent_requests.py` (the last requests). `page.html`, `style.css`, `page.js` and
`numbers.js` are served as they are; what the document has is in `shared/metrics/live.py`.

May import: `metrics` and `placement` of the router, `shared.control.protocol`, `shared.cluster`,
`shared.metrics`.
"""
