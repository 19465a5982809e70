"""A process of its own that restores sessions: it reads lines of JSON, and says of each what it has made of it."""

from __future__ import annotations

import json
import sys
from typing import Final

from chatflow import AgentSession, SessionContext
from tests.strategies import observed

KINDS: Final = {kind.__name__: kind for kind in (AgentSession, SessionContext)}


def main() -> None:
    """Answer each line, which holds a class's name, an owner and a session's data."""
    for line in sys.stdin:
        kind, owner, data = json.loads(line)
        session = KINDS[kind].from_dict(data, owner=owner)
        sys.stdout.write(json.dumps([repr(observed(session)), session.to_dict()]) + "\n")


if __name__ == "__main__":
    main()
