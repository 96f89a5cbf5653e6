"""Decides how the answers to a request with tools are parsed, and which grammar they follow.

The router and the offline `LLM` use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request.structured_outputs import MAX_GRAMMAR_CHARS
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.answer import AnswerParsing
from pagewire.shared.tool_calls.grammar import AllowedCalls, any_arguments
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.shared.tool_calls.written_values import parameter_forms

PROMPT_END_TOKENS = 16  # enough for the end of a template that opens the reasoning


def answer_parsing(
    syntax: ChatSyntax,
    tokenizer: Tokenizer,
    token_ids: list[int],
    wanted: AllowedCalls | None,
    continued: str | None = None,
    include_reasoning: bool = True,
) -> AnswerParsing | None:
    """Return how the answers are parsed; None if they have only content.

    Args:
        syntax: the model's syntax.
        tokenizer: the model's tokenizer.
        token_ids: the prompt.
        wanted: the calls that the answers may have.
        continued: the message that the answers continue, if they do.
        include_reasoning: whether the client gets the reasoning.
    """
    if wanted is None and syntax.reasoning is None:
        return None
    begins = None
    if syntax.reasoning is not None and continued is not None:
        begins = syntax.begins_after(continued)
    elif syntax.reasoning is not None:
        end = tokenizer.decode(token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        begins = syntax.begins(end)
    forms = {}
    if wanted is not None and syntax.tools is not None and syntax.tools.kind == "xml":
        forms = {function.name: parameter_forms(function) for function in wanted.functions}
    return AnswerParsing(
        names=() if wanted is None else tuple(function.name for function in wanted.functions),
        only_one=wanted is not None and wanted.only_one,
        must_call=wanted is not None and wanted.must_call,
        is_named=wanted is not None and wanted.is_named,
        reasoning=begins,
        include_reasoning=include_reasoning,
        visible_tokens=tuple(syntax.tokens.values()),
        forms=forms,
    )


def tool_grammars(
    syntax: ChatSyntax, wanted: AllowedCalls, parsing: AnswerParsing, *, may_reason: bool
) -> tuple[str | None, ...]:
    """Return the grammars of answers with tools, the strictest first; None allows any answer.

    A function that is not strict may have a schema that no grammar can express. The next grammar
    then follows only the part of the schema that can be expressed. The last one allows any object
    as arguments, or any answer if no call is required.

    Args:
        syntax: the model's syntax.
        wanted: the calls that the answers may have.
        parsing: how the answers are parsed.
        may_reason: whether reasoning may come first, see `reasoning_before`. If not, a required
            call begins at once.

    Raises:
        InvalidRequestError: the tools are too large for a grammar, or the schema of a strict
            function cannot be followed.
    """
    if wanted.must_call and not may_reason and not syntax.has_channels:
        syntax = ChatSyntax(syntax.tools, None, syntax.tokens)
    begins = parsing.reasoning or "outside"
    grammars: list[str | None] = [*grammars_of(wanted, partial(syntax.grammar, begins=begins))]
    if not any(function.strict for function in wanted.functions):
        anything = replace(wanted, functions=any_arguments(wanted.functions))
        grammars.append(syntax.grammar(anything, begins) if wanted.must_call else None)
    fitting = [text for text in grammars if text is None or len(text) <= MAX_GRAMMAR_CHARS]
    if not fitting:
        least = min(len(text) for text in grammars if text is not None)
        raise InvalidRequestError(
            f"tools: the grammar of their schemas has {least} characters: at most "
            f"{MAX_GRAMMAR_CHARS} characters are possible",
            "tools",
        )
    return tuple(fitting)


def grammars_of(wanted: AllowedCalls, make: Callable[[AllowedCalls], str]) -> list[str]:
    """Return the grammar of full schemas, then that of the parts that grammars can express.

    Args:
        wanted: the calls; if a function is strict, only the first grammar is returned.
        make: returns the grammar of answers with such calls.

    Raises:
        InvalidRequestError: the schema of a strict function cannot be followed.
    """
    if any(function.strict for function in wanted.functions):
        return [make(wanted)]
    grammars = []
    for lenient in (False, True):
        with contextlib.suppress(InvalidRequestError):
            grammars.append(make(replace(wanted, lenient=lenient)))
    return grammars
