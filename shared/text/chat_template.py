"""Renders chat templates: a conversation becomes a prompt, by Hugging Face's conventions.

Templates come with a model, perhaps from the hub, and run in Jinja's sandbox. The length of their
output is bounded. Apart from that they are trusted like the model: the operator chose both. A
template that a request brings (`RequestTemplate`) runs in the same sandbox, and where its CPU time
is bounded.
"""

from __future__ import annotations

import io
import json
import re
import secrets
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Meta

from pagewire.shared.base.errors import InvalidRequestError, ModelLoadError
from pagewire.shared.base.field_rules import of_chars

MAX_RENDERED_CHARS = 8_000_000
MAX_TEMPLATE_VARIABLES = 64
# JSON may become this many times as long with line breaks and spaces, and this many characters.
_MOST_TIMES = 8
_SPACES = 1 << 15
# The parts of JSON without spaces: a string, an empty list or object, a mark, another value.
_JSON_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+"|\[\]|\{\}|[\[\]{},:]|[^"\[\]{},:]++')

TemplateText = Annotated[str, of_chars(1, 1 << 16)]
TemplateVariables = Annotated[
    dict[str, Any],
    Meta(
        max_length=MAX_TEMPLATE_VARIABLES,
        description=f"an object of at most {MAX_TEMPLATE_VARIABLES} values",
    ),
]

# Exceptions of a template whose message lacks a field or has one of another type.
RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

INVALID = (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError)
MAX_REASON_CHARS = 300

# Names of variables that are not the caller's own to set.
OWN_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "messages",
        "tools",
    }
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The input of a template in addition to the messages.

    Attributes:
        tools: in OpenAI's form; None if there are none.
        variables: further variables, such as `enable_thinking`; none of `OWN_VARIABLES`.
        add_generation_prompt: the prompt ends where the answer begins.
        continue_final_message: the prompt ends within the last message, so that the answer
            continues it.
    """

    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def of(
        cls,
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
    ) -> ChatOptions:
        """Return what a request asks for, where None means unset.

        Raises:
            InvalidRequestError: two fields exclude each other, or a variable is not the caller's
                to set; names the field.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message cannot be true together with add_generation_prompt",
                "continue_final_message",
            )
        for name in OWN_VARIABLES.intersection(variables):
            raise InvalidRequestError(
                f"chat_template_kwargs cannot have {name}: it is a field of its own or not "
                "possible",
                "chat_template_kwargs",
            )
        goes_on = bool(continue_final_message)
        prompt = not goes_on if add_generation_prompt is None else add_generation_prompt
        return cls(tools, variables, prompt, goes_on)


