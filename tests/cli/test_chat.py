from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from chatflow import Agent, Runner, SQLiteSessionStore
from chatflow.cli.chat import OWN
from chatflow.cli.offline import offline_agent
from tests.cli.conftest import HOSTILE, Command, fill, said
from tests.cli.test_sessions import is_plain
from tests.cli.test_upkeep import damage

AGENTS = """
from chatflow import Agent, EngineReply, Handoff, Role, Runner, ScriptedEngine, tool

@tool
async def fails() -> str:
    \"\"\"Never works.\"\"\"
    raise RuntimeError("broken inside")

silent = Agent("Silent", engine=ScriptedEngine(default=EngineReply(text="")))
failing = Agent("Failing", tools=[fails], engine=ScriptedEngine([ScriptedEngine.call("fails"), "It broke."]))
down = Agent("Down", engine=ScriptedEngine([RuntimeError("the line is down")]))
hostile = Agent("Hostile", engine=ScriptedEngine(default=HOSTILE))
typed = Agent("Typed", output_type=list[int], engine=ScriptedEngine(["no numbers", "[1, 2]"]))
number = 5
class inner:
    agent = silent

payments = []

@tool
async def pay() -> str:
    \"\"\"Pay.\"\"\"
    payments.append("paid")
    return "paid"

answers = ["Done.", RuntimeError("the line is down")]

def answer(request):
    if request.messages[-1].role is not Role.TOOL:
        return ScriptedEngine.call("pay")
    said = answers.pop()
    if isinstance(said, str):
        return said
    raise said

flaky = Agent("Flaky", tools=[pay], engine=ScriptedEngine(default=answer))
"""


def left_behind(path: Path, agent_name: str) -> None:
    """Leave in the conversation "main" what a killed chat with that agent leaves of the message "my last words"."""

    async def accept(store: SQLiteSessionStore) -> None:
        await Runner(Agent(agent_name), store).accept("main", "my last words", message_id=f"{OWN}1")

    fill(path, accept)
    damage(path, "UPDATE chatflow_turns SET state = 'interrupted', accepted = 0, attempts = 1")


