"""Makes the items of a response's output, and the events of its stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from pagewire.services.router.http.api.openai.objects import ChatToken
from pagewire.services.router.http.api.responses import objects
from pagewire.services.router.http.api.responses.logprobs import PendingLogprobs
from pagewire.shared.tool_calls import events as parsed


class OutputItems:
    """The output of one response: of its items, only the last one can be open.

    Attributes:
        items: as OpenAI has them.

    Args:
        logprobs: of the tokens whose texts are to come; None if texts have none.
    """

    def __init__(self, logprobs: PendingLogprobs | None) -> None:
        self.items: list[objects.OutputItem] = []
        self._logprobs = logprobs
        self._is_open = False
        self._parts: list[str] = []  # parts of the open item's text or arguments

    def add(self, added: Iterable[parsed.AnswerEvent]) -> list[objects.ResponseEvent]:
        """Add what was found in the answer; return the stream's events."""
        events: list[objects.ResponseEvent] = []
        for event in added:
            match event:
                case parsed.ReasoningText(text):
                    events += self._reasoning(text)
                case parsed.ContentText(text):
                    events += self._content(text)
                case parsed.CallBegin(_, call_id, name):
                    call = objects.CallItem(_new_id("fc"), call_id, name)
                    events += [*self.close(), self._begin(call, replace(call))]
                case parsed.CallArguments(_, text):
                    self._parts.append(text)
                    events.append(self._event("response.function_call_arguments.delta", delta=text))
                case parsed.CallEnd():
                    events += self.close()
        return events

    def end(self, is_cut: bool) -> list[objects.ResponseEvent]:
        """End the answer; an output has at least one item."""
        events = [] if self.items else self._content("")
        return events + self.close("incomplete" if is_cut else "completed")

    def close(self, status: objects.ItemStatus = "completed") -> list[objects.ResponseEvent]:
        """Close the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._parts)
        item.status = status
        if isinstance(item, objects.CallItem):
            item.arguments = text
            done = "response.function_call_arguments.done"
            events = [self._event(done, name=item.name, arguments=text)]
        else:
            part = item.content[0]
            part.text = text
            if isinstance(part, objects.OutputText):
                logprobs = part.logprobs or []
                ended = self._text_event("response.output_text.done", text=text, logprobs=logprobs)
            else:
                ended = self._text_event("response.reasoning_text.done", text=text)
            events = [ended, self._text_event("response.content_part.done", part=part)]
        return [*events, self._item_event("response.output_item.done", item)]

    def _reasoning(self, text: str) -> list[objects.ResponseEvent]:
        events: list[objects.ResponseEvent] = []
        if not self._is_open or not isinstance(self.items[-1], objects.ReasoningItem):
            item = objects.ReasoningItem(_new_id("rs"), [objects.ReasoningText("")])
            events = self._begin_text(item, objects.ReasoningText(""))
        self._parts.append(text)
        self._take_logprobs(text)
        return [*events, self._text_event("response.reasoning_text.delta", delta=text)]

    def _content(self, text: str) -> list[objects.ResponseEvent]:
        events: list[objects.ResponseEvent] = []
        item = self.items[-1] if self._is_open else None
        if not isinstance(item, objects.MessageItem):
            item = objects.MessageItem(_new_id("msg"), [self._empty_part()])
            events = self._begin_text(item, self._empty_part())
        self._parts.append(text)
        entries, part = self._take_logprobs(text), item.content[0]
        if isinstance(part.logprobs, list):
            part.logprobs += entries
        if text:
            kind = "response.output_text.delta"
            events.append(self._text_event(kind, delta=text, logprobs=entries))
        return events

    def _empty_part(self) -> objects.OutputText:
        return objects.OutputText("", logprobs=UNSET if self._logprobs is None else [])

    def _begin_text(
        self,
        item: objects.MessageItem | objects.ReasoningItem,
        empty: objects.OutputText | objects.ReasoningText,
    ) -> list[objects.ResponseEvent]:
        return [
            *self.close(),
            self._begin(item, replace(item, content=[])),
            self._text_event("response.content_part.added", part=empty),
        ]

    def _begin(self, item: objects.OutputItem, empty: objects.OutputItem) -> objects.ResponseEvent:
        """Open an item; its event has it as it is before anything is added."""
        self.items.append(item)
        self._parts, self._is_open = [], True
        return self._item_event("response.output_item.added", empty)

    def _item_event(self, kind: str, item: objects.OutputItem) -> objects.ResponseEvent:
        return objects.ResponseEvent(type=kind, output_index=len(self.items) - 1, item=item)

    def _text_event(self, kind: str, **fields: Any) -> objects.ResponseEvent:
        return self._event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> objects.ResponseEvent:
        index = len(self.items) - 1
        return objects.ResponseEvent(
            type=kind, item_id=self.items[-1].id, output_index=index, **fields
        )

    def _take_logprobs(self, text: str) -> list[ChatToken]:
        return [] if self._logprobs is None else self._logprobs.take(text)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
