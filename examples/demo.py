"""What ``make demo`` runs: webhook_bot.py under uvicorn, deliveries over HTTP, a restart, a check of each guarantee."""

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
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        """Start it, and stop it with SIGTERM; where something goes wrong in between, kill it."""
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
            process.terminate()
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

    def look_ups(self, order: str = "") -> int:
        """How often the tool was run, for this order or any."""
        return self.log().count(f"looking up order '{order}")


_numbers: Final = itertools.count(1)


def message(sender: str, text: str | None) -> Json:
    """A message as WhatsApp delivers it; without a text, a picture."""
    content = {"type": "image", "image": {"id": "1"}} if text is None else {"type": "text", "text": {"body": text}}
    return {"id": f"wamid.HBgL{next(_numbers):04}", "from": sender, "timestamp": f"{time.time():.0f}", **content}


async def deliver(client: httpx.AsyncClient, *messages: Json) -> list[Json]:
    """Post the messages in one delivery, with a status beside them, and return the replies."""
    values = ({"messages": messages}, {"statuses": [{"id": "wamid.sent", "status": "delivered"}]})
    changes = [{"field": "messages", "value": {"messaging_product": "whatsapp", **value}} for value in values]
    body = {"object": "whatsapp_business_account", "entry": [{"id": "1", "changes": changes}]}
    response = await client.post("/webhook", json=body)
    if response.status_code != httpx.codes.OK:
        raise DemoError(f"the server answered {response.status_code}: {response.text}")
    replies: list[Json] = response.json()["replies"]
    return replies


async def deliver_at_once(server: Server, client: httpx.AsyncClient, first: Json, second: Json) -> list[Json]:
    """Deliver *second* while the tool runs that *first* has led to."""
    replies: list[Json] = []
    before = server.look_ups()

    async def deliver_first() -> None:
        replies.extend(await deliver(client, first))

    async with anyio.create_task_group() as group:
        group.start_soon(deliver_first)
        await server.until(lambda: server.look_ups() > before or bool(replies))
        later = await deliver(client, second)
    return replies + later


async def stored(client: httpx.AsyncClient, phone: str) -> Json:
    """The conversation as the server reads it from its database."""
    conversation: Json = (await client.get(f"/conversations/{phone}")).raise_for_status().json()
    return conversation


def turns(conversation: Json) -> list[list[Json]]:
    """The messages, from each message of the user to the next one."""
    found: list[list[Json]] = []
    for each in conversation["messages"]:
        if each["role"] == "user":
            found.append([])
        found[-1].append(each)
    return found


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


def show(lines: list[str]) -> None:
    """Print lines of a conversation, without its middle if it is long."""
    more = len(lines) - SHOWN
    if more > 0:
        lines[SHOWN // 2 : SHOWN // 2 + more + 1] = [f"  ... {more + 1} more lines"]
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
            print(f"  {self.left_out} more checks are left out: they are about the script, and a model has answered.")


async def play(server: Server) -> int:
    """Deliver, restart, deliver, and show what became of it; returns how many guarantees did not hold."""
    checks = Checks()
    question = message(ANA, "Where is order 404?")
    twice = message(BEN, "Where is order 501?")
    third, fourth = message(BEN, "Where is order 502?"), message(BEN, "And where is order 503?")
    async with server.running() as client:
        print(f"A WhatsApp bot at {client.base_url} on one SQLite file; {MODEL or 'a script'} answers.", flush=True)

        (answer,) = await deliver(client, question)
        answered, ran = await stored(client, ANA), server.look_ups()
        (again,) = await deliver(client, question)
        checks.that(
            "delivered twice, one after the other: the stored answer, and no tool run again",
            again == answer | {"duplicate": True},
            answered == await stored(client, ANA),
            ran == server.look_ups(),
        )
        checks.that("the tool ran once for it, as the server's log counts", server.look_ups("404") == 1, scripted=True)

        batch = message(ANA, "Thanks!"), message(BEN, "Hello, this is Ben."), message(BEN, None)
        replies = await deliver(client, *batch)
        asked = {phone: [turn[0]["text"] for turn in turns(await stored(client, phone))] for phone in (ANA, BEN)}
        checks.that(
            "a batch of 3: each in its own conversation; a picture is answered politely, a status ignored",
            sorted(reply["id"] for reply in replies) == sorted(each["id"] for each in batch),
            asked == {ANA: ["Where is order 404?", "Thanks!"], BEN: ["Hello, this is Ben."]},
            [reply["text"] for reply in replies if reply["id"] == batch[2]["id"]] == ["Sorry, I can only read text."],
        )

        first, second = await deliver_at_once(server, client, twice, twice)
        matching = [turn for turn in turns(await stored(client, BEN)) if turn[0]["text"] == twice["text"]["body"]]
        checks.that(
            "delivered twice at once: one turn, and both get its answer",
            second == first | {"duplicate": True},
            not first["duplicate"],
            len(matching) == 1,
        )
        checks.that("the tool ran once for both", server.look_ups("501") == 1, scripted=True)

        replies = await deliver_at_once(server, client, third, fourth)
        last_two = turns(await stored(client, BEN))[-2:]
        checks.that(
            "two at once in one conversation: two whole turns, in the order they came",
            [turn[0]["text"] for turn in last_two] == [each["text"]["body"] for each in (third, fourth)],
            [turn[-1]["text"] for turn in last_two] == [reply["text"] for reply in replies],
        )

        (handed_over,) = await deliver(client, message(ANA, "I was charged twice for it. Can I have a refund?"))
        checks.that("a handoff: Billing answers", handed_over["agent"] == "Billing", scripted=True)
        before = {phone: await stored(client, phone) for phone in (ANA, BEN)}

    async with server.running() as client:
        after = {phone: await stored(client, phone) for phone in (ANA, BEN)}
        count = sum(len(each["messages"]) for each in after.values())
        agent = after[ANA]["agent"]
        checks.that(
            f"stopped and started: all {count} messages, metadata and agent ({agent}) as before",
            after == before,
            agent == handed_over["agent"],
        )
        ran = server.look_ups()
        (again,) = await deliver(client, question)
        checks.that(
            "delivered once more after the restart: still the stored answer",
            again == answer | {"duplicate": True},
            after[ANA] == await stored(client, ANA),
        )
        (followed,) = await deliver(client, message(ANA, "Which order was that again?"))
        checks.that(
            "the follow-up is answered by Billing from Support's tool result, with no tool run again",
            followed["agent"] == "Billing",
            "order 404: IN_TRANSIT" in followed["text"],
            ran == server.look_ups(),
            scripted=True,
        )
        end = {phone: await stored(client, phone) for phone in (ANA, BEN)}

    kept = len(before[ANA]["messages"])
    print(f"\nConversation {ANA}, read back from the file:")
    earlier, later = end[ANA]["messages"][:kept], end[ANA]["messages"][kept:]
    show([*transcript(earlier), "  -------- the server was stopped and started again --------", *transcript(later)])
    print(f"\nConversation {BEN}:")
    show([*transcript(end[BEN]["messages"])])
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
