"""What a turn costs in chatflow, beside hand-written sqlite3 that does the same work in the same run.

python benchmarks/turns.py [--rounds 5] [--systems floor-full sqlite-file] ...

A turn is four messages (user, model with a tool call, its result, reply) into a window of 40 turns that is full, so
that the oldest turn goes. benchmarks/README.md says how to read the tables.

Each system runs in a process of its own, one at a time, a round of one after a round of the other: they share the
machine's good and bad moments, and no garbage. The processes run this same script, which is why it is in one piece.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import datetime as dt
import gc
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import attrs
import orjson

HERE: Final = Path(__file__).parent
sys.path.append(str(HERE.parent))

from chatflow.core.agent import Agent  # noqa: E402
from chatflow.core.messages import Message, Role, ToolCall, ToolResult  # noqa: E402
from chatflow.core.records import Key, Place, Snapshot, Ticket  # noqa: E402
from chatflow.core.session import SessionContext  # noqa: E402
from chatflow.core.store import BaseSessionStore  # noqa: E402
from chatflow.sqlite.commit import WriteCommit  # noqa: E402
from chatflow.sqlite.store import SQLiteSessionStore  # noqa: E402
from tests.backends import BACKENDS, Backend  # noqa: E402

WINDOW: Final = 40
ALONE: Final = 400
"""Turns in one measurement of one conversation."""
TOGETHER: Final = 1280
"""Turns in one measurement of many conversations, all of them together."""
BEAT: Final = 0.001
"""Seconds the heartbeat sleeps."""
LEVELS: Final = ("OFF", "NORMAL", "FULL", "EXTRA")
"""What the numbers of `PRAGMA synchronous` mean."""

QUESTION: Final = "Where is my order? I was told that it would come on Monday, and nobody rang. " * 3
FOUND: Final[dict[str, Any]] = {
    "status": "in transit",
    "carrier": "DHL",
    "events": [{"at": "2025-03-01T08:00:00Z", "place": f"Depot {number}"} for number in range(4)],
}
ANSWER: Final = "Your order left the depot this morning and is out for delivery; it will be with you by six. " * 4


# --- the systems: each takes a turn in a conversation, by number -----------------------------------------------------


class Handwritten:
    """The obvious code: sqlite3 on the event loop, a transaction a turn."""

    def __init__(self, folder: Path, conversations: int, level: str) -> None:
        self._connection = sqlite3.connect(folder / "floor.db", isolation_level=None)
        for statement in (
            "PRAGMA journal_mode=WAL",
            f"PRAGMA synchronous={level}",
            "CREATE TABLE sessions (id TEXT PRIMARY KEY, agent TEXT NOT NULL, updated_at TEXT NOT NULL)",
            "CREATE TABLE messages (session TEXT, place INT, body TEXT, PRIMARY KEY (session, place)) WITHOUT ROWID",
        ):
            self._connection.execute(statement)
        self._ends = [0] * conversations

    async def fill(self, conversation: int) -> None:
        """Fill the window, in one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        for _ in range(WINDOW):
            self._write(conversation)
        self._connection.execute("COMMIT")

    async def turn(self, conversation: int) -> None:
        """Take one turn; nothing else runs meanwhile."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._write(conversation)
        self._connection.execute("COMMIT")

    def _write(self, conversation: int) -> None:
        name, end, now = f"conversation {conversation}", self._ends[conversation], dt.datetime.now(dt.UTC).isoformat()
        call, tool = f"call_{end}", "find_order"
        messages: tuple[dict[str, Any], ...] = (
            {"role": "user", "content": QUESTION, "timestamp": now},
            {"role": "model", "tool_calls": [{"id": call, "name": tool, "args": {"order": end}}], "timestamp": now},
            {
                "role": "tool",
                "tool_results": [{"tool_call_id": call, "name": tool, "content": FOUND}],
                "timestamp": now,
            },
            {"role": "model", "content": ANSWER, "agent": "assistant", "timestamp": now},
        )
        self._connection.execute(
            "INSERT INTO sessions VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET updated_at = excluded.updated_at",
            (name, "assistant", now),
        )
        self._connection.executemany(
            "INSERT INTO messages VALUES (?, ?, ?)",
            [(name, end + index, orjson.dumps(message).decode()) for index, message in enumerate(messages)],
        )
        self._connection.execute("DELETE FROM messages WHERE session = ? AND place < ?", (name, end + 4 - 4 * WINDOW))
        self._ends[conversation] = end + 4

    async def commit_level(self) -> str:
        """What its commits run at."""
        return LEVELS[self._connection.execute("PRAGMA synchronous").fetchone()[0]]

    async def close(self) -> None:
        """Close the file."""
        self._connection.close()


class Chatflow:
    """One of the stores that the tests run on, with sessions that are at hand."""

    def __init__(self, folder: Path, conversations: int, backend: Backend) -> None:
        self._store: BaseSessionStore = backend.make(folder)
        self._sessions: dict[int, SessionContext] = {}
        self._calls = 0

    async def fill(self, conversation: int) -> None:
        """Fill the window, in one turn."""
        session = await self._store.get_or_create(f"conversation {conversation}", Agent("assistant"))
        self._sessions[conversation] = session
        async with session.turn():
            for _ in range(WINDOW):
                await self._say(session)

    async def turn(self, conversation: int) -> None:
        """Take one turn."""
        session = self._sessions[conversation]
        async with session.turn():
            await self._say(session)

    async def _say(self, session: SessionContext) -> None:
        self._calls += 1
        call, tool = f"call_{self._calls}", "find_order"
        await session.add_message(Message(Role.USER, QUESTION))
        calls = [ToolCall(id=call, name=tool, args={"order": self._calls})]
        await session.add_message(Message(Role.MODEL, tool_calls=calls, agent_name="assistant"))
        results = [ToolResult(tool_call_id=call, name=tool, content=FOUND)]
        await session.add_message(Message(Role.TOOL, tool_results=results))
        await session.add_message(Message(Role.MODEL, ANSWER, agent_name="assistant"))

    async def commit_level(self) -> str:
        """What the commit of a turn runs at: asked on the writing connection, in the commit's own transaction.

        Inside a transaction it can't change any more, so COMMIT runs at the same.
        """
        if not isinstance(self._store, SQLiteSessionStore) or self._store._database.location.path is None:  # noqa: SLF001
            return "in memory"
        database = self._store._database  # noqa: SLF001  # nobody but a benchmark needs to look there
        write, levels = database.write, set[str]()

        async def write_and_ask(operation: Callable[[sqlite3.Connection], Any], *, durable: bool) -> Any:
            def ask(connection: sqlite3.Connection) -> Any:
                result = operation(connection)
                if durable:
                    levels.add(LEVELS[connection.execute("PRAGMA synchronous").fetchone()[0]])
                return result

            return await write(ask, durable=durable)

        with patch.object(database, "write", write_and_ask):
            await self.turn(0)
        (level,) = levels
        return level

    async def close(self) -> None:
        """Close the store."""
        await self._store.aclose()


class WithoutPlaces(SQLiteSessionStore):
    """A store whose turns have no row: nobody's place is kept, nothing is beaten, and no commit is fenced.

    It shows what the row costs, and is good for nothing else.
    """

    async def queue_turn(self, ticket: Ticket) -> Place:
        """Every turn runs at once, on what its session has seen."""
        await asyncio.sleep(0)
        return Place(turn_id=0, running=True, attempt=1, behind_own=True, session=None)

    async def look_at_turn(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> None:
        """It is always there."""
        await asyncio.sleep(0)

    async def _write(self, operation: Callable[..., Any], *args: Any, durable: bool = True) -> Any:
        if isinstance(operation, WriteCommit):
            operation = CommitWithoutRow(**attrs.asdict(operation, recurse=False))
        return await super()._write(operation, *args, durable=durable)


class CommitWithoutRow(WriteCommit):
    """The same commit, but for the row."""

    def _end_turn(self, connection: sqlite3.Connection) -> tuple[tuple[int, int | None] | None, bool]:
        return (0, None), False


System = Handwritten | Chatflow
SYSTEMS: Final[dict[str, Callable[[Path, int], System]]] = {
    "floor-full": lambda folder, conversations: Handwritten(folder, conversations, "FULL"),
    "floor-normal": lambda folder, conversations: Handwritten(folder, conversations, "NORMAL"),
    **{backend.name: partial(Chatflow, backend=backend) for backend in BACKENDS},
    "no-places": partial(Chatflow, backend=Backend("no-places", lambda folder: WithoutPlaces(folder / "chat.db"))),
}
TITLES: Final = {
    "floor-full": "sqlite3 by hand, FULL (the floor)",
    "floor-normal": "sqlite3 by hand, NORMAL",
    "sqlite-file": "chatflow, file",
    "no-places": "the same without place and beat",
    "sqlite-memory": 'chatflow, ":memory:"',
    "memory": "chatflow, SessionStore",
}


# --- in a process of its own: one system is measured, as often as it is asked for ------------------------------------


class Worker:
    """Fills a system with conversations, then measures it."""

    def __init__(self, name: str, folder: Path, conversations: int, added: int) -> None:
        self._folder = folder
        self._added = added
        self._conversations = conversations
        self._system = SYSTEMS[name](folder, conversations)
        self._count: Callable[[], int] = getattr(ctypes.CDLL(None), "slow_fsync_count", lambda: 0)

    async def set_up(self) -> dict[str, Any]:
        """Fill it, look at what its promises are, and at what an fsync costs here."""
        for conversation in range(self._conversations):
            await self._system.fill(conversation)
        for conversation in range(self._conversations):
            await self._system.turn(conversation)
        gc.collect()  # filling it is not what is measured
        fsync = self._fsync_microseconds()
        if fsync < self._added:
            raise SystemExit(f"an fsync takes {fsync:.0f} µs: the {self._added} µs that are to be added are not")
        return {"commit_level": await self._system.commit_level(), "fsync_us": fsync}

    def _fsync_microseconds(self) -> float:
        took: list[float] = []
        with (self._folder / "fsync").open("wb") as file:
            for _ in range(50):
                file.write(bytes(4096))
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                took.append((time.perf_counter() - began) * 1e6)
        return statistics.median(took)

    async def measure(self, together: int) -> dict[str, float]:
        """The turns of *together* conversations at once: how many, how long, and what they take."""
        latencies: list[float] = []
        fsyncs, cpu, began = self._count(), time.process_time(), time.perf_counter()
        await self._talk_together(together, latencies)
        took = time.perf_counter() - began
        return {
            "turns_per_second": len(latencies) / took,
            "median_us": statistics.median(latencies) * 1e6,
            "p99_us": percentile(latencies, 99) * 1e6,
            "cpu_us": (time.process_time() - cpu) / len(latencies) * 1e6,
            "fsyncs_per_1000": (self._count() - fsyncs) / len(latencies) * 1e3,
        }

    async def gaps(self, together: int) -> dict[str, float]:
        """The same work beside a heartbeat; of no conversations, what the machine adds to a loop with nothing to do."""
        heartbeat = Heartbeat()
        beating = asyncio.create_task(heartbeat.beat())
        await (self._talk_together(together, []) if together else asyncio.sleep(0.5))
        # One beat more: a gap that lasts to the end is noted at its end.
        await asyncio.sleep(2 * BEAT)
        beating.cancel()
        return heartbeat.figures()

    async def _talk_together(self, together: int, latencies: list[float]) -> None:
        each = (ALONE if together == 1 else TOGETHER) // together
        async with asyncio.TaskGroup() as group:
            for number in range(together):
                group.create_task(self._talk(number, each, latencies))

    async def _talk(self, conversation: int, turns: int, latencies: list[float]) -> None:
        for _ in range(turns):
            began = time.perf_counter()
            # The loop's other work comes first, as it does for a message that has just been received.
            await asyncio.sleep(0)
            await self._system.turn(conversation)
            latencies.append(time.perf_counter() - began)

    async def close(self) -> None:
        """Close the system."""
        await self._system.close()


class Heartbeat:
    """How late each sleep of a millisecond ends: so long the loop did other things, or collected garbage."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._late_without_collections: list[float] = []
        self._collecting = 0.0
        self._began = 0.0

    async def beat(self) -> None:
        """Go on until cancelled."""
        gc.callbacks.append(self._note_collection)
        try:
            while True:
                self._collecting = 0.0
                began = time.perf_counter()
                await asyncio.sleep(BEAT)
                late = time.perf_counter() - began - BEAT
                self._late.append(late)
                self._late_without_collections.append(late - self._collecting)
        finally:
            gc.callbacks.remove(self._note_collection)

    def _note_collection(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._collecting += time.perf_counter() - self._began

    def figures(self) -> dict[str, float]:
        """The gaps, also without the time in them that went to collecting garbage."""
        return {
            "gap_p99_ms": percentile(self._late, 99) * 1e3,
            "gap_max_ms": max(self._late) * 1e3,
            "gap_without_collections_max_ms": max(self._late_without_collections) * 1e3,
        }


def percentile(values: list[float], percent: int) -> float:
    """The smallest of *values* that *percent* of them don't exceed."""
    ordered = sorted(values)
    return ordered[(len(ordered) * percent + 99) // 100 - 1]


def work(arguments: argparse.Namespace) -> None:
    """Answer requests, a line each, until there are no more."""
    worker = Worker(arguments.worker, arguments.folder, max(arguments.together), arguments.delays[0])
    with asyncio.Runner() as runner:
        print(json.dumps(runner.run(worker.set_up())), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            answer = worker.measure if request["what"] == "turns" else worker.gaps
            print(json.dumps(runner.run(answer(request["together"]))), flush=True)
        runner.run(worker.close())


# --- in the process that was started: the systems take turns ---------------------------------------------------------


class Measured:
    """A system's process, and what it has measured."""

    def __init__(self, name: str, folder: Path, shim: Path | None, added: int, together: list[int]) -> None:
        self.name = name
        self.rounds: dict[int, list[dict[str, float]]] = {number: [] for number in together}
        self.idle: list[dict[str, float]] = []
        folder.mkdir()
        environment = dict(os.environ)
        if shim is not None:
            environment |= {"LD_PRELOAD": str(shim), "SLOW_FSYNC_MICROSECONDS": str(added)}
        options = ["--worker", name, "--folder", str(folder), "--delays", str(added)]
        self._process = subprocess.Popen(  # noqa: S603  # this very script
            [sys.executable, __file__, *options, "--together", *map(str, together)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} could not be measured; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, what: str, together: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, "together": together}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def take_round(self) -> None:
        """Measure everything once: the turns without a heartbeat, the gaps with one."""
        for together, rounds in self.rounds.items():
            rounds.append(self._ask("turns", together) | self._ask("gaps", together))
        self.idle.append(self._ask("gaps", 0))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compile_shim(folder: Path) -> Path | None:
    """The shim that slows fsync down, or None where it can't be had."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not sys.platform.startswith("linux") or compiler is None:
        print("No slowed fsync, no count of fsyncs: that takes Linux and a C compiler (cc, or what CC names).\n")
        return None
    shim = folder / "slow_fsync.so"
    subprocess.run(  # noqa: S603  # the user's own compiler
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(shim), str(HERE / "slow_fsync.c"), "-ldl"], check=True
    )
    return shim


def compare(arguments: argparse.Namespace, added: int, shim: Path | None, folder: Path) -> list[Measured]:
    """Measure all systems with *added* microseconds to each fsync."""
    systems: list[Measured] = []
    try:
        for name in arguments.systems:
            measured = Measured(name, folder / f"{name}-{added}", shim, added, arguments.together)
            systems.append(measured)  # at once, so that it is closed if the next one fails
        for number in range(arguments.rounds):
            print(f"  {added} µs added to each fsync: round {number + 1} of {arguments.rounds}", file=sys.stderr)
            # Not always in the same order, so that none always follows the same one.
            for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
                system.take_round()
    finally:
        for system in systems:
            system.close()
    if shim is not None:
        refuse_weaker_promise(systems)
    return systems


def refuse_weaker_promise(systems: list[Measured]) -> None:
    """Stop where a turn at a time was not flushed a turn at a time: its figures would be another promise's."""
    for system in systems:
        alone = system.rounds.get(1, [])
        if system.facts["commit_level"] == "FULL" and any(each["fsyncs_per_1000"] < 1000 for each in alone):
            raise SystemExit(f"{system.name} says FULL and has flushed fewer times than it has committed")


COLUMNS: Final = (
    ("median ms", 10, "median_us", 1e-3, ".2f"),
    ("p99 ms", 8, "p99_us", 1e-3, ".2f"),
    ("CPU µs", 8, "cpu_us", 1, ".0f"),
    ("fsyncs/1000", 12, "fsyncs_per_1000", 1, ".0f"),
    ("gap p99 ms", 11, "gap_p99_ms", 1, ".1f"),
    ("longest less GC", 16, "gap_without_collections_max_ms", 1, ".1f"),
)


def show(systems: list[Measured], together: int, floor: Measured | None) -> None:
    """Print one table: medians of the rounds, and of some the lowest and the highest too."""
    heads = "".join(f"{head:>{width}}" for head, width, *_ in COLUMNS)
    print(f"  {'':34}{'turns/s':>8}{'÷ floor':>22}{heads}{'longest gap ms':>24}")
    for system in systems:
        rounds = system.rounds[together]
        speeds = [each["turns_per_second"] for each in rounds]
        ratio = "-"
        if floor is not None:
            beside = [each["turns_per_second"] for each in floor.rounds[together]]
            ratio = spread([speed / other for speed, other in zip(speeds, beside, strict=True)], ".2f")
        cells = [
            f"{statistics.median(each[name] for each in rounds) * factor:{width}{form}}"
            for _, width, name, factor, form in COLUMNS
        ]
        gap = spread([each["gap_max_ms"] for each in rounds], ".1f")
        print(
            f"  {TITLES.get(system.name, system.name):34}{statistics.median(speeds):8,.0f}{ratio:>22}"
            f"{''.join(cells)}{gap:>24}"
        )


def show_cost_of_places(systems: list[Measured], together: list[int]) -> None:
    """Print what a turn costs with its place and its beat, over the same commit without them, in the same rounds."""
    found = {system.name: system for system in systems}
    if not {"sqlite-file", "no-places"} <= found.keys():
        return
    for number in together:
        pairs = list(zip(found["sqlite-file"].rounds[number], found["no-places"].rounds[number], strict=True))
        median, cpu = (
            spread([with_row[name] / without[name] for with_row, without in pairs], ".2f")
            for name in ("median_us", "cpu_us")
        )
        print(f"  Place and beat, at {number}: a turn takes {median} times as long, and {cpu} times the CPU.")


def spread(values: list[float], form: str) -> str:
    """The median, and from where to where the values go."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def machine(folder: Path) -> dict[str, Any]:
    """What was measured on, and with what."""
    processor, file_system = platform.processor(), "unknown"
    if sys.platform.startswith("linux"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(": ")[1] for line in lines if line.startswith("model name")), processor)
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        inside = [(len(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
        file_system = max(inside)[1] if inside else file_system
    return {
        "processor": processor,
        "processors": os.cpu_count(),
        "system": platform.platform(),
        "file_system": file_system,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{name: metadata.version(name) for name in ("aiosqlite", "anyio", "attrs", "cattrs", "orjson")},
        "load_before": os.getloadavg()[0],
    }


def parse() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["floor-full", "floor-normal", "sqlite-file", "no-places", "sqlite-memory", "memory"]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=default)
    parser.add_argument("--together", nargs="+", type=int, default=[1, 64, 256], help="conversations at once")
    parser.add_argument("--delays", nargs="+", type=int, default=[0, 1000], help="microseconds added to each fsync")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=HERE.parent / "build" / "turns.json", help="where to save it all")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print and save."""
    arguments = parse()
    if arguments.worker:
        work(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name).resolve()
        about = machine(folder)
        print(", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
        if about["file_system"] in {"tmpfs", "ramfs", "overlay"}:
            print(f"{folder} is on {about['file_system']}: an fsync may cost nothing. --folder names another.\n")
        shim = compile_shim(folder)
        saved: list[dict[str, Any]] = []
        for added in arguments.delays if shim is not None else [0]:
            systems = compare(arguments, added, shim, folder)
            floor = next((system for system in systems if system.name == "floor-full"), None)
            levels = ", ".join(f"{system.name} {system.facts['commit_level']}" for system in systems)
            fsync = statistics.median(system.facts["fsync_us"] for system in systems)
            idle = [each["gap_max_ms"] for system in systems for each in system.idle]
            print(f"{added} µs added to each fsync, which then takes {fsync:,.0f} µs. Commits run at: {levels}.")
            print(f"An idle loop's longest gap in 0.5 s, in between: {spread(idle, '.1f')} ms.")
            for together in arguments.together:
                print(f"\n  {together} conversation{'s at once' if together > 1 else ', a turn after the other'}")
                show(systems, together, floor)
            show_cost_of_places(systems, arguments.together)
            print()
            saved += [
                {"added_us": added, "system": each.name, "idle": each.idle, "together": each.rounds} | each.facts
                for each in systems
            ]
    about["load_after"] = os.getloadavg()[0]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"about": about, "command": sys.argv, "measured": saved}, indent=1))
    print(f"Load of the machine: {about['load_before']:.1f} before, {about['load_after']:.1f} after.")
    print(f"All rounds are in {arguments.json}.")


if __name__ == "__main__":
    main()
