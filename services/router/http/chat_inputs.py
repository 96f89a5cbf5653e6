"""What the body of a chat request asks of the chat template, and how its answers are read."""

from __future__ import annotations

from typing import Any

import msgspec

from pagewire.services.router.http.schemas import ChatBody
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS
from pagewire.shared.text.chat_messages import template_message
from pagewire.shared.text.chat_template import ChatOptions
from pagewire.shared.tools.answer import AnswerReading
from pagewire.shared.tools.grammar import CallsWanted

PROMPT_END_TOKENS = 16  # enough for what a template puts at the end to open the reasoning


class _PlainTools(msgspec.Struct):
    """Tools as the client has written them: templates show also what `Tool` leaves out."""

    tools: list[dict[str, Any]] | None = None


def conversation(body: ChatBody) -> list[dict[str, Any]]:
    """Return the messages as the chat template takes them.

    Raises:
        InvalidRequestError: one of them is wrong; names the field.
    """
    return [
        template_message(index, message.role, message.text, message)
        for index, message in enumerate(body.messages)
    ]


def template_options(body: ChatBody, raw: bytes | bytearray) -> ChatOptions:
    """Return what the template is given besides the messages.

    Args:
        body: the checked body.
        raw: the same as it came.
    """
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    goes_on = bool(body.continue_final_message)
    prompt = body.add_generation_prompt
    return ChatOptions(
        tools=msgspec.json.decode(raw, type=_PlainTools).tools if body.tools else None,
        variables=variables,
        add_generation_prompt=not goes_on if prompt is None else prompt,
        continue_final_message=goes_on,
    )


def num_chars(messages: list[dict[str, Any]], options: ChatOptions) -> int:
    """Return how many characters a template is given at least."""
    count = sum(len(message["content"]) for message in messages)
    more = [message["tool_calls"] for message in messages if "tool_calls" in message]
    for given in (more, options.tools, options.variables):
        count += len(msgspec.json.encode(given)) if given else 0
    return count


def answer_reading(
    body: ChatBody, wanted: CallsWanted | None, token_ids: list[int], model: ServedModel
) -> AnswerReading | None:
    """Return how the answers are read; None if they are nothing but content.

    Args:
        body: the request.
        wanted: the calls that the answers may have.
        token_ids: the prompt.
        model: the model.
    """
    syntax = model.syntax
    if wanted is None and syntax.reasoning is None:
        return None
    begins = None
    if syntax.reasoning is not None and body.continue_final_message:
        begins = syntax.goes_on(body.messages[-1].text or "")
    elif syntax.reasoning is not None:
        end = model.tokenizer.decode(token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        begins = syntax.begins(end)
    return AnswerReading(
        names=() if wanted is None else tuple(each.name for each in wanted.functions),
        only_one=wanted is not None and wanted.only_one,
        reasoning=begins,
        include_reasoning=body.include_reasoning is not False,
        shown=tuple(syntax.tokens.values()),
    )


def tool_grammars(
    wanted: CallsWanted, reading: AnswerReading, model: ServedModel
) -> tuple[str | None, ...]:
    """Return the grammars of answers with tools, the best first; None: any answer.

    Of a function that is not strict, a schema that no grammar can express costs the request
    nothing: its arguments are then any object, or the answer anything if no call is required.

    Raises:
        InvalidRequestError: the tools are too large for a grammar.
    """
    begins = reading.reasoning or "outside"
    grammars: list[str | None] = [model.syntax.grammar(wanted, begins)]
    if not any(function.strict for function in wanted.functions):
        must_call = wanted.must_call
        grammars.append(model.syntax.grammar(wanted, begins, loosely=True) if must_call else None)
    fitting = [text for text in grammars if text is None or len(text) <= MAX_GRAMMAR_CHARS]
    if not fitting:
        raise InvalidRequestError(
            f"tools must make a grammar of at most {MAX_GRAMMAR_CHARS} characters", "tools"
        )
    return tuple(fitting)
