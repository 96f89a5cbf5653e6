"""The OpenAPI document of the routes at `/openapi.json`, and a page that shows it at `/docs`.

Each route is described where it is declared (`operation.py` of `http`); `document.py` makes the
document of these descriptions and of the types of bodies and answers. `pages.py` serves it, and the
page in `docs/`.

Read first: `document.py`.

May import: all of `http` but `server`.
"""
