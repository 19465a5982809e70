"""What commands print: for a person at a terminal, plain for a pipe, or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import IO, Any, Final, TypeAlias

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from chatflow.cli.safe import ascii_json, shown
from chatflow.cli.wrapping import Flow

Step: TypeAlias = Callable[[], None]
"""Says that another part is done."""


def console(*, stderr: bool = False) -> Console:
    """A console that takes text as it is: what is stored is no markup, and lines are not cut to a width."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


class Output:
    """The two streams of a command. Results go to the one, all that is said about the work to the other.

    *is_json* says that results are JSON. Whatever text is given is made safe for a terminal here.
    """

    def __init__(self, *, is_json: bool = False) -> None:
        self.is_json: Final = is_json
        self.out: Final = console()
        self.err: Final = console(stderr=True)

    def line(self, text: str = "", style: str = "", *, begin: str = "") -> None:
        """Print a line of the result, behind *begin*."""
        flow = self.flow(Text(begin))
        flow.add(shown(text), style)
        flow.end()

    def flow(self, begin: Text, margin: Text | None = None) -> Flow:
        """Begin a text of the result that is printed in pieces; *margin* is blank unless given."""
        return Flow(self.out, begin, Text(" " * begin.cell_len) if margin is None else margin)

    def note(self, text: str, style: str = "dim") -> None:
        """Say something about the work, beside the result."""
        self.err.print(Text(shown(text), style=style), soft_wrap=not self.err.is_terminal)

    def json(self, value: Any) -> None:
        """Print a value as one line of JSON."""
        self.json_text(json.dumps(value))

    def json_text(self, text: str, target: IO[str] | None = None) -> None:
        """Print a line of JSON, or write it to *target*."""
        click.echo(ascii_json(text), file=target)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print rows: as a table on a terminal, else with tabs in between and without the columns' names."""
        if not self.out.is_terminal:
            for row in rows:
                click.echo("\t".join(map(shown, row)))
            return
        table = Table(*columns, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*(Text(shown(cell)) for cell in row))
        if table.rows:
            self.out.print(table, soft_wrap=False)

    @contextmanager
    def working(self, text: str) -> Generator[None]:
        """Show that something goes on, to a person at a terminal."""
        if not self.err.is_terminal:
            yield
            return
        with self.err.status(Text(shown(text))):
            yield

    @contextmanager
    def progress(self, text: str, total: int) -> Generator[Step]:
        """Show how far it has come, to a person at a terminal: the step that is given is called after each part."""
        with Progress(console=self.err, transient=True, disable=not self.err.is_terminal) as progress:
            task = progress.add_task(text, total=total)
            yield lambda: progress.advance(task)


class Lines(logging.Handler):
    """Log records as lines beside the result; with *debug* what was raised is shown too."""

    def __init__(self, output: Output, *, debug: bool) -> None:
        super().__init__(logging.DEBUG if debug else logging.WARNING)
        self._output = output
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        self._output.note(f"{record.levelname.lower()}: {record.getMessage()}", "yellow")
        if self._debug and record.exc_info:
            self._output.err.print(Text(shown(logging.Formatter().formatException(record.exc_info), lines=True)))


def forgive_encodings() -> None:
    """Let what a terminal has no characters for be written out, and what it sends that is no text be marked."""
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def is_person() -> bool:
    """Whether somebody sits at a terminal and can be asked."""
    return sys.stdin.isatty()
