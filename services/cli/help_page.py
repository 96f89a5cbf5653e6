"""Writes help pages with the full names of options on a terminal of any width.

Rich's tables shorten the names of options at 80 columns. These pages are Typer's plain definition
lists, in the groups that the options name.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.other_words import advice_for_option
from pagewire.shared.base.errors import ConfigError

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
FIRST = "Options"
SEVERAL = "--served-model-name"  # takes several names; its commands have no arguments


def joined_names(args: list[str]) -> list[str]:
    """Return a command line in which the names after `SEVERAL` are one word, with commas."""
    if SEVERAL not in args:
        return args
    first = args.index(SEVERAL) + 1
    rest = args[first:]
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    return [*args[:first], *([",".join(rest[:count])] if count else []), *rest[count:]]


class Command(TyperCommand):
    """A command whose help page groups its options and has its example on one line."""

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:
        # \b: a paragraph that is not wrapped, so that it can be copied
        text = (help or "").replace("\n\nExample: ", "\n\n\b\nExample: ")
        super().__init__(*args, help=text, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Also accept several names after one option, as vLLM's command does.

        If an option is another program's, say what to use here. Refuse texts that are not UTF-8:
        only paths may have any bytes.
        """
        known = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        with one_line_errors():
            if SEVERAL in known and (advice := advice_for_option(args, known)) is not None:
                raise ConfigError(advice)
            rest = list(super().parse_args(ctx, joined_names(args)))
            for param in self.params:
                text = ctx.params.get(param.name)
                if isinstance(text, str) and text.encode(errors="replace").decode() != text:
                    raise ConfigError(f"{param.opts[0]} is not UTF-8 text")  # it may be a secret
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each group in the order of its first option."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], FIRST: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                name = getattr(param, "rich_help_panel", None)
                groups.setdefault("Arguments" if is_argument else name or FIRST, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
