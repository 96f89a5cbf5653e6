"""The grammar of an answer that must have a form, and may have reasoning before it.

As in vLLM the reasoning is free, and the form begins after its close tag. Where the model may call
tools, an answer is calls or has the form.
"""

from __future__ import annotations

import json

from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tools.answer import AnswerReading
from pagewire.shared.tools.asking import PROMPT_END_TOKENS, grammars_of
from pagewire.shared.tools.grammar import CallsWanted, tools_grammar
from pagewire.shared.tools.harmony_grammar import form_in_final
from pagewire.shared.tools.reasoning import Begins, ReasoningFormat
from pagewire.shared.tools.syntax import ChatSyntax

_TEXT = "/(?s:.*)/"
_NAME = "answer"


def reasoning_before(
    syntax: ChatSyntax,
    tokenizer: Tokenizer,
    token_ids: list[int],
    reading: AnswerReading | None,
    continued: str | None = None,
) -> Begins | None:
    """Return where an answer begins that may have reasoning before its form; None if it may not.

    It may not if the model writes none, if the prompt ends with complete reasoning, as templates
    write it for a model that is not to think, or if the answer goes on with a text after it.

    Args:
        syntax: the model's.
        tokenizer: the model's.
        token_ids: the prompt.
        reading: of the answers.
        continued: the message that they go on with, if they do.
    """
    form = syntax.reasoning
    if form is None or reading is None or reading.reasoning in (None, "answer"):
        return None
    if reading.reasoning == "outside":
        end = tokenizer.decode(token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        if end.rstrip().endswith(form.close) or (continued or "").strip():
            return None
    return reading.reasoning


def after_reasoning(text: str, syntax: ChatSyntax, begins: Begins | None) -> str:
    """Return the grammar of an answer whose form may come after reasoning.

    A grammar that has the close tag itself describes the whole answer, and stays as it is.

    Args:
        text: the form's grammar: Lark, or JSON with a list of grammars.
        syntax: the model's.
        begins: as `reasoning_before` has returned it.
    """
    form = syntax.reasoning
    if form is None or begins is None or _is_whole(text, form, syntax):
        return text
    return _named(_lark(form, syntax, begins), text)


def form_or_calls(
    text: str, syntax: ChatSyntax, wanted: CallsWanted | None, begins: Begins | None
) -> tuple[str, ...]:
    """Return the grammars of an answer that has a form or is calls, the best first.

    Functions that are not strict may have schemas that no grammar can express: then what can be
    expressed of them counts, or the answer has the form alone. Answers in channels, and those whose
    form is the whole answer, are never calls; nor where calls are bare JSON, which grammars cannot
    distinguish from JSON of another form.

    Args:
        text: the form's grammar: Lark, or JSON with a list of grammars.
        syntax: the model's.
        wanted: the calls that it may be; None for none.
        begins: as `reasoning_before` has returned it.

    Raises:
        InvalidRequestError: a function that is strict cannot be followed.
    """
    form, calls = syntax.reasoning, syntax.tools
    alone = after_reasoning(text, syntax, begins)
    is_whole = form is not None and (form.answer_open or _is_whole(text, form, syntax))
    if wanted is None or calls is None or calls.is_bare_json or syntax.has_channels or is_whole:
        return (alone,)
    reasoning = None if begins is None else form

    def make(each: CallsWanted) -> str:
        reads, start = syntax.tokens.get, f"@{_NAME}"
        lark = tools_grammar(calls, each, reasoning, begins or "outside", reads, start)
        return _named(lark, text)

    both = grammars_of(wanted, make)
    if any(function.strict for function in wanted.functions):
        return (both[0],)
    return (*(each for each in both if len(each) <= MAX_GRAMMAR_CHARS), alone)


def _is_whole(text: str, form: ReasoningFormat, syntax: ChatSyntax) -> bool:
    """Whether a form's grammar has the close tag of reasoning itself."""
    close_id = syntax.tokens.get(form.close)
    return form.close in text or (close_id is not None and f"<[{close_id}]>" in text)


def _named(lark: str, text: str) -> str:
    """Return a grammar that refers to that of a text."""
    grammars = _grammars(text)
    grammars[0]["name"] = _NAME
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]})


def _grammars(text: str) -> list[dict[str, object]]:
    """Return the grammars of a text, the one to start with first."""
    try:
        found: list[dict[str, object]] = json.loads(text)["grammars"]
    except (ValueError, RecursionError):  # Lark
        return [{"lark_grammar": text}]
    return found


def _lark(form: ReasoningFormat, syntax: ChatSyntax, begins: Begins) -> str:
    """Return the grammar of the reasoning, which refers to that of the form."""
    if form.has_channels:
        return form_in_final(_NAME, begins, syntax.tokens.get)
    open_id, close_id = (syntax.tokens.get(text) for text in (form.open, form.close))
    rules = ["%llguidance {}", r"LINE_BREAKS: /\n{1,8}/"]
    if close_id is not None:
        rest = f"{_TEXT} <[{close_id}]> LINE_BREAKS?"
    else:
        rest = "reasoning_end LINE_BREAKS?"
        rules += [f"REASONING: {_TEXT} {json.dumps(form.close)}", "reasoning_end[lazy]: REASONING"]
    answer = f"@{_NAME}"
    if form.answer_open:
        tags = (form.answer_open, form.answer_close)
        opened, closed = (_tag(text, syntax.tokens.get(text)) for text in tags)
        in_tags = f'{opened} LINE_BREAKS? @{_NAME} "\\n"? {closed}'
        answer = f"({answer} | {in_tags})"
    if begins == "inside":
        rules.append(f"start: {rest} {answer}")
    else:
        alone = answer if form.tags_alone else f"@{_NAME}"
        rules += [f"start: {alone} | reasoning {answer}"]
        rules += [f"reasoning: {_tag(form.open, open_id)} {rest}"]
    return "\n".join(rules) + "\n"


def _tag(text: str, token_id: int | None) -> str:
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"
