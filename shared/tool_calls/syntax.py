"""How one model writes tool calls and reasoning, and the grammars and parsers that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.tool_calls.definitions import (
    AllowedTools,
    Choice,
    NamedTool,
    Tool,
    chosen_names,
)
from pagewire.shared.tool_calls.formats import TOOL_FORMATS, ToolFormat, recognise_tools
from pagewire.shared.tool_calls.grammar import AllowedCalls, tools_grammar
from pagewire.shared.tool_calls.harmony_grammar import channels_grammar
from pagewire.shared.tool_calls.reasoning import (
    REASONING_FORMATS,
    Begins,
    ReasoningFormat,
    recognise_reasoning,
)


@dataclass(frozen=True, slots=True)
class ChatSyntax:
    """How a model writes tool calls and reasoning.

    Attributes:
        tools: format of its calls; None if that is not known.
        reasoning: format of its reasoning; None if it writes none.
        tokens: ids of the markers that are tokens. An answer's text contains special tokens only
            if the request has tools, or reasoning is split off.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def choose(
        cls,
        template: str | None,
        tool_parser: str,
        reasoning_parser: str,
        token_of: Callable[[str], int | None],
    ) -> ChatSyntax:
        """Return a model's syntax.

        Args:
            template: the source of its chat template, from which `auto` chooses.
            tool_parser: `auto`, `none` or a name of `TOOL_FORMATS`.
            reasoning_parser: `auto`, `none` or a name of `REASONING_FORMATS`.
            token_of: see `Tokenizer.marker_token_id`.
        """
        tools = TOOL_FORMATS.get(tool_parser)
        if tool_parser == "auto":
            tools = recognise_tools(template or "")
        reasoning = REASONING_FORMATS.get(reasoning_parser)
        if reasoning_parser == "auto":
            reasoning = recognise_reasoning(template or "")
        if tools is not None and "harmony" in (tools.name, reasoning.name if reasoning else ""):
            tools, reasoning = TOOL_FORMATS["harmony"], REASONING_FORMATS["harmony"]
        markers = [marker for form in (tools, reasoning) if form for marker in form.markers]
        tokens = {marker: token_of(marker) for marker in markers}
        return cls(tools, reasoning, {k: v for k, v in tokens.items() if v is not None})

    @property
    def has_channels(self) -> bool:
        """Whether answers are messages with channels: calls, reasoning and content alike."""
        return self.reasoning is not None and self.reasoning.has_channels

    def begins(self, prompt_end: str) -> Begins:
        """Return where an answer begins.

        Args:
            prompt_end: the last part of the prompt's text.
        """
        form, text = self.reasoning, prompt_end.rstrip()
        if form is not None and text.endswith(form.open):
            return "inside"
        opened = form is not None and form.tags_alone and text.endswith(form.answer_open)
        return "answer" if opened else "outside"

    def begins_after(self, text: str) -> Begins:
        """Return where an answer begins that continues a text."""
        form = self.reasoning
        if form is not None and form.has_channels:
            return "answer"
        if form is not None and text.rfind(form.open) > text.rfind(form.close):
            return "inside"
        return "answer" if form is not None and form.tags_alone else "outside"

    def wanted(
        self, tools: list[Tool] | None, choice: Choice, parallel: bool | None
    ) -> AllowedCalls | None:
        """Return which calls the answers to a request may have; None if they may have none.

        Raises:
            InvalidRequestError: the format of this model's calls is not known.
        """
        if tools is None or choice == "none":
            return None
        if self.tools is None:
            raise InvalidRequestError(
                "tools: the format of this model's calls is not known, as its chat template does "
                "not show it; tool_parser of LLM or the server's --tool-parser can be one of "
                f"{', '.join(sorted(TOOL_FORMATS))}",
                "tools",
            )
        names = chosen_names(choice)
        functions = tuple(
            tool.function for tool in tools if names is None or tool.function.name in names
        )
        is_named = isinstance(choice, NamedTool)
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return AllowedCalls(
            functions=functions,
            must_call=is_named or mode == "required",
            only_one=is_named or parallel is False,
            is_named=is_named,
        )

    def grammar(self, wanted: AllowedCalls, begins: Begins) -> str:
        """Return the grammar of the answers to a request.

        Args:
            wanted: the calls that the answers may have, as `wanted` returns them.
            begins: where the answers begin.

        Raises:
            InvalidRequestError: the format of this model's calls is not known.
        """
        if self.tools is None:
            raise InvalidRequestError("the format of this model's calls is not known", "tools")
        if self.has_channels:
            return channels_grammar(wanted, begins, self.tokens)
        return tools_grammar(self.tools, wanted, self.reasoning, begins, self.tokens)
