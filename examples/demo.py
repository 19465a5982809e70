"""What ``make demo`` runs: webhook_bot.py under uvicorn, deliveries over HTTP, a kill, a check of each guarantee."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import httpx

MODEL: Final = os.environ.get("MODEL")
ANA: Final = "15550199"
BEN: Final = "15550142"
PATIENCE: Final = 60
"""Seconds until the demo gives up waiting for the server."""
COLUMNS: Final = 100
SHOWN: Final = 11
"""Lines of a conversation that are shown; a model may say more than the script does."""

Json = dict[str, Any]


class DemoError(Exception):
    """The demo can't go on; the message says why."""


class Server:
    """The bot on a free port of this machine. Its log tells what it did, outside of its database."""

    def __init__(self, folder: Path) -> None:
        self._database: Final = folder / "chat_sessions.db"
        self._log: Final = folder / "server.log"
        self._log.touch()

    @contextlib.asynccontextmanager
    async def running(self, *, end: signal.Signals = signal.SIGTERM) -> AsyncIterator[httpx.AsyncClient]:
        """Start it, and end it with that signal; where something goes wrong in between, kill it."""
        command = [sys.executable, "-m", "uvicorn", "webhook_bot:app", "--app-dir", str(Path(__file__).parent)]
        options = ["--port", "0", "--workers", "1", "--log-level", "info", "--no-use-colors"]
        env = os.environ | {"CHAT_DB": str(self._database), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        start = len(self.log())
        with self._log.open("ab") as log:
            process = await anyio.open_process(
                [*command, *options], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:

            def address() -> re.Match[str] | None:
                return re.search(r"running on (http://\S+)", self.log()[start:])

            await self.until(lambda: address() is not None or process.returncode is not None)
            found = address()
            if found is None:
                raise DemoError("the server did not start")
            async with httpx.AsyncClient(base_url=found[1], timeout=PATIENCE, trust_env=False) as client:
                yield client
            process.send_signal(end)
            await self.until(lambda: process.returncode is not None)
        finally:
            if process.returncode is None:
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something can be seen to hold."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                raise DemoError(f"what the server should do had not happened after {PATIENCE} seconds")
            await anyio.sleep(0.01)

    def log(self) -> str:
        """All it has logged, in all its runs."""
        return self._log.read_text(errors="replace")

    def sent(self, answered: Json) -> int:
        """How often an answer to this message was sent to its sender."""
        return self.log().count(f"to {answered['from']}, answering {answered['id']}: ")

    async def answers(self, *messages: Json) -> None:
        """Wait until each of the messages was answered."""
        await self.until(lambda: all(map(self.sent, messages)))

    def look_ups(self, order: str = "") -> int:
        """How often the tool was run, for this order or any."""
        return self.log().count(f"looking up order '{order}")


_numbers: Final = itertools.count(1)


def message(sender: str, text: str | None) -> Json:
    """A message as WhatsApp delivers it; without a text, a picture."""
    content = {"type": "image", "image": {"id": "1"}} if text is None else {"type": "text", "text": {"body": text}}
    return {"id": f"wamid.HBgL{next(_numbers):04}", "from": sender, "timestamp": f"{time.time():.0f}", **content}


QUESTION: Final = message(ANA, "Where is order 404?")
THANKS: Final = message(ANA, "Thanks!")
HELLO: Final = message(BEN, "Hello, this is Ben.")
PICTURE: Final = message(BEN, None)
TWICE: Final = message(BEN, "Where is order 501?")
THIRD: Final = message(BEN, "Where is order 502?")
FOURTH: Final = message(BEN, "And where is order 503?")
REFUND: Final = message(ANA, "I was charged twice for it. Can I have a refund?")
FOLLOW_UP: Final = message(ANA, "Which was it?")
CUT_OFF: Final = message(BEN, "And where is order 504?")
BEHIND: Final = message(BEN, "Thank you!")
ALL: Final = (QUESTION, THANKS, HELLO, PICTURE, TWICE, THIRD, FOURTH, REFUND, FOLLOW_UP, CUT_OFF, BEHIND)


async def deliver(client: httpx.AsyncClient, *messages: Json) -> list[str]:
    """Post the messages in one delivery, with a status beside them; returns what each of them was: new, duplicate."""
    values = ({"messages": messages}, {"statuses": [{"id": "wamid.sent", "status": "delivered"}]})
    changes = [{"field": "messages", "value": {"messaging_product": "whatsapp", **value}} for value in values]
    body = {"object": "whatsapp_business_account", "entry": [{"id": "1", "changes": changes}]}
    response = await client.post("/webhook", json=body)
    if response.status_code != httpx.codes.OK:
        raise DemoError(f"the server answered {response.status_code}: {response.text}")
    outcomes: Json = response.json()
    return [outcomes[each["id"]] for each in messages]


async def deliver_twice_at_once(client: httpx.AsyncClient, twice: Json) -> list[str]:
    """Post a message in two deliveries at the same time; returns what it was in each."""
    outcomes: list[str] = []

    async def once() -> None:
        outcomes.extend(await deliver(client, twice))

    async with anyio.create_task_group() as group:
        group.start_soon(once)
        group.start_soon(once)
    return outcomes


async def stored(client: httpx.AsyncClient, phone: str) -> Json:
    """The conversation as the server reads it from its database."""
    conversation: Json = (await client.get(f"/conversations/{phone}")).raise_for_status().json()
    return conversation


async def both(client: httpx.AsyncClient) -> dict[str, Json]:
    """Both conversations, by their phone."""
    return {phone: await stored(client, phone) for phone in (ANA, BEN)}


def turns(conversation: Json) -> list[list[Json]]:
    """The messages, from each message of the user to the next one."""
    found: list[list[Json]] = []
    for each in conversation["messages"]:
        if each["role"] == "user":
            found.append([])
        found[-1].append(each)
    return found


def texts(conversation: Json) -> list[str]:
    """What the user has said."""
    return [turn[0]["text"] for turn in turns(conversation)]


def is_answered(turn: list[Json]) -> bool:
    """Whether the turn ends with an answer."""
    return turn[-1]["role"] == "model" and bool(turn[-1]["text"])


def transcript(messages: list[Json]) -> Iterator[str]:
    """The messages as lines, a call and its result in one."""
    results = (result["content"] for each in messages for result in each["results"])
    for each in messages:
        if each["text"]:
            yield f"  {each['name']:<8} {' '.join(each['text'].split())}"
        for call in each["calls"]:
            arguments = ", ".join(str(value) for value in call["args"].values())
            result = next(results)
            shown = ", ".join(f"{key}={value}" for key, value in result.items()) if isinstance(result, dict) else result
            yield f"  {each['name']:<8} [{call['name']}({arguments}): {shown}]"


def show(messages: list[Json], end: int, how: str) -> None:
    """Print a conversation, without its middle if it is long; after *end* messages the server ended, and *how*."""
    lines = [*transcript(messages[:end]), f"  -------- {how} --------", *transcript(messages[end:])]
    more = len(lines) - SHOWN
    if more > 0:
        lines[SHOWN // 2 - 1 : SHOWN // 2 + more] = [f"  ... {more + 1} more lines"]
    for line in lines:
        print(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}...")


class Checks:
    """What was guaranteed, and whether it held."""

    def __init__(self) -> None:
        self._lines: Final[list[str]] = []
        self.failed = 0
        self.left_out = 0

    def that(self, claim: str, *facts: bool, scripted: bool = False) -> None:
        """Note a claim, which holds if all the facts do; *scripted* ones only if the script has answered."""
        if scripted and MODEL:
            self.left_out += 1
            return
        self.failed += not all(facts)
        self._lines.append(f"  {'ok  ' if all(facts) else 'FAIL'}  {claim}")

    def show(self) -> None:
        """Print them."""
        print("\nWhat was guaranteed, and checked:", *self._lines, sep="\n")
        if self.left_out:
            print(f"  {self.left_out} more checks are left out: they hang on the script, and a model has answered.")


async def deliver_in_every_way(server: Server, client: httpx.AsyncClient, checks: Checks) -> None:
    """Deliver messages twice, in a batch, at once, and one that leads to another agent."""
    first = await deliver(client, QUESTION)
    await server.answers(QUESTION)
    answered, ran = await stored(client, ANA), server.look_ups()
    again = await deliver(client, QUESTION)
    checks.that(
        "delivered twice, one after the other: known, nothing changes, and no tool is run again",
        first + again == ["new", "duplicate"],
        answered == await stored(client, ANA),
        ran == server.look_ups(),
    )

    batch = await deliver(client, THANKS, HELLO, PICTURE)
    await server.answers(THANKS, HELLO, PICTURE)
    checks.that(
        "a batch of 3: each in its own conversation; a picture is answered politely, a status ignored",
        batch == ["new"] * 3,
        texts(await stored(client, ANA)) == ["Where is order 404?", "Thanks!"],
        texts(await stored(client, BEN)) == ["Hello, this is Ben."],
        f"answering {PICTURE['id']}: 'Sorry, I can only read text.'" in server.log(),
    )

    outcomes = await deliver_twice_at_once(client, TWICE)
    await server.answers(TWICE)
    checks.that(
        "delivered twice at once: one turn",
        sorted(outcomes) == ["duplicate", "new"],
        texts(await stored(client, BEN))[1:] == ["Where is order 501?"],
    )
    checks.that(
        "of a message delivered twice the tool runs once, as the server's log counts",
        server.look_ups("404") == server.look_ups("501") == 1,
        scripted=True,
    )

    ran = server.look_ups()
    await deliver(client, THIRD)
    await server.until(lambda: server.look_ups() > ran or server.sent(THIRD) > 0)
    await deliver(client, FOURTH)
    await server.answers(THIRD, FOURTH)
    last_two = turns(await stored(client, BEN))[2:]
    checks.that(
        "two at once in one conversation: two whole turns, in the order they came",
        [turn[0]["text"] for turn in last_two] == ["Where is order 502?", "And where is order 503?"],
        all(map(is_answered, last_two)),
    )

    await deliver(client, REFUND)
    await server.answers(REFUND)


async def go_on(server: Server, client: httpx.AsyncClient, checks: Checks, before: dict[str, Json]) -> None:
    """Look at what is there after a restart, and go on with it."""
    after = await both(client)
    count = sum(len(each["messages"]) for each in after.values())
    checks.that(
        f"stopped and started: all {count} messages, metadata and agent ({after[ANA]['agent']}) as before",
        after == before,
    )
    ran = server.look_ups()
    again = await deliver(client, QUESTION)
    checks.that(
        "delivered once more after the restart: still known, and nothing changes",
        again == ["duplicate"],
        after[ANA] == await stored(client, ANA),
    )
    await deliver(client, FOLLOW_UP)
    await server.answers(FOLLOW_UP)
    last_two = turns(await stored(client, ANA))[2:]
    checks.that(
        "a handoff holds: Billing answers after it too, from Support's tool result, with no tool run",
        [turn[-1]["name"] for turn in last_two] == ["Billing", "Billing"],
        "order 404: IN_TRANSIT" in last_two[-1][-1]["text"],
        ran == server.look_ups(),
        scripted=True,
    )


async def play(server: Server) -> int:
    """Deliver, restart, kill, and show what became of it; returns how many guarantees did not hold."""
    checks = Checks()
    async with server.running() as client:
        print(f"A WhatsApp bot at {client.base_url} on one SQLite file; {MODEL or 'a script'} answers.", flush=True)
        await deliver_in_every_way(server, client, checks)
        before = await both(client)

    async with server.running(end=signal.SIGKILL) as client:
        await go_on(server, client, checks, before)
        ran = server.look_ups()
        acknowledged = await deliver(client, CUT_OFF, BEHIND)
        await server.until(lambda: server.look_ups() > ran or server.sent(CUT_OFF) > 0)
        # A model may answer without the tool; then there is no call to cut off, and less is checked.
        in_a_call = server.look_ups() > ran and not server.sent(CUT_OFF)

    async with server.running() as client:
        await server.answers(CUT_OFF, BEHIND)
        end = await both(client)
        checks.that(
            "killed in the middle of a tool call: what it had acknowledged is answered, in order",
            in_a_call,
            acknowledged == ["new", "new"],
            end[BEN]["messages"][: len(before[BEN]["messages"])] == before[BEN]["messages"],
            texts(end[BEN])[4:] == ["And where is order 504?", "Thank you!"],
            all(map(is_answered, turns(end[BEN]))),
            scripted=not in_a_call,
        )
        checks.that(
            "the call that was cut off, and it alone, was made again: its tool is idempotent",
            [server.look_ups(order) for order in ("404", "501", "502", "503", "504")] == [1, 1, 1, 1, 2],
            scripted=True,
        )
        checks.that(
            f"in all of this, each of the {len(ALL)} messages got one answer",
            [server.sent(each) for each in ALL] == [1] * len(ALL),
            scripted=not in_a_call,
        )

    print(f"\nConversation {ANA}, read back from the file:")
    show(end[ANA]["messages"], len(before[ANA]["messages"]), "the server was stopped and started again")
    print(f"\nConversation {BEN}:")
    how = "killed while a tool was at work" if in_a_call else "killed"
    show(end[BEN]["messages"], len(before[BEN]["messages"]) + 1, f"the server was {how}, and started again")
    checks.show()
    return checks.failed


def reasons(error: BaseException) -> Iterator[str]:
    """What went wrong, out of the groups it came in."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from reasons(each)
    else:
        yield f"{type(error).__name__}: {error}"


def main() -> int:
    """Run the demo; returns its exit status."""
    # Told to stop, it ends as with Ctrl-C: the server first.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="chatflow-demo-") as folder:
        server = Server(Path(folder))
        try:
            return 1 if anyio.run(play, server) else 0
        except KeyboardInterrupt:
            print("\nInterrupted; the server has ended.")
            return 130
        except (DemoError, httpx.HTTPError, ExceptionGroup) as error:
            print(f"\nThe demo failed: {'; '.join(reasons(error))}\nThe end of the server's log:")
            print(*(f"  {line}" for line in server.log().splitlines()[-20:]), sep="\n")
            return 1


if __name__ == "__main__":
    sys.exit(main())
