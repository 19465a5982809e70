"""The agent that ``chatflow chat`` talks to."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from chatflow.cli.app import Failed
from chatflow.core.agent import Agent
from chatflow.exceptions import shorten


def load_agent(name: str) -> Agent:
    """The agent that ``module:agent`` names; modules of the current folder are found too.

    Raises:
        Failed: The module has no such agent.
        click.BadParameter: It is no such name.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise click.BadParameter(f"{shorten(name)} is not of the form module:agent", param_hint="--agents")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise Failed(f"there is no module {shorten(module_name)}; run this where it can be imported") from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Agent):
        what = "has no" if found is None else f"has a {type(found).__name__}, and no agent, as"
        raise Failed(f"module {shorten(module_name)} {what} {shorten(path)}; --agents names an Agent")
    return found
