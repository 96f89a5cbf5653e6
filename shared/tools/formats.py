"""The ways in which models write tool calls: one row each, of which grammar and parser are made.

A row is an addition; a way whose arguments are neither JSON nor Python's also needs a reader in
`calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

# How one call is written: {"name": "f", "arguments": {...}}, f[ARGS]{...} or f(a=1).
CallKind = Literal["object", "headed", "python"]

ARGS_MARK = "[ARGS]"  # between name and arguments of a "headed" call
CALL_ID_MARK = "[CALL_ID]"  # before an id, which some models put between the two
ARGUMENT_KEYS = ("arguments", "parameters")  # models confuse them


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way. Spaces around a text are written, and not needed when an answer is read.

    Attributes:
        open: before each call, or before the list of calls; if it is empty, calls begin an answer.
        may_open: what may come first where `open` is empty.
        close: after what `open` begins.
        is_list: all calls are in one list; otherwise each has its own `open` and `close`.
        begin: of the list.
        separator: between calls.
        end: of the list.
        arguments_key: of an "object" call.
        id_chars: length of a call's id, if the model's template wants one.
        in_template: a chat template with all of these texts is of a model that writes this way.
        not_in_template: unless it has one of these.
    """

    name: str
    kind: CallKind
    open: str = ""
    may_open: str = ""
    close: str = ""
    is_list: bool = False
    begin: str = ""
    separator: str = ""
    end: str = ""
    arguments_key: str = "arguments"
    id_chars: int | None = None
    in_template: tuple[str, ...] = ()
    not_in_template: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as special tokens, which are not shown otherwise."""
        of_head = (ARGS_MARK, CALL_ID_MARK) if self.kind == "headed" else ()
        texts = (self.open, self.may_open, self.close)
        return tuple(text.strip() for text in texts if text) + of_head


# Of several that a template fits, the first counts.
_ROWS = (
    ToolFormat(
        name="hermes",
        kind="object",
        open="<tool_call>\n",
        close="\n</tool_call>",
        separator="\n",
        in_template=("<tool_call>",),
        not_in_template=("<function=", "<arg_key>"),
    ),
    ToolFormat(
        name="mistral_args",
        kind="headed",
        open="[TOOL_CALLS]",
        id_chars=9,
        in_template=("[TOOL_CALLS]", ARGS_MARK),
    ),
    ToolFormat(
        name="mistral",
        kind="object",
        open="[TOOL_CALLS]",
        is_list=True,
        begin="[",
        separator=", ",
        end="]",
        id_chars=9,
        in_template=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        name="llama3_json",
        kind="object",
        may_open="<|python_tag|>",
        is_list=True,
        separator="; ",
        arguments_key="parameters",
        in_template=('"parameters": dictionary of argument name',),
    ),
    ToolFormat(
        name="pythonic",
        kind="python",
        is_list=True,
        begin="[",
        separator=", ",
        end="]",
        in_template=("[func_name1(",),
    ),
)
TOOL_FORMATS = {row.name: row for row in _ROWS}


def recognise_tools(template: str) -> ToolFormat | None:
    """Return how a model writes calls, by the source of its chat template."""
    for row in _ROWS:
        if all(text in template for text in row.in_template) and not any(
            text in template for text in row.not_in_template
        ):
            return row
    return None


# Returns the id of a marker that is a token to grammars; None if it is text to them.
TokenOf = Callable[[str], int | None]
