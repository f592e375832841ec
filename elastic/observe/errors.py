"""How an error looks on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from elastic.errors import ElasticError
from elastic.observe.text import one_line


def print_error(console: Console, error: ElasticError) -> None:
    """One red line, the hint, and the detail (such as the traceback of the user's code) after them.

    Messages hold what users wrote, so they are printed as plain text, never as markup.
    """
    print_line(console, f"error: {one_line(error.message)}", "bold red")
    if error.hint:
        print_line(console, f"hint: {one_line(error.hint)}", "yellow")
    if error.detail:
        print_line(console, error.detail.rstrip(), "dim")


def print_line(console: Console, text: str, style: str) -> None:
    """Not wrapped at the terminal's width, so that a line can be searched for and copied."""
    console.print(Text(text, style), soft_wrap=True)
