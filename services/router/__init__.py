"""The router: one OpenAI-compatible endpoint in front of all workers.

    http/       routes, request bodies, responses and streams
    text/       from the workers' tokens to the text of an answer
    dispatch/   requests in progress: sent to a worker, retried, migrated
    placement/  which workers a request goes to, and whether it is admitted at all
    cluster/    the workers, the connections to them, the other routers
    metrics/    what Prometheus reads
    dashboard/  the page for operators

A request passes http/, dispatch/, placement/ and cluster/ on its way to a decode worker; its tokens
come back through cluster/, dispatch/, text/ and http/.

Entry point: `run` (main.py); `service.py` composes the parts, `operator_pages.py` those that
operators see.
Read first: `http/routes/generation.py`, `dispatch/dispatcher.py`, `placement/predicted.py`.

May import: `shared`, except what needs torch.
"""
