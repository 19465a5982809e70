from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from rich.cells import cell_len

from chatflow import Runner, SQLiteSessionStore
from chatflow.cli.offline import offline_agent, offline_engine
from tests.cli.conftest import fill, order_404, said
from tests.cli.openai_file import ORDER_404, write
from tests.cli.processes import ROOT, holding_a_turn
from tests.cli.terminal import CTRL_C, CTRL_D, ESCAPES, at_terminal

LONG: Final = "The order is on its way, 好世界好世界好世界好世界, and arrives tomorrow. " * 3 + "x" * 70

SPINNER: Final = re.compile("[\u2800-\u28ff] ")

SLOW: Final = (
    f"LONG = {LONG!r}\n"
    '''
import anyio
from chatflow import Agent, EngineReply, ReasoningDelta, ScriptedEngine, TextDelta, tool

class Slow:
    """Says the beginning of an answer, and the rest only if the message does not ask it to wait."""

    async def generate(self, request):
        raise NotImplementedError

    async def stream(self, request):
        yield ReasoningDelta("let me see")
        if "long" in request.messages[-1].text:
            for word in LONG.split(" "):
                yield TextDelta(word + " ")
            yield EngineReply(text=LONG + " ")
            return
        yield TextDelta("I am ")
        if "wait" in request.messages[-1].text:
            await anyio.sleep_forever()
        if "fail" in request.messages[-1].text:
            raise RuntimeError("the line is down")
        yield TextDelta("here.")
        yield EngineReply(text="I am here.")

agent = Agent("Slow", engine=Slow())

@tool(requires_approval=True)
async def refund() -> str:
    """Pay back."""
    return "paid"

@tool
async def note() -> str:
    """Write it down."""
    return "noted"

calls = [ScriptedEngine.call(name) for name in ("refund", "note", "refund")]
busy = Agent("Busy", tools=[refund, note], engine=ScriptedEngine([*calls, "All done."]))
'''
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a module of agents."""
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def messages(path: Path) -> int:
    """How many messages are stored."""
    with closing(sqlite3.connect(path)) as connection:
        count: int = connection.execute("SELECT count(*) FROM chatflow_messages").fetchone()[0]
    return count


def test_conversation(folder: Path) -> None:
    """A conversation is held, with an approval that is given, one that is refused and one that waits over a restart."""
    with at_terminal("chat", folder=folder) as terminal:
        terminal.until("you: ")
        terminal.type("refund order 404\n")
        terminal.until("nothing decides later: ")
        terminal.type("y\n")
        assert "refund gave order 404 is paid back" in terminal.until("you: ")
        terminal.type("refund order 505\n")
        terminal.until("nothing decides later: ")
        terminal.type("n too late\n")
        terminal.until("you: ")
        terminal.type("refund order 606\n")
        terminal.until("nothing decides later: ")
        terminal.type("\n")
        assert "it waits, and is asked about again the next time" in terminal.until("you: ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    with at_terminal("chat", folder=folder) as terminal:
        before = terminal.until("nothing decides later: ")
        assert "user | refund order 404" in before
        assert "refund failed: A person has refused this call" in before
        assert "too late" in before
        assert 'Run refund(order_id="606")?' in before
        terminal.type("yes\n")
        assert "refund gave order 606 is paid back" in terminal.until("you: ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_cancelled_turn(folder: Path) -> None:
    """Ctrl-C cancels the turn and not the program: the conversation is as before, and the next message is answered."""
    with at_terminal("chat", "--agents", "slow:agent", folder=folder) as terminal:
        terminal.until("you: ")
        terminal.type("please wait\n")
        assert "Slow thinks: let me see" in terminal.until("I am ")
        terminal.type(CTRL_C)
        terminal.until("cancelled: none of it is in the conversation")
        terminal.until("you: ")
        assert messages(folder / "chatflow.db") == 0
        terminal.type("hello\n")
        terminal.until("I am here.")
        terminal.until("you: ")
        assert messages(folder / "chatflow.db") == 2
        terminal.until("Ctrl-C again leaves", pressing=CTRL_C)
        terminal.until("you: ")
        assert terminal.status(pressing=CTRL_C) == 0


def test_killed_turn(folder: Path) -> None:
    """After it was killed in the middle of a turn, the message is shown at the next start, and answered."""
    with at_terminal("chat", "--agents", "slow:agent", folder=folder) as terminal:
        terminal.until("you: ")
        terminal.type("please wait\n")
        terminal.until("I am ")
        terminal.process.kill()
        terminal.process.wait()
    (folder / "slow.py").write_text(SLOW.replace("sleep_forever", "lowlevel.checkpoint"))
    with at_terminal("chat", "--agents", "slow:agent", folder=folder) as terminal:
        came = terminal.until("I am here.")
        assert "this was not answered to its end, and goes on:\r\nyou: please wait\r\n" in came
        terminal.until("you: ")
        assert messages(folder / "chatflow.db") == 2
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def words(text: str) -> list[str]:
    """The words of a text that may not be broken."""
    return [word for word in re.sub("([好世界]),?", r" \1 ", text).split() if "x" not in word]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_wrapping(folder: Path, columns: int) -> None:
    """What is longer than a line goes on under where it began, live and in the history, and no word is broken."""
    with at_terminal("chat", "--agents", "slow:agent", folder=folder, COLUMNS=str(columns)) as terminal:
        terminal.until("you: ")
        terminal.type("long\n")
        answer = terminal.until("you: ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    with at_terminal("sessions", "show", "main", folder=folder, COLUMNS=str(columns)) as terminal:
        assert terminal.status() == 0
        history = ESCAPES.sub("", terminal.raw)
    live = answer[answer.rindex("Slow: ") :].splitlines()[:-2]
    told = history[history.index("  Slow | ") :].splitlines()
    assert len(live) > 2
    for lines, begin, margin in ((live, "Slow: ", " " * 6), (told, "  Slow | ", "       | ")):
        assert lines[0].startswith(begin)
        assert all(line.startswith(margin) for line in lines[1:])
        texts = [line[len(begin) :] for line in lines]
        assert max(map(cell_len, texts)) <= columns - len(begin)
        assert words(" ".join(texts)) == words(LONG)


def test_leaving_after_a_cancelled_turn(folder: Path) -> None:
    """After a Ctrl-C that has cancelled a turn, another one at the prompt leaves."""
    with at_terminal("chat", "--agents", "slow:agent", folder=folder) as terminal:
        terminal.until("you: ")
        terminal.type("please wait\n")
        terminal.until("I am ")
        terminal.type(CTRL_C)
        terminal.until("you: ")
        assert terminal.status(pressing=CTRL_C) == 0


def test_waiting_for_another_process(folder: Path) -> None:
    """Where another process has the conversation's turn, the chat waits for it, and Ctrl-C ends the wait alone."""
    path = folder / "chatflow.db"
    fill(path, order_404)
    with holding_a_turn(path), at_terminal("chat", "--session", "conversation-7", folder=folder) as terminal:
        assert "user | Where is order 404?" in terminal.until("you: ")
        terminal.type("hello\n")
        terminal.until("...")
        terminal.until("cancelled: none of it is in the conversation", pressing=CTRL_C)
        terminal.until("you: ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_failed_turn(folder: Path) -> None:
    """A turn that fails is a line, of which nothing is stored, and the conversation goes on."""
    with at_terminal("chat", "--agents", "slow:agent", folder=folder) as terminal:
        terminal.until("you: ")
        terminal.type("please fail\n")
        said = terminal.until("(none of it is in the conversation")
        assert "RuntimeError: the line is down" in said
        terminal.until("you: ")
        terminal.type("hello\n")
        terminal.until("I am here.")
        terminal.until("you: ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_what_follows_an_approval(folder: Path) -> None:
    """What an agent does after an approval is shown, and what it wants to have approved then is asked about."""
    with at_terminal("chat", "--agents", "slow:busy", folder=folder) as terminal:
        terminal.until("you: ")
        terminal.type("refund\n")
        terminal.until("nothing decides later: ")
        terminal.type("y\n")
        came = terminal.until("nothing decides later: ")
        for line in ("refund gave paid", "Busy calls note()", "note gave noted", "Run refund()?"):
            assert line in came
        terminal.type("y\n")
        assert "Busy: All done." in terminal.until("you: ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_approved_by_somebody_else(folder: Path) -> None:
    """A call that somebody else has approved meanwhile is not run again: its answer is shown."""

    async def approve(store: SQLiteSessionStore) -> None:
        session = await store.get("main")
        assert session is not None
        [call] = session.pending_approvals
        await Runner(offline_agent(), store, offline_engine()).approve("main", call.id)

    with at_terminal("chat", folder=folder) as terminal:
        terminal.until("you: ")
        terminal.type("refund order 404\n")
        terminal.until("nothing decides later: ")
        fill(folder / "chatflow.db", approve)
        terminal.type("y\n")
        came = terminal.until("you: ")
        assert "Scripted support: That is settled." in came
        assert "refund gave" not in came
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_approval_that_is_interrupted(folder: Path) -> None:
    """Ctrl-C where a person is asked decides nothing, and again it leaves; so does Ctrl-D."""
    with at_terminal("chat", folder=folder) as terminal:
        terminal.until("you: ")
        terminal.type("refund order 404\n")
        terminal.until("nothing decides later: ")
        terminal.until("Ctrl-C again leaves", pressing=CTRL_C)
        terminal.until("nothing decides later: ")
        terminal.until("it waits, and is asked about again the next time", pressing=CTRL_C)
        assert terminal.status() == 0


def test_encodings(folder: Path) -> None:
    """A terminal that has no such characters is shown something else, and what it sends does no harm."""
    with at_terminal("chat", folder=folder, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C") as terminal:
        terminal.until("you: ")
        terminal.type("¿qué?\n")
        terminal.until("You said: ")
        terminal.until("you: ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_tables(folder: Path) -> None:
    """On a terminal lists are tables with names above, in colours, and markup in them is text."""

    async def work(store: SQLiteSessionStore) -> None:
        await order_404(store)
        await said(store, "[red]x[/red]", "hi")

    fill(folder / "chatflow.db", work)
    with at_terminal("sessions", "list", folder=folder) as terminal:
        screen = terminal.until("conversation-7")
        assert terminal.status() == 0
    assert re.search(r"session +agent +last commit +metadata", screen)
    assert "[red]x[/red]" in screen
    assert "\x1b[1m" in terminal.raw


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("check",), "nothing is wrong"),
        (("turns", "pending"), "nothing waits"),
        (("turns", "dead", "--all-owners"), "nothing was given up"),
        (("sessions", "list", "--owner", "ann"), "there are no conversations of 'ann'"),
        (("upgrade", "chatflow.db"), "chatflow.db was of this version, and holds 1 conversation"),
    ],
)
def test_nothing_to_list(folder: Path, args: tuple[str, ...], said: str) -> None:
    """Where a table would be empty it is not there: only what that means is said."""
    fill(folder / "chatflow.db", order_404)
    with at_terminal(*args, folder=folder) as terminal:
        assert terminal.status() == 0
    lines = ESCAPES.sub("", terminal.raw).replace("\r", "\n").split("\n")
    assert [line for line in lines if line.strip() and not SPINNER.match(line)] == [said]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("check",), "nothing is wrong"),
        (("repair",), "nothing was wrong"),
        (("sessions", "purge", "--yes"), "deleted 0 conversations"),
        (("import", "openai-agents", "openai.db"), "1 of 1 conversations brought in"),
        (("sessions", "delete", "conversation-7"), "for good? [y/N]: "),
    ],
)
def test_work_on_a_terminal(folder: Path, args: tuple[str, ...], said: str) -> None:
    """Work that may take long is shown to go on, and ends with what it has come to; what can't be undone is asked."""
    fill(folder / "chatflow.db", order_404)
    write(folder / "openai.db", "conv-1", ORDER_404)
    with at_terminal(*args, folder=folder) as terminal:
        terminal.until(said)
        terminal.type("y\n")
        assert terminal.status() == 0


def test_interrupted(folder: Path) -> None:
    """A signal ends a command that is under way, or a program that writes lines: one line, and the shell's status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "chatflow", "chat", "--agents", "slow:agent"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("please wait\n")
    process.stdin.flush()
    assert process.stdout.readline() == "you: please wait\n"
    assert process.stdout.read(6) == "Slow: "
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "chatflow: interrupted"
    assert messages(folder / "chatflow.db") == 0
