"""The input of a stored response as OpenAI lists it: items with ids, page by page.

The input is the whole conversation before the answer, with earlier answers. An item without an id
gets one that is derived from the item and its place in the conversation, so it is the same on every
router and in each later response of the conversation.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagewire.services.router.http.api.responses.bodies import Item, Part
from pagewire.services.router.http.api.responses.store import StoredResponse
from pagewire.shared.base.errors import UNDECODABLE, InvalidRequestError, RequestFailedError

MAX_PAGE = 100
DEFAULT_PAGE = 20

ItemStatus = Literal["in_progress", "completed", "incomplete"]
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class ItemsQuery(msgspec.Struct, frozen=True):
    """Which items of a response's input to return.

    Attributes:
        after: the id of the item before the first one to return.
        limit: how many items to return at most.
        order: "asc" is the order of the conversation.
    """

    after: str | None = None
    limit: Annotated[
        int, Meta(ge=1, le=MAX_PAGE, description=f"an integer from 1 to {MAX_PAGE}")
    ] = DEFAULT_PAGE
    order: Annotated[Literal["asc", "desc"], Meta(description='"asc" or "desc"')] = "desc"


class _KeptItem(Item, frozen=True):
    """An item as it was stored; a client may have given the other fields any value."""

    id: Any = None
    status: Any = None


class _Output(msgspec.Struct, frozen=True):
    output: list[msgspec.Raw]


def page_of_input(stored: StoredResponse, query: ItemsQuery) -> dict[str, Any]:
    """Return a page of a response's input, as OpenAI's list object.

    Raises:
        InvalidRequestError: no item has the id `after`.
        RequestFailedError: the stored response cannot be read.
    """
    items = _listed(stored)
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            problem = f"after must be the id of an item of the input, not {query.after[:100]!r}"
            raise InvalidRequestError(problem, "after")
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


def _listed(stored: StoredResponse) -> list[dict[str, Any]]:
    """Return all items of the input, each with an id of its own."""
    try:
        items = msgspec.json.decode(stored.items, type=list[_KeptItem])
        num_output = len(msgspec.json.decode(stored.response, type=_Output).output)
    except UNDECODABLE as exc:
        raise RequestFailedError("a stored response cannot be read") from exc
    listed, ids = [], set[str]()
    for place, item in enumerate(items[: len(items) - num_output]):
        given = item.id if isinstance(item.id, str) and item.id else None
        name = _made_id(place, item) if given is None or given in ids else given
        ids.add(name)
        listed.append(_shown(item, name))
    return listed


def _made_id(place: int, item: Item) -> str:
    digest = hashlib.blake2b(msgspec.json.encode((place, item)), digest_size=16).hexdigest()
    return f"{_PREFIXES[item.type]}_{digest}"


def _shown(item: _KeptItem, name: str) -> dict[str, Any]:
    status = item.status if item.status in ("in_progress", "incomplete") else "completed"
    head = {"id": name, "type": item.type, "status": status}
    match item.type:
        case "message":
            kind = "output_text" if item.role == "assistant" else "input_text"
            return {**head, "role": item.role, "content": _parts(item.content, kind)}
        case "reasoning":
            content = _parts(item.content, "reasoning_text")
            return {**head, "summary": _parts(item.summary, "summary_text"), "content": content}
        case "function_call":
            arguments = item.arguments or "{}"
            return {**head, "call_id": item.call_id, "name": item.name, "arguments": arguments}
        case "function_call_output":
            output = item.output
            shown = _parts(output, "input_text") if isinstance(output, list) else output
            return {**head, "call_id": item.call_id, "output": shown}


def _parts(texts: str | list[Part] | None, kind: str) -> list[dict[str, Any]]:
    """Return a text as parts.

    Args:
        texts: one text, or parts.
        kind: the type of parts that have none of the API's types.
    """
    if texts is None:
        return []
    given = [Part("text", texts)] if isinstance(texts, str) else texts
    return [_part(part, kind if part.type == "text" else part.type) for part in given]


def _part(part: Part, kind: str) -> dict[str, Any]:
    if kind == "refusal":
        return {"type": kind, "refusal": part.refusal}
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return {"type": kind, "text": part.text, **more}
