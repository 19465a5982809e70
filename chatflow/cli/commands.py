"""All commands of ``chatflow``."""

from __future__ import annotations

import click

from chatflow import __version__
from chatflow.cli.app import Commands
from chatflow.cli.chat import chat
from chatflow.cli.copying import copy
from chatflow.cli.importing import import_
from chatflow.cli.sessions import sessions
from chatflow.cli.turns import turns
from chatflow.cli.upkeep import check, repair, upgrade


@click.group(cls=Commands)
@click.version_option(__version__, prog_name="chatflow")
def chatflow() -> None:
    """Conversations in the terminal: hold one, look at those in a file, and look after the file.

    Results go to the output, all else is said on the error output. docs/cli.md describes all of it.
    """


for command in (chat, sessions, turns, check, repair, upgrade, import_, copy):
    chatflow.add_command(command)
