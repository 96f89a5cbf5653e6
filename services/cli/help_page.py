"""Help pages that shorten no name, whatever the terminal's width.

Rich's tables shorten the names of options on 80 columns. These pages are Typer's plain definition
lists, in the groups that the options name.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
FIRST = "Options"


class Command(TyperCommand):
    """A command whose help page groups its options, and leaves its example on one line."""

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:
        # \b: a paragraph that is not wrapped, so that it can be copied
        text = (help or "").replace("\n\nExample: ", "\n\n\b\nExample: ")
        super().__init__(*args, help=text, **kwargs)

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
