"""The formats in which models write tool calls: one row each, used by grammar and parser.

A new format is a new row. If its arguments are neither JSON nor Python, it also needs a reader in
`calls.py`.
"""

from __future__ import annotations

import re
import secrets
import string
from typing import Any, Literal

import msgspec

# How one call is written: {"name": "f", "arguments": {...}}, f[ARGS]{...}, f(a=1), or
# <function=f> with an element for each argument. "harmony" has messages, see `harmony.py`.
CallKind = Literal["object", "headed", "python", "xml", "harmony"]

ARGUMENT_KEYS = ("arguments", "parameters")  # models confuse them
ID_PLACE = "<id>"  # in a shape: the place of the call's number
_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format of calls. Spaces around its texts are in the grammar; the parser does not need them.

    Attributes:
        name: the format's name.
        kind: how a single call is written.
        open: text before each call, or before the list of calls; if empty, the answer begins with
            a call.
        other_opens: texts that models write instead of `open`, although their template has `open`.
        unopened: how a call begins if a model forgets `open`, wherever it is in the answer; in XML,
            a line ends after the name.
        may_open: text that an answer may begin with if `open` is empty.
        close: text after the call or list that `open` begins.
        is_list: all calls are in one list; otherwise each has its own `open` and `close`.
        begin: beginning of the list.
        separator: text between calls.
        end: end of the list.
        before: text before each call, in a list or not.
        after: text after each call.
        shape: an "object" call, with placeholders <name> and <arguments>.
        no_call: function name that a model writes if it calls no function.
        mark: text between name and arguments of a "headed" call.
        id_mark: text before an id, which some models write between name and `mark`.
        python_constants: a "python" call has `True` and `None`, not `true` and `null`.
        id_chars: length of a call's id, if the model's template requires one.
        in_template: a model has this format if its chat template has all of these texts ...
        not_in_template: ... and none of these.
    """

    name: str
    kind: CallKind
    open: str = ""
    other_opens: tuple[str, ...] = ()
    unopened: str = ""
    may_open: str = ""
    close: str = ""
    is_list: bool = False
    begin: str = ""
    separator: str = ""
    end: str = ""
    before: str = ""
    after: str = ""
    shape: str = '{"name": "<name>", "arguments": <arguments>}'
    no_call: str = ""
    mark: str = ""
    id_mark: str = ""
    python_constants: bool = True
    id_chars: int | None = None
    in_template: tuple[str, ...] = ()
    not_in_template: tuple[str, ...] = ()

    @property
    def is_bare_json(self) -> bool:
        """Whether a call is a JSON object with nothing before it."""
        return self.kind == "object" and not (self.open or self.begin)

    def head(self, name: str) -> str:
        """Return the text of an "object" call before its arguments."""
        return self.shape.partition("<arguments>")[0].replace("<name>", name)

    @property
    def tail(self) -> str:
        """Text of an "object" call after its arguments."""
        return self.shape.partition("<arguments>")[2]

    def new_call_id(self) -> str:
        """Return a new id of a call."""
        if self.id_chars is None:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self.id_chars))

    @property
    def opens(self) -> tuple[str, ...]:
        """Texts that may come before a call, without the spaces around them."""
        return tuple(text.strip() for text in (self.open, *self.other_opens) if text)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a tokenizer, which text does not show by default."""
        texts = (
            *(self.open, *self.other_opens, self.may_open, self.before),
            *(self.mark, self.id_mark, self.after, self.end, self.close),
        )
        return tuple(dict.fromkeys(_MARKER.findall("".join(texts))))