class TemplateInput(NamedTuple):
    """The input of a template, adapted to what it can show.

    Attributes:
        messages: as `template_message` makes them.
        tools: in OpenAI's form.
        variables: further variables that the template knows, unless the caller has set them.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: Mapping[str, Any]


TemplateFix = Callable[[TemplateInput], TemplateInput]


class ChatTemplate:
    """A compiled chat template of a model.

    Args:
        source: the Jinja source.
        special_tokens: names and texts of special tokens that the template may use (`bos_token`).
        name: what errors call it.

    Attributes:
        source: the Jinja source.
        fit: adapts a conversation to what the template can show; None if it can show everything.

    Raises:
        ModelLoadError: the source is not valid Jinja.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], name: str = "the model's chat template"
    ) -> None:
        self.source = source
        self.fit: TemplateFix | None = None
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except INVALID as exc:
            raise ModelLoadError(f"{name} is not valid Jinja ({_reason(exc)}): correct it") from exc

    def render(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        """Render a conversation.

        Raises:
            InvalidRequestError: the template refuses the messages, or writes without end, or
                leaves out the message that is to be continued.
        """
        if not options.continue_final_message:
            return self._generate(messages, options)
        # A mark is where the last message ends. Templates may take spaces away from its end.
        mark = secrets.token_hex(16)
        last = messages[-1] | {"content": f"{messages[-1]['content']}{mark} "}
        text = self._generate([*messages[:-1], last], options)
        before, found, after = text.rpartition(mark)
        if not found:
            raise InvalidRequestError(
                "continue_final_message: this model's chat template leaves out the last message",
                "continue_final_message",
            )
        return before if after.startswith(" ") else before.rstrip()

    def _generate(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        parts: list[str] = []
        missing = MAX_RENDERED_CHARS
        try:
            for part in self._template.generate(self._variables(messages, options)):
                parts.append(part)
                missing -= len(part)
                if missing < 0:
                    raise InvalidRequestError(
                        f"the rendered conversation is longer than {MAX_RENDERED_CHARS} characters",
                        param="messages",
                    )
        except RENDER_ERRORS as exc:
            raise self._refusal(exc) from exc
        return "".join(parts)

    def _refusal(self, error: Exception) -> InvalidRequestError:
        problem = f"the chat template refuses the messages: {error}"
        return InvalidRequestError(problem, param="messages")

    def _variables(self, messages: list[dict[str, Any]], options: ChatOptions) -> dict[str, Any]:
        given = TemplateInput(messages, options.tools, {})
        if self.fit is not None:
            given = self.fit(given)
        return {
            **self._special_tokens,
            **given.variables,
            **options.variables,
            "messages": given.messages,
            "tools": given.tools,
            "documents": None,
            "add_generation_prompt": options.add_generation_prompt,
        }


def read_template(file: Path, special_tokens: dict[str, str]) -> ChatTemplate:
    """Return the template of a file that the operator names.

    Raises:
        ModelLoadError: the file cannot be read, or is not valid Jinja.
    """
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise ModelLoadError(
            f"setting chat_template (PAGEWIRE_CHAT_TEMPLATE) cannot be {str(file)[:200]!r} "
            f"({reason}): it must be a file with a Jinja template"
        ) from exc
    return ChatTemplate(source, special_tokens, str(file))


class RequestTemplate(ChatTemplate):
    """A template that a request brings; its errors name the line and are the client's fault."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        try:
            super().__init__(source, special_tokens, "chat_template")
        except ModelLoadError as exc:
            raise InvalidRequestError(str(exc), "chat_template") from exc

    def _refusal(self, error: Exception) -> InvalidRequestError:
        problem = f"chat_template cannot render the messages ({_reason(error)}): correct it"
        return InvalidRequestError(problem, "chat_template")


def _reason(error: Exception) -> str:
    """Return in one line where in a template an error is, and what it is."""
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
    if line is None:  # Jinja lets the traceback name lines of the template
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
        line = lines[-1] if lines else None
    reason = (error.message if isinstance(error, jinja2.TemplateSyntaxError) else None) or error
    text = " ".join(str(reason).split())[:MAX_REASON_CHARS]
    return text if line is None else f"line {line}: {text}"


class Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; ignored here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by what is in it."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    plain = separators if indent is None else (",", ":")
    text = json.dumps(value, ensure_ascii=ensure_ascii, separators=plain, sort_keys=sort_keys)
    if indent is None:
        return text
    return _indented(text, " " * indent if isinstance(indent, int) else indent, separators)


def _indented(text: str, indent: str, separators: tuple[str, str] | None) -> str:
    """Return JSON with line breaks as `json.dumps` makes them.

    `json.dumps` would take time with the depth of each value, and memory without a bound.

    Raises:
        InvalidRequestError: the spaces would make it much longer than it is.
    """
    comma, colon = separators or (",", ": ")
    out, depth = io.StringIO(), 0
    most = missing = min(MAX_RENDERED_CHARS, _SPACES + _MOST_TIMES * len(text))
    for match in _JSON_PARTS.finditer(text):
        part = match[0]
        match part:
            case "[" | "{":
                depth += 1
                part += "\n" + indent * depth
            case "]" | "}":
                depth -= 1
                part = "\n" + indent * depth + part
            case ",":
                part = comma + "\n" + indent * depth
            case ":":
                part = colon
        out.write(part)
        missing -= len(part)
        if missing < 0:
            raise InvalidRequestError(
                "tools or chat_template_kwargs are nested too deeply: this model's chat template "
                f"would indent {len(text)} characters of them to more than {most}"
            )
    return out.getvalue()
