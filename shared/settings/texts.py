"""Makes settings with their one description, and puts description and default in words."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings

# Groups of options on help pages.
MAIN, ENGINE, NETWORK = "", "Engine", "Network"


def described(
    default: Any, text: str, *, unset: str | None = None, panel: str | None = None, **rules: Any
) -> Any:
    """Make a field with its one description.

    The command line's help, `.env.example` and docs/configuration.md have this text and
    default.

    Args:
        default: a value, or a function that makes one.
        text: one or two sentences.
        unset: what applies by default, where that is None or made.
        panel: group of the setting's option on help pages; None: it has no option.
        rules: for pydantic.
    """
    rules |= {"default_factory" if callable(default) else "default": default}
    return Field(description=text, json_schema_extra={"unset": unset, "panel": panel}, **rules)


def default_text(kind: type[BaseSettings], name: str) -> str:
    """Return what applies if a setting is not given, for people to read."""
    field = kind.model_fields[name]
    match field.json_schema_extra:
        case {"unset": str(text)}:
            return text
    return ("off", "on")[field.default] if isinstance(field.default, bool) else str(field.default)


def description(kind: type[BaseSettings], name: str) -> str:
    """Return the one description of a setting."""
    return str(kind.model_fields[name].description)


def panel_of(kind: type[BaseSettings], name: str) -> str | None:
    """Return the group of a setting's option on help pages; None if it has no option."""
    match kind.model_fields[name].json_schema_extra:
        case {"panel": str(panel)}:
            return panel
    return None