_JSON_LIST: dict[str, Any] = {"is_list": True, "begin": "[", "separator": ", ", "end": "]"}
_JSON_LINES = {**_JSON_LIST, "begin": "[\n    ", "separator": ",\n    ", "end": "\n]"}
# The first row that matches a template is used.
_ROWS = (
    ToolFormat(
        name="harmony",
        kind="harmony",
        before="<|start|>assistant<|channel|>commentary to=functions.",
        mark=" <|constrain|>json<|message|>",
        after="<|call|>",
        in_template=("<|channel|>commentary", "functions."),
    ),
    ToolFormat(
        name="phi4_mini",
        kind="object",
        open="<|tool_call|>",
        close="<|/tool_call|>",
        **_JSON_LIST,
        in_template=("<|tool|>", "<|/tool|>"),
    ),
    ToolFormat(
        name="granite",
        kind="object",
        open="<|tool_call|>",
        other_opens=("<tool_call>",),
        **_JSON_LIST,
        in_template=("<|tool_call|>", "available_tools"),
    ),
    ToolFormat(
        name="cohere2",
        kind="object",
        open="<|START_ACTION|>",
        close="<|END_ACTION|>",
        **_JSON_LINES,
        shape='{"tool_call_id": "<id>", "tool_name": "<name>", "parameters": <arguments>}',
        in_template=("<|START_ACTION|>",),
    ),
    ToolFormat(
        name="command_r",
        kind="object",
        open="Action:\n```json\n",
        other_opens=("Action: ```json\n", "Action:```json\n"),
        close="```",
        **_JSON_LINES,
        shape='{\n        "tool_name": "<name>",\n        "parameters": <arguments>\n    }',
        no_call="directly-answer",
        in_template=("'Action:", '"tool_name"'),
    ),
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
        name="qwen3_coder",
        kind="xml",
        open="<tool_call>\n",
        unopened="<function=",
        close="\n</tool_call>",
        separator="\n",
        in_template=("<tool_call>", "<function=", "<parameter="),
    ),
    ToolFormat(
        name="mistral_args",
        kind="headed",
        open="[TOOL_CALLS]",
        mark="[ARGS]",
        id_mark="[CALL_ID]",
        id_chars=9,
        in_template=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ToolFormat(
        name="mistral",
        kind="object",
        open="[TOOL_CALLS]",
        **_JSON_LIST,
        id_chars=9,
        in_template=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        name="deepseek_v3",
        kind="headed",
        open="<｜tool▁calls▁begin｜>",
        unopened="<｜tool▁call▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        is_list=True,
        separator="\n",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        mark="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        in_template=("<｜tool▁calls▁begin｜>", "```json", "in tools"),
    ),
    ToolFormat(
        name="deepseek_v31",
        kind="headed",
        open="<｜tool▁calls▁begin｜>",
        unopened="<｜tool▁call▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        is_list=True,
        before="<｜tool▁call▁begin｜>",
        mark="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        in_template=("<｜tool▁calls▁begin｜>", "in tools"),
    ),
    ToolFormat(
        name="olmo3",
        kind="python",
        open="<function_calls>",
        close="</function_calls>",
        is_list=True,
        separator="\n",
        python_constants=False,
        in_template=("<function_calls>",),
    ),
    # SmolLM3 writes this if it gets its tools as Python functions, "hermes" otherwise.
    ToolFormat(
        name="smollm3_python",
        kind="python",
        open="<code>",
        close="</code>",
        is_list=True,
        separator="\n",
        in_template=("python_tools", "<code>"),
    ),
    ToolFormat(
        name="tool_code",
        kind="python",
        open="```tool_code\n",
        close="\n```",
        is_list=True,
        separator="\n",
        in_template=("```tool_code",),
    ),
    ToolFormat(
        name="llama3_json",
        kind="object",
        may_open="<|python_tag|>",
        is_list=True,
        separator="; ",
        shape='{"name": "<name>", "parameters": <arguments>}',
        in_template=('"parameters": dictionary of argument name',),
    ),
    ToolFormat(
        name="pythonic",
        kind="python",
        **_JSON_LIST,
        in_template=("[func_name1(",),
    ),
)
TOOL_FORMATS = {row.name: row for row in _ROWS}


def recognise_tools(template: str) -> ToolFormat | None:
    """Return a model's format, recognised by the source of its chat template."""
    for row in _ROWS:
        if all(text in template for text in row.in_template) and not any(
            text in template for text in row.not_in_template
        ):
            return row
    return None
