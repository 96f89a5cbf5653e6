"""Lists the input of a stored response as OpenAI does: items with ids, page by page.

The input is the whole conversation before the answer, with earlier answers. An item without an id
gets one that is derived from the item and its place in the conversation, so it is the same on every
router and in each later response of the conversation.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagewire.services.router.http.api.responses import objects
from pagewire.services.router.http.api.responses.bodies import Item, Part
from pagewire.services.router.http.api.responses.store import StoredResponse
from pagewire.shared.base.errors import UNDECODABLE, InvalidRequestError, RequestFailedError
from pagewire.shared.base.field_rules import of_numbers

MAX_PAGE = 100
DEFAULT_PAGE = 20

TextPart = objects.InputText | objects.OutputText | objects.ReasoningText | objects.SummaryText
_KINDS: dict[str, type[TextPart]] = {
    "input_text": objects.InputText,
    "output_text": objects.OutputText,
    "reasoning_text": objects.ReasoningText,
    "summary_text": objects.SummaryText,
}
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class ItemsQuery(msgspec.Struct, frozen=True):
    """The query of the route that lists a response's input, page by page.

    Attributes:
        after: the id of the item before the first one to return.
        limit: how many items to return at most.
        order: "asc" is the order of the conversation.
    """

    after: str | None = None
    limit: Annotated[int, of_numbers(1, MAX_PAGE)] = DEFAULT_PAGE
    order: Annotated[Literal["asc", "desc"], Meta(description='"asc" or "desc"')] = "desc"


class _KeptItem(Item, frozen=True):
    """An item as it was stored; a client may have given the other fields any value."""

    id: Any = None
    status: Any = None


class _Output(msgspec.Struct, frozen=True):
    output: list[msgspec.Raw]


def page_of_input(stored: StoredResponse, query: ItemsQuery) -> objects.InputItems:
    """Return a page of a response's input.

    Raises:
        InvalidRequestError: no item has the id `after`.
        RequestFailedError: the stored response cannot be read.
    """
    items = _listed(stored)
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item.id for item in items]
        if query.after not in ids:
            problem = f"after must be the id of an item of the input, not {query.after[:100]!r}"
            raise InvalidRequestError(problem, "after")
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return objects.InputItems(page, first, last, has_more=len(items) > len(page))


def _listed(stored: StoredResponse) -> list[objects.GivenItem]:
    """Return all items of the input, each with an id of its own."""
    try:
        items = msgspec.json.decode(stored.items, type=list[_KeptItem])
        num_output = len(msgspec.json.decode(stored.response, type=_Output).output)
    except UNDECODABLE as exc:
        raise RequestFailedError("a stored response cannot be read") from exc
    listed: dict[str, objects.GivenItem] = {}
    for place, item in enumerate(items[: len(items) - num_output]):
        given = item.id if isinstance(item.id, str) and item.id else None
        name = _made_id(place, item) if given is None or given in listed else given
        listed[name] = _as_given_item(item, name)
    return list(listed.values())


def _made_id(place: int, item: Item) -> str:
    digest = hashlib.blake2b(msgspec.json.encode((place, item)), digest_size=16).hexdigest()
    return f"{_PREFIXES[item.type]}_{digest}"


def _as_given_item(item: Any, name: str) -> objects.GivenItem:
    status: objects.ItemStatus = "completed"
    if item.status in ("in_progress", "incomplete"):
        status = item.status
    match item.type:
        case "message":
            kind = objects.OutputText if item.role == "assistant" else objects.InputText
            return objects.GivenMessage(name, status, item.role, _parts(item.content, kind))
        case "reasoning":
            content = _parts(item.content, objects.ReasoningText)
            return objects.GivenReasoning(
                name, status, _parts(item.summary, objects.SummaryText), content
            )
        case "function_call":
            return objects.CallItem(name, item.call_id, item.name, item.arguments or "{}", status)
    output = item.output
    if isinstance(output, list):
        output = _parts(output, objects.InputText)
    return objects.CallOutputItem(name, status, item.call_id, output)


def _parts(texts: str | list[Part] | None, kind: type[TextPart]) -> list[objects.GivenPart]:
    """Return a text as parts.

    Args:
        texts: one text, or parts.
        kind: of parts whose type is "text".
    """
    given = [Part("text", texts)] if isinstance(texts, str) else texts or []
    return [_part(part, kind) for part in given]


def _part(part: Part, kind: type[TextPart]) -> objects.GivenPart:
    if part.type == "refusal":
        return objects.RefusalText(part.refusal or "")
    return _KINDS.get(part.type, kind)(part.text or "")
