"""Conversations that the offline `LLM` accepts, with tools and other variables of templates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.offline.prompts import TokenizedPrompt
from pagewire.shared.grammar.structures import checked_size
from pagewire.shared.text.chat_messages import read_conversation
from pagewire.shared.text.chat_template import ChatOptions, TemplateText, TemplateVariables
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.answer import AnswerParsing, ParsedMessage, read_answer
from pagewire.shared.tool_calls.definitions import ToolChoice, Tools, check_tools, check_tools_size
from pagewire.shared.tool_calls.form_grammar import (
    form_or_calls,
    parsing_of_form,
    reasoning_before,
)
from pagewire.shared.tool_calls.grammar import AllowedCalls
from pagewire.shared.tool_calls.reasoning import Begins
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.shared.tool_calls.tool_request import answer_parsing, tool_grammars


class ChatArguments(TypedDict, total=False):
    """Further arguments of `LLM.chat`, named as in OpenAI's API and vLLM.

    Attributes:
        tools: each is `{"type": "function", "function": {"name", "description", "parameters"}}`.
        tool_choice: "auto", "none", "required" or `{"type": "function", "function": {"name"}}`.
        parallel_tool_calls: if False, an answer has at most one call.
        chat_template: a template (Jinja) to use in place of the model's.
        chat_template_kwargs: further variables of the template.
        add_generation_prompt: the prompt ends where an answer begins; this is the default.
        continue_final_message: the answer continues the last message.
        add_special_tokens: the tokenizer adds its special tokens around the prompt, in addition to
            those in the template; by default it adds none.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None


class _Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `ChatArguments`, with types and bounds that are checked."""

    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt(TokenizedPrompt):
    """A conversation as a prompt, and how its answers are read.

    Attributes:
        wanted: the calls that the answers may have; None if they may have none.
        grammars: the answers follow the first of these that can be compiled; None allows any
            answer.
        before_form: where an answer with a form begins, see `reasoning_before`.
    """

    syntax: ChatSyntax = field(default_factory=ChatSyntax)
    parsing: AnswerParsing = field(default_factory=AnswerParsing)
    wanted: AllowedCalls | None = None
    grammars: tuple[str | None, ...] = ()
    before_form: Begins | None = None

    def with_form(self, form: str | None) -> ChatPrompt:
        """Return a prompt whose answers are calls or have a form.

        Args:
            form: the form's grammar; None if the request has no form.
        """
        if form is None or (self.wanted is not None and self.wanted.must_call):
            return self
        found = form_or_calls(form, self.syntax, self.wanted, self.before_form)
        grammars = tuple(checked_size(text, "structured_outputs") for text in found)
        parsing = parsing_of_form(self.parsing, form, self.syntax)
        return dataclasses.replace(self, grammars=grammars, parsing=parsing)

    def message(self, text: str, is_cut: bool) -> ParsedMessage:
        """Return the parts of an answer; `is_cut`: the model had not ended it."""
        return read_answer(self.syntax, self.parsing, text, is_cut)


def read_chats(
    conversations: Sequence[object],
    tokenizer: Tokenizer,
    vocab_size: int,
    syntax: ChatSyntax,
    arguments: ChatArguments,
) -> list[ChatPrompt]:
    """Check conversations, render them by the chat template, and tokenize the result.

    Args:
        conversations: lists of messages.
        tokenizer: the model's tokenizer.
        vocab_size: upper bound (exclusive) of token ids.
        syntax: how the model writes tool calls and reasoning.
        arguments: of all conversations.

    Raises:
        InvalidRequestError: a message or an argument is wrong; the error names it.
    """
    try:
        asked = msgspec.convert(dict(arguments), _Checked)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"arguments of chat: {exc}") from exc
    check_tools(asked.tools, asked.tool_choice)
    tools = [dict(tool) for tool in arguments.get("tools") or ()] or None
    check_tools_size(_json_bytes(tools))
    options = ChatOptions.of(
        tools,
        asked.chat_template_kwargs or {},
        asked.add_generation_prompt,
        asked.continue_final_message,
    )
    wanted = syntax.wanted(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    if asked.chat_template is not None:
        tokenizer = tokenizer.with_template(asked.chat_template)
    found = []
    for conversation in conversations:
        messages = read_conversation(conversation)
        text = tokenizer.render_chat(messages, options)
        ids = tokenizer.encode_chat(messages, options, bool(asked.add_special_tokens))
        tokenizer.check_ids(ids, vocab_size, "messages")
        continued = messages[-1]["content"] if options.continue_final_message else None
        parsing = answer_parsing(syntax, tokenizer, ids, wanted, continued) or AnswerParsing()
        begins = reasoning_before(syntax, tokenizer, ids, parsing, continued)
        grammars: tuple[str | None, ...] = ()
        if wanted is not None:
            grammars = tool_grammars(syntax, wanted, parsing, may_reason=begins is not None)
        found.append(ChatPrompt(text, ids, syntax, parsing, wanted, grammars, begins))
    return found


def _json_bytes(tools: list[dict[str, Any]] | None) -> int:
    """Return the size of tools as JSON; a value that JSON lacks counts by its Python `repr`."""
    try:
        text = json.dumps(tools, ensure_ascii=False, separators=(",", ":"), default=repr)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"tools must be what JSON can express: {exc}", "tools") from exc
    return len(text.encode(errors="surrogatepass"))
