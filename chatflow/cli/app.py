"""How every command is run: its options, its event loop, and what becomes of an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import anyio
import click

from chatflow.cli.output import Lines, Output, forgive_encodings, is_person
from chatflow.exceptions import ChatflowError, CorruptSessionError, SessionNotFoundError, shorten

_T = TypeVar("_T")

DEBUG: Final = "chatflow.debug"
"""In a context's `meta`: whether errors are to be shown with their tracebacks."""

_INTERRUPTED: Final = 130
"""What a shell gives for a program that Ctrl-C has ended."""


class Failed(click.ClickException):
    """An error to be shown: what has happened, and what to do."""


class Found(click.exceptions.Exit):
    """The command has done its work, and found something that a script should know of: status 1, without a word."""

    def __init__(self) -> None:
        super().__init__(1)


class Command(click.Command):
    """A command with ``--debug``, whose errors are one line without it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--debug"], is_flag=True, help="Show an error's traceback, and more of the log.")
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run it, its log beside it."""
        debug: bool = ctx.params.pop("debug")
        ctx.meta[DEBUG] = debug
        logger = logging.getLogger("chatflow")
        handler = Lines(Output(), debug=debug)
        before, propagates = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(handler.level)
        logger.propagate = False
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # the last of them is `chatflow sessions list | head`, which click ends in silence
        except Exception as error:
            if debug:
                raise
            raise Failed(described(error)) from error
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)
            logger.propagate = propagates


def described(error: Exception) -> str:
    """An error on one line, with what to do where it does not say that itself."""
    if isinstance(error, SessionNotFoundError):
        return f"session {shorten(error.session_id)} does not exist; `chatflow sessions list` shows those that do"
    if isinstance(error, CorruptSessionError):
        return f"{error}; `chatflow repair` mends it"
    if isinstance(error, ChatflowError | TimeoutError | ValueError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename!r}' if error.filename else ''}"
    return f"{type(error).__name__}: {error}; --debug shows where it comes from"


class Commands(click.Group):
    """Commands whose errors, click's own too, are one line."""

    command_class = Command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run it and exit, however it is called."""
        forgive_encodings()
        try:
            status: object = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:  # of a group without a command: its message is the help
            status = error.exit_code
            error.show()
        except click.ClickException as error:
            status = error.exit_code
            self._complain(_one_line(error))
        except click.Abort:
            status = _INTERRUPTED
            self._complain("interrupted")
        raise SystemExit(status if isinstance(status, int) else 0)

    def _complain(self, text: str) -> None:
        Output().note(f"chatflow: {text}", "red")


Commands.group_class = Commands


def _one_line(error: click.ClickException) -> str:
    text = error.format_message()
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return text if ctx is None else f"{text.rstrip('.')}; `{ctx.command_path} --help` shows what there is"


def run(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Do a command's work, in the one event loop of its process; Ctrl-C cancels it."""
    return anyio.run(work)


def confirm(question: str, *, yes: bool) -> None:
    """Ask a person whether that is to be done; where there is nobody to ask, it has to be said beforehand."""
    if yes:
        return
    if not is_person():
        raise Failed("nobody is here to be asked; --yes does it without asking")
    if not click.confirm(question, err=True):
        raise Failed("nothing was changed")


with_db: Final = click.option(
    "--db",
    "db",
    metavar="FILE",
    default="chatflow.db",
    show_default=True,
    envvar="CHATFLOW_DB",
    show_envvar=True,
    help="The file that holds the conversations.",
)
with_owner: Final = click.option(
    "--owner", metavar="NAME", help="Whose conversations; by default those without an owner."
)
with_all_owners: Final = click.option("--all-owners", is_flag=True, help="Those of all owners, and those without one.")
with_yes: Final = click.option("--yes", "-y", is_flag=True, help="Don't ask.")
with_json: Final = click.option("--json", "is_json", is_flag=True, help="Print JSON, see docs/cli.md.")
