"""The OpenAPI document of the routes at `/openapi.json`, and a page that shows it at `/docs`.

`operations.py` lists the routes with the types of their bodies and answers; `document.py` makes the
document of these types. `pages.py` serves it, and the page in `docs/`.

Read first: `operations.py`.

May import: all of `http` but `server`.
"""