@pytest.fixture
def agents(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of agents in the current folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(f"HOSTILE = {HOSTILE!r}\n{AGENTS}")


def test_offline(command: Command, db: Path) -> None:
    """Without a model a script answers, which is said; each line is a message, and tools and handoffs are shown."""
    ran = command("chat", typed="where is order 404?\n\nmy invoice is wrong\n")
    assert ran.status == 0
    assert ran.out.splitlines() == [
        "you: where is order 404?",
        '  Scripted support calls check_order_status(order_id="404")',
        '  check_order_status gave {"order_id": "404", "status": "IN_TRANSIT", "eta": "Tomorrow"}',
        "Scripted support: It is on its way, and arrives tomorrow.",
        "you: ",
        "you: my invoice is wrong",
        "  Scripted support calls transfer_to_scripted_billing()",
        "  handed over to Scripted billing",
        '  transfer_to_scripted_billing gave {"transferred_to": "Scripted billing"}',
        "Scripted billing: Billing here. Which invoice is it?",
    ]
    assert "a script answers, offline: --model NAME asks a model" in ran.err
    assert db.exists()


def test_goes_on(command: Command) -> None:
    """Started again it shows what was said, and goes on with the agent that answers."""
    command("chat", typed="hello\nmy invoice is wrong\n")
    ran = command("chat", typed="And now?\n")
    lines = ran.out.splitlines()
    assert "            user | hello" in lines
    assert "Scripted support | You said: hello (This is message 1 that I can see of yours.)" in lines
    assert lines[-2:] == ["you: And now?", "Scripted billing: Billing here. Which invoice is it?"]


def test_shows_the_last_turns(command: Command, db: Path) -> None:
    """Of a long conversation the last ten turns are shown, and how many there are before."""
    fill(db, lambda store: said(store, "main", *(f"number {number}" for number in range(15))))
    out = command("chat").out
    assert "(5 earlier turns; `chatflow sessions show` shows them)" in out
    assert "number 4" not in out
    assert "turn 6, " in out
    assert "number 5" in out


def test_conversations_and_owners(command: Command) -> None:
    """A conversation has the id and the owner that were named."""
    command("chat", "--session", "mine", "--owner", "ann", typed="hello\n")
    assert command("sessions", "list", "--all-owners").out.startswith("ann\tmine\tScripted support\t")


def test_leaves_accepted_messages_alone(command: Command, db: Path) -> None:
    """What an application has accepted in the same conversation is not answered by the script."""

    async def accept(store: SQLiteSessionStore) -> None:
        await Runner(Agent("Support"), store).accept("main", "Where is order 505?", message_id="wamid.1")

    fill(db, accept)
    ran = command("chat", typed="hello\n")
    assert ran.out.splitlines()[0] == "you: hello"
    [waiting] = command("turns", "pending").out.splitlines()
    assert waiting.split("\t")[1:4] == ["accepted", "main", "wamid.1"]


def test_in_memory(command: Command, db: Path) -> None:
    """In memory nothing is kept, and no file is made."""
    ran = command("chat", "--db", ":memory:", typed="hello\n")
    assert "You said: hello" in ran.out
    assert not db.exists()
    assert not Path(":memory:").exists()


def test_nobody_to_ask(command: Command) -> None:
    """Where nobody can be asked, what has to be approved waits, which is said, at the next start too."""
    ran = command("chat", typed="refund order 404\n")
    assert (ran.status, ran.out.splitlines()[-1]) == (
        0,
        '  Scripted support wants to call refund(order_id="404"), and waits for approval',
    )
    waits = 'refund(order_id="404") waits for approval, and nobody is here to be asked'
    assert waits in ran.err
    assert waits in command("chat").err


@pytest.mark.usefixtures("agents")
def test_own_agents(command: Command) -> None:
    """An agent of one's own answers, found in the current folder, by a path in its module."""
    ran = command("chat", "--agents", "mine:inner.agent", typed="hello\n")
    assert (ran.status, ran.out) == (0, "you: hello\n")
    assert "script" not in ran.err


@pytest.mark.usefixtures("agents")
def test_failing_tool(command: Command) -> None:
    """A tool that fails is shown to have failed, and its log is a line, without a traceback."""
    ran = command("chat", "--agents", "mine:failing", typed="hello\n")
    assert "  fails failed: " in ran.out
    assert "Failing: It broke." in ran.out
    assert "Traceback" not in ran.out + ran.err


@pytest.mark.usefixtures("agents")
def test_log_with_debug(command: Command) -> None:
    """With --debug the log shows what was raised."""
    ran = command("chat", "--agents", "mine:failing", "--debug", typed="hello\n")
    assert "Traceback" in ran.err
    assert "broken inside" in ran.err


@pytest.mark.usefixtures("agents")
def test_failing_turn(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that fails ends a program that writes lines: one line, and a status. With --debug it is raised."""
    ran = command("chat", "--agents", "mine:down", typed="hello\nhello again\n")
    assert (ran.status, ran.out) == (1, "you: hello\n")
    assert ran.err.splitlines()[-1] == "chatflow: RuntimeError: the line is down; --debug shows where it comes from"
    monkeypatch.delitem(sys.modules, "mine")
    with pytest.raises(RuntimeError, match="the line is down"):
        command("chat", "--agents", "mine:down", "--debug", typed="hello\n")


def test_interrupted_before_it_begins(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C right after a message was sent, before its turn has begun, cancels that turn and no more."""

    async def interrupted(work: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("chatflow.cli.chat.is_person", lambda: True)
    monkeypatch.setattr("chatflow.cli.chat._until_interrupted", interrupted)
    ran = command("chat", "--db", ":memory:", typed="one\ntwo\n")
    assert ran.status == 0
    assert "cancelled: none of it is in the conversation; typed again it goes on" in ran.err
    assert "You said: two" in ran.out
    assert "You said: one" not in ran.out


@pytest.mark.usefixtures("agents")
def test_typed_again(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose turn has failed goes on when it is typed again: what its tools have done is not done again."""
    monkeypatch.setattr("chatflow.cli.chat.is_person", lambda: True)
    ran = command("chat", "--agents", "mine:flaky", typed="pay\npay\n")
    assert "the line is down; --debug shows where it comes from (none of it is in the conversation; typed" in ran.err
    assert "Flaky: Done." in ran.out
    assert sys.modules["mine"].payments == ["paid"]
    assert command("turns", "pending").out == ""


@pytest.mark.usefixtures("agents")
def test_said_twice(command: Command) -> None:
    """A message that was answered is another one when it is typed again."""
    ran = command("chat", typed="hello\nhello\n")
    assert "You said: hello (This is message 2 that I can see of yours.)" in ran.out


def test_killed(command: Command, db: Path) -> None:
    """Started again after it was killed, it shows the message that was not answered to its end, and goes on with it."""
    left_behind(db, offline_agent().name)
    ran = command("chat", typed="And now?\n")
    assert ran.out.splitlines()[:2] == [
        "you: my last words",
        "Scripted support: You said: my last words (This is message 1 that I can see of yours.)",
    ]
    assert "this was not answered to its end, and goes on:" in ran.err
    assert "This is message 2" in ran.out
    assert "goes on" not in command("chat").err


def test_killed_with_another_agent(command: Command, db: Path) -> None:
    """A message that was typed to another agent waits for that one, which is said."""
    left_behind(db, "Terminal assistant")
    ran = command("chat", typed="hello\n")
    assert "'my last words' is not answered yet: it waits for the agent 'Terminal assistant'" in ran.err
    assert ran.out.splitlines()[0] == "you: hello"
    assert command("turns", "pending").out.split("\t")[1:3] == ["interrupted", "main"]


def test_given_up(command: Command, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that has cost its process too often is given up, which is said; typed again it is a new one."""
    left_behind(db, offline_agent().name)
    damage(db, "UPDATE chatflow_turns SET attempts = 5")
    monkeypatch.setattr("chatflow.cli.chat.is_person", lambda: True)
    ran = command("chat", typed="my last words\n")
    assert "was given up after 5 attempts" in ran.err
    assert "You said: my last words (This is message 1 that I can see of yours.)" in ran.out


@pytest.mark.usefixtures("agents")
def test_hostile_model(command: Command) -> None:
    """What a model says reaches no terminal as it is, in pieces or as history."""
    for _ in range(2):
        ran = command("chat", "--agents", "mine:hostile", typed=f"{HOSTILE.replace(chr(0xD83D), '')}\n")
        assert ran.status == 0
        assert is_plain(ran.out)
        assert is_plain(ran.err)
        assert "[bold]not bold[/bold] :smile:" in ran.out


@pytest.mark.usefixtures("agents")
def test_refused_answer(command: Command) -> None:
    """An answer that is not of the agent's output type is said to be asked for again."""
    out = command("chat", "--agents", "mine:typed", typed="hello\n").out
    assert out.splitlines()[1:] == [
        "Typed: no numbers",
        "  Typed's answer was not of its output type, and is asked for once more",
        "Typed: [1, 2]",
    ]


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--agents", "mine"), "'mine' is not of the form module:agent"),
        (("--agents", ":x"), "is not of the form"),
        (("--agents", "not_there:x"), "there is no module 'not_there'"),
        (("--agents", "mine:nobody"), "has no 'nobody'; --agents names an Agent"),
        (("--agents", "mine:inner.nobody"), "has no 'inner.nobody'"),
        (("--agents", "mine:number"), "has a int, and no agent, as 'number'"),
        (("--agents", "mine:silent", "--model", "gpt"), "--model and --agents exclude each other"),
        (("--db", "."), "is a folder; name a file in it"),
        (("--db", "nowhere/x/chat.db"), "there is no folder 'nowhere/x'; make it, or name another file with --db"),
        (("--db", "postgresql://db.example/chat"), "--db names a file, and this is the address of a PostgreSQL"),
        (("--owner", ""), "must not be empty"),
    ],
)
def test_refused(command: Command, args: tuple[str, ...], reason: str) -> None:
    """What can't be talked to is an error of one line."""
    ran = command("chat", *args)
    assert ran.status in {1, 2}
    assert reason in ran.err.splitlines()[-1]
    assert "Traceback" not in ran.err
    assert not Path("nowhere").exists()


@pytest.mark.usefixtures("agents")
def test_module_that_needs_another(command: Command) -> None:
    """A module that lacks another one says which one it lacks."""
    Path("mine.py").write_text("import not_installed")
    ran = command("chat", "--agents", "mine:agent")
    assert "No module named 'not_installed'" in ran.err


def test_model(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is named is asked; without its key that is an error of one line, which names the variable."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_ADMIN_KEY", raising=False)
    ran = command("chat", "--model", "gpt-4o", typed="hello\n")
    assert (ran.status, ran.out) == (1, "you: hello\n")
    assert ran.err.splitlines()[-1].endswith("; set OPENAI_API_KEY or OPENAI_ADMIN_KEY in the environment")
