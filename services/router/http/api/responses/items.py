"""The items of a response's output, and the events of a stream that they make."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, Literal

from pagewire.services.router.http.api.responses.logprobs import PendingLogprobs
from pagewire.shared.tool_calls.events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
)

Event = dict[str, Any]
ItemStatus = Literal["completed", "incomplete"]


class OutputItems:
    """The output of one response: of its items, only the last one can be open.

    Attributes:
        items: as OpenAI has them.

    Args:
        logprobs: of the tokens whose texts are to come; None if texts have none.
    """

    def __init__(self, logprobs: PendingLogprobs | None) -> None:
        self.items: list[dict[str, Any]] = []
        self._logprobs = logprobs
        self._is_open = False
        self._parts: list[str] = []  # of the open item's text or arguments

    def add(self, found: Iterable[AnswerEvent]) -> list[Event]:
        """Add what was found in the answer; return the stream's events."""
        events: list[Event] = []
        for each in found:
            match each:
                case ReasoningText(text):
                    events += self._text("reasoning", text)
                case ContentText(text):
                    events += self._text("message", text)
                case CallBegin(_, call_id, name):
                    events += self._begin_call(call_id, name)
                case CallArguments(_, text):
                    self._parts.append(text)
                    events.append(self._event("response.function_call_arguments.delta", delta=text))
                case CallEnd():
                    events += self.close()
        return events

    def end(self, is_cut: bool) -> list[Event]:
        """End the answer; an output has at least one item."""
        events = [] if self.items else self._text("message", "")
        return events + self.close("incomplete" if is_cut else "completed")

    def close(self, status: ItemStatus = "completed") -> list[Event]:
        """Close the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._parts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            events = [self._event(done, name=item["name"], arguments=text)]
        else:
            part = item["content"][0]
            part["text"] = text
            done, more = "response.reasoning_text.done", {}
            if item["type"] == "message":
                done, more = "response.output_text.done", {"logprobs": part.get("logprobs", [])}
            events = [
                self._event(done, content_index=0, text=text, **more),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._item_event("response.output_item.done")]

    def _text(self, kind: Literal["reasoning", "message"], text: str) -> list[Event]:
        events = []
        if not self._is_open or self.items[-1]["type"] != kind:
            events += [*self.close(), *self._begin_text(kind)]
        self._parts.append(text)
        entries = self._take_logprobs(text)
        if kind == "reasoning":
            delta = self._event("response.reasoning_text.delta", content_index=0, delta=text)
        else:
            if self._logprobs is not None:
                self.items[-1]["content"][0].setdefault("logprobs", []).extend(entries)
            delta = self._event(
                "response.output_text.delta", content_index=0, delta=text, logprobs=entries
            )
        return [*events, delta] if text else events

    def _begin_text(self, kind: Literal["reasoning", "message"]) -> list[Event]:
        if kind == "reasoning":
            item: dict[str, Any] = {"id": _new_id("rs"), "type": kind, "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _new_id("msg"), "type": kind, "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": []}
            if self._logprobs is not None:
                part["logprobs"] = []
        added = self._begin({**item, "status": "in_progress", "content": []})
        self.items[-1]["content"].append(part)
        shown = deepcopy(part)  # as it is before the first delta
        return [
            added,
            self._event("response.content_part.added", content_index=0, part=shown),
        ]

    def _begin_call(self, call_id: str, name: str) -> list[Event]:
        events = self.close()
        item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress"}
        return [*events, self._begin({**item, "call_id": call_id, "name": name, "arguments": ""})]

    def _begin(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        self._parts, self._is_open = [], True
        shown = {**item, "content": []} if "content" in item else dict(item)
        return self._item_event("response.output_item.added", shown)

    def _item_event(self, kind: str, item: dict[str, Any] | None = None) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "output_index": index, "item": item or self.items[-1]}

    def _event(self, kind: str, **fields: Any) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": index, **fields}

    def _take_logprobs(self, text: str) -> list[dict[str, Any]]:
        return [] if self._logprobs is None else self._logprobs.take(text)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
