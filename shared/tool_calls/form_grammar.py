"""The grammar of an answer that must have a form (structured output), perhaps after reasoning.

As in vLLM, the reasoning may be any text, and the form begins after its close tag. If the model may
call tools, an answer either has calls or the form.
"""

from __future__ import annotations

from msgspec.structs import replace

from pagewire.shared.grammar.lark_rules import LarkRules, grammars_in, literal, with_others
from pagewire.shared.request.structured_outputs import MAX_GRAMMAR_CHARS
from pagewire.shared.text.markers import Markers
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.answer import AnswerParsing
from pagewire.shared.tool_calls.formats import ToolFormat
from pagewire.shared.tool_calls.grammar import AllowedCalls, add_reasoning, tools_grammar
from pagewire.shared.tool_calls.harmony_grammar import form_in_final
from pagewire.shared.tool_calls.reasoning import Begins, ReasoningFormat
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.shared.tool_calls.tool_request import PROMPT_END_TOKENS, grammars_of

_NAME = "answer"


def reasoning_before(
    syntax: ChatSyntax,
    tokenizer: Tokenizer,
    token_ids: list[int],
    parsing: AnswerParsing | None,
    continued: str | None = None,
) -> Begins | None:
    """Return where an answer with reasoning before its form begins; None if it has no reasoning.

    An answer has no reasoning if the model writes none, if the prompt ends with complete reasoning
    (templates do this to turn thinking off), or if the answer continues text after the reasoning.

    Args:
        syntax: the model's syntax.
        tokenizer: the model's tokenizer.
        token_ids: the prompt.
        parsing: how the answers are parsed.
        continued: the message that the answers continue, if they do.
    """
    form = syntax.reasoning
    if form is None or parsing is None or parsing.reasoning in (None, "answer"):
        return None
    if parsing.reasoning == "outside":
        end = tokenizer.decode(token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        if end.rstrip().endswith(form.close) or (continued or "").strip():
            return None
    return parsing.reasoning


def after_reasoning(text: str, syntax: ChatSyntax, begins: Begins | None) -> str:
    """Return the grammar of an answer whose form may come after reasoning.

    A grammar that contains the close tag describes the whole answer; it is returned unchanged.

    Args:
        text: the form's grammar: Lark, or JSON with a list of grammars.
        syntax: the model's syntax.
        begins: the result of `reasoning_before`.
    """
    form = syntax.reasoning
    if form is None or begins is None or _is_whole(text, form, syntax):
        return text
    return _named(_lark(form, syntax, begins), text)


def form_or_calls(
    text: str, syntax: ChatSyntax, wanted: AllowedCalls | None, begins: Begins | None
) -> tuple[str, ...]:
    """Return the grammars of an answer that has either a form or calls, the strictest first.

    A function that is not strict may have a schema that no grammar can express. The next grammar
    then follows only the part of the schema that can be expressed; the last one allows no calls.
    Calls are never allowed in answers with channels, if the form is the whole answer, or if calls
    are bare JSON, which grammars cannot distinguish from JSON of another form.

    Args:
        text: the form's grammar: Lark, or JSON with a list of grammars.
        syntax: the model's syntax.
        wanted: the calls that the answer may have; None if it may have none.
        begins: the result of `reasoning_before`.

    Raises:
        InvalidRequestError: the schema of a strict function cannot be followed.
    """
    calls = syntax.tools
    alone = after_reasoning(text, syntax, begins)
    if wanted is None or calls is None or not _may_call(text, syntax, calls):
        return (alone,)
    reasoning = None if begins is None else syntax.reasoning

    def make(each: AllowedCalls) -> str:
        start = begins or "outside"
        lark = tools_grammar(calls, each, reasoning, start, syntax.tokens, f"@{_NAME}")
        return _named(lark, text)

    both = grammars_of(wanted, make)
    if any(function.strict for function in wanted.functions):
        return (both[0],)
    return (*(grammar for grammar in both if len(grammar) <= MAX_GRAMMAR_CHARS), alone)


def parsing_of_form(parsing: AnswerParsing, text: str, syntax: ChatSyntax) -> AnswerParsing:
    """Return how answers are parsed that have either a form or calls.

    An answer that is JSON may contain the text of a call, or look like one: it is content. Other
    forms, such as structural tags, may be made to contain calls.

    Args:
        parsing: how answers without a form are parsed.
        text: the form's grammar: Lark, or JSON with a list of grammars.
        syntax: the model's syntax.
    """
    if syntax.tools is None or grammars_in(text)[0].get("json_schema") is None:
        return parsing
    names = parsing.names if _may_call(text, syntax, syntax.tools) else ()
    return replace(parsing, names=names, calls_first=True)


def _may_call(text: str, syntax: ChatSyntax, calls: ToolFormat) -> bool:
    """Whether an answer may have calls instead of the form."""
    form = syntax.reasoning
    is_whole = form is not None and (bool(form.answer_open) or _is_whole(text, form, syntax))
    return not (calls.is_bare_json or syntax.has_channels or is_whole)


def _is_whole(text: str, form: ReasoningFormat, syntax: ChatSyntax) -> bool:
    """Whether a form's grammar contains the close tag of reasoning."""
    close_id = syntax.tokens.get(form.close)
    return form.close in text or (close_id is not None and f"<[{close_id}]>" in text)


def _named(lark: str, text: str) -> str:
    """Return a grammar that refers to the form's grammar `text`."""
    grammars = grammars_in(text)
    grammars[0]["name"] = _NAME
    return with_others(lark, grammars)


def _lark(form: ReasoningFormat, syntax: ChatSyntax, begins: Begins) -> str:
    """Return the grammar of the reasoning, which refers to the form's grammar."""
    if form.has_channels:
        return form_in_final(_NAME, begins, syntax.tokens)
    rules, markers = LarkRules(), Markers(syntax.tokens)
    reasoning = add_reasoning(rules, form, begins, markers)
    alone = answer = f"@{_NAME}"
    if form.answer_open:
        opened, closed = (literal(tag, markers) for tag in (form.answer_open, form.answer_close))
        answer = f'({alone} | {opened} LINE_BREAKS? {alone} "\\n"? {closed})'
    if begins == "inside":
        return rules.text(f"{reasoning} {answer}")
    return rules.text(f"{answer if form.tags_alone else alone} | {reasoning} {answer}")
