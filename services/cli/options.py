"""Command-line options, made from the settings of the same names.

An option that is not given is None, so that the environment variable is used. A setting with a
panel is an option of each command that has its class; its help is its description and default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic_settings import BaseSettings

from pagewire.shared.settings.texts import default_text, description, panel_of

_NOTES = {
    "redis_url": "Put one with a password into PAGEWIRE_REDIS_URL: other users can see this "
    "command line.",
}
# A prefill worker computes all prompts of the requests that it answers.
DECODE_ONLY = ("local_prefill_tokens",)
OWN_REDIS = "a private server is started"
_AS_GIVEN = (int, float, bool, str, Path)


def setting(
    kind: type[BaseSettings], name: str, *, note: str = "", unset: str | None = None
) -> Any:
    """Return an option for a field of a settings class.

    Args:
        kind: the settings class.
        name: name of the field.
        note: text after the field's description.
        unset: what the command does by default, if that is not the field's default.
    """
    text = f"{description(kind, name)} {note or _NOTES.get(name, '')}".rstrip()
    default, flag = unset or default_text(kind, name), name.replace("_", "-")
    is_switch = _plain_type(kind.model_fields[name].annotation) is bool
    flags = (f"--{flag}/--no-{flag}",) if is_switch else (f"--{flag}",)
    panel = panel_of(kind, name) or None
    return typer.Option(*flags, help=f"{text}  [default: {default}]", rich_help_panel=panel)


def with_settings(
    *kinds: type[BaseSettings],
    only: tuple[str, ...] = (),
    omit: tuple[str, ...] = (),
    unset: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of settings classes, after its own parameters.

    The command reads them from `ctx.params`.

    Args:
        kinds: the settings classes; the first one that has a setting describes it.
        only: names of the settings; by default all that have a panel.
        omit: names of settings that the command does not have.
        unset: what the command does by default, by names of settings whose default is another.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        added: dict[str, inspect.Parameter] = {}
        for kind in kinds:
            for name, field in kind.model_fields.items():
                wanted = name in only if only else panel_of(kind, name) is not None
                if wanted and name not in (*own, *omit, *added):
                    option = setting(kind, name, unset=(unset or {}).get(name))
                    added[name] = inspect.Parameter(
                        name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=None,
                        annotation=Annotated[_plain_type(field.annotation) | None, option],
                    )

        return with_parameters(command, added.values())

    return decorate


def with_parameters(
    command: Callable[..., None], added: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Give a command more options, before its own keyword-only ones.

    The command reads them from `ctx.params`.
    """
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def run(**params: Any) -> None:
        command(**{name: params[name] for name in own})

    last = [each for each in own.values() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    parameters = [*(each for each in own.values() if each not in last), *added, *last]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def options_of(kind: type[BaseSettings], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command that are settings of a class."""
    return {name: value for name, value in params.items() if name in kind.model_fields}


def _plain_type(annotation: Any) -> Any:
    """Return the type of a setting as the command line reads it; the class checks it further."""
    while get_origin(annotation) is not Literal and (inner := get_args(annotation)):
        annotation = inner[0]  # of Annotated[X, ...], X | None
        if annotation in _AS_GIVEN:
            break
    if get_origin(annotation) is Literal:
        return annotation if isinstance(get_args(annotation)[0], str) else int
    return annotation if annotation in _AS_GIVEN else str
