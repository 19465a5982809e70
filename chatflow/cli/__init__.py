"""The command ``chatflow``: conversations in the terminal. docs/cli.md describes it.

What it is made of, click and rich, is the extra ``cli``; nothing else of chatflow imports this package.
"""

import sys
from typing import Final

_EXTRA: Final = ("click", "rich")


def main() -> None:
    """Run the command with the process's arguments, and exit with its status."""
    try:
        from chatflow.cli.commands import chatflow
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        sys.exit(f"chatflow: {error.name} is missing; what the command needs: pip install {' '.join(_EXTRA)}")
    chatflow(prog_name="chatflow")
