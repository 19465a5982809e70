"""A conversation that outlives its process, in a file of the application's own: ``python persistent_conversation.py``.

Run once it begins a conversation and saves it; run again it goes on. A store does that by itself, turn by turn
(`SQLiteSessionStore`): this is for an application that keeps its conversations elsewhere, such as in a database that it
has already.

Set in the environment: SESSION_FILE, the file (./session.json); MODEL, the model that answers, and its provider's key
(without a model a script answers).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import anyio

from chatflow import (
    Agent,
    ChatflowError,
    EngineRequest,
    LiteLLMEngine,
    Role,
    ScriptedEngine,
    SessionContext,
    SessionFormatError,
)

MODEL = os.environ.get("MODEL")
FILE = Path(os.environ.get("SESSION_FILE", "./session.json"))


def scripted() -> ScriptedEngine:
    """What the agent says where no model is named."""

    def recalled(request: EngineRequest) -> str:
        asked = [message.text for message in request.messages if message.role is Role.USER]
        return f"We were at this: {asked[0]}" if len(asked) > 1 else "There is nothing to continue."

    engine = ScriptedEngine(default="Kyoto in autumn: three days for the temples, and one for Nara. Shall I go on?")
    engine.when("continue", reply=recalled)
    return engine


guide = Agent(
    name="Guide",
    instructions="Plan journeys with the user. Be brief.",
    model=MODEL or "gpt-4o",
    engine=LiteLLMEngine() if MODEL else scripted(),
)


def save(session: SessionContext) -> None:
    """Write the conversation: the file is the old one or the new one, also if the process is killed meanwhile."""
    text = json.dumps(session.to_dict(), allow_nan=False)
    with tempfile.NamedTemporaryFile("w", dir=FILE.parent, prefix=FILE.name, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(FILE)


def load() -> SessionContext | None:
    """The conversation that an earlier process has saved, if one has.

    Raises:
        SessionFormatError: The file holds something else; the error says where.
    """
    try:
        text = FILE.read_text()
    except FileNotFoundError:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SessionFormatError(path="", reason=f"{FILE} is not JSON: {error}") from error
    return SessionContext.from_dict(data, agents=guide)


async def main() -> None:
    """Begin a conversation, or go on with the one that was saved; both are one turn."""
    session = load()
    said = "Plan a trip to Kyoto." if session is None else "Continue from where we left off."
    if session is None:
        session = guide.create_session()
    response = await guide.run(said, session=session)
    await anyio.to_thread.run_sync(save, session)
    print(f"you: {said}")
    print(f"{response.active_agent_name}: {response.content}")
    print(f"({len(session.history)} messages in {FILE}; run it again)")


if __name__ == "__main__":
    try:
        anyio.run(main)
    except ChatflowError as error:
        sys.exit(f"persistent_conversation: {error}")
