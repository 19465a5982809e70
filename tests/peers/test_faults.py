"""Each fault of another library that chatflow does not have, as a scenario that any `Subject` can be put through.

A docstring names the row of the comparison. `test_chatflow_agent.py` puts chatflow-agent through those that it fails,
so that each is known to bite.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import sqlite3
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from tests.peers.deliveries import deliver
from tests.peers.ours import Chatflow
from tests.peers.subject import AGENT, Call, Model, Prompt, Reply, Result, Said, Store, Subject, instructions

WORKERS: Final = 4
REDELIVERED: Final = tuple(f"wamid.{number}" for number in range(10))
SHARED_URIS: Final = ("file::memory:?cache=shared", "file:conversations?mode=memory&cache=shared")


class FaultShown(AssertionError):  # noqa: N818  # a verdict and no error: the slow run hopes for it
    """The subject has the fault."""


def judge(holds: bool, seen: object) -> None:
    """The verdict of a scenario: the promise holds, or the fault is shown by what was *seen*."""
    if not holds:
        raise FaultShown(seen)


@contextmanager
def no_error() -> Iterator[None]:
    """Where the fault is that something fails at all."""
    try:
        yield
    except Exception as error:
        raise FaultShown(repr(error)) from error


@pytest.fixture
def subject() -> Subject:
    """The library that is looked at."""
    return Chatflow()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the test's own."""
    return tmp_path / "chat.db"


def user(text: str) -> Said:
    """A user's message."""
    return Said("user", text)


def model(text: str) -> Said:
    """A model's message."""
    return Said("model", text)


def asks(call_id: str, **args: Any) -> Said:
    """A model's message that calls a tool."""
    return Said("model", calls=(Call(call_id, "look_up", args),))


def gives(call_id: str, content: Any = "found") -> Said:
    """A tool's message that answers the call."""
    return Said("tool", results=(Result(call_id, "look_up", content),))


def says(*replies: Reply | Exception) -> Model:
    """A model that says these in order, or raises them."""
    left = iter(replies)

    async def generate(prompt: Prompt) -> Reply:
        reply = next(left)
        if isinstance(reply, Exception):
            raise reply
        return reply

    return generate


async def add(subject: Subject, path: str | Path, *messages: Said, session_id: str = "s", max_turns: int = 40) -> None:
    """Add messages to a conversation, and close the store."""
    async with subject.open(path, max_turns) as store:
        conversation = await store.conversation(session_id)
        for message in messages:
            await conversation.add(message)


async def stored(subject: Subject, path: str | Path, session_id: str = "s") -> list[Said]:
    """What a conversation holds after a restart."""
    async with subject.open(path) as store:
        return (await store.conversation(session_id)).history


def stored_agent(path: Path) -> str:
    """The name in the file of the agent that is active in the one conversation there."""
    with sqlite3.connect(path) as connection:
        [(name,)] = connection.execute("SELECT active_agent_name FROM chatflow_sessions")
    connection.close()
    return str(name)


def orphans(history: list[Said]) -> set[str]:
    """The ids of results whose call does not stand before them."""
    called: set[str] = set()
    found: set[str] = set()
    for said in history:
        called.update(call.id for call in said.calls)
        found.update(result.call_id for result in said.results if result.call_id not in called)
    return found


def complaint(prompt: Prompt) -> str | None:
    """Why a provider would refuse the prompt, or None."""
    body = list(dropwhile(lambda message: message["role"] == "system", prompt))
    if not body or body[0]["role"] != "user":
        return "it does not begin with a user message"
    known: set[str] = set()
    unanswered: list[str] = []
    for message in body:
        if message["role"] == "tool":
            if message["tool_call_id"] not in unanswered:
                return f"a result for {message['tool_call_id']!r} without its call directly before it"
            unanswered.remove(message["tool_call_id"])
            continue
        if unanswered:
            return f"no result for {unanswered} before the next message"
        unanswered = [call["id"] for call in message.get("tool_calls", ())]
        if "" in unanswered or known.intersection(unanswered) or len(set(unanswered)) < len(unanswered):
            return f"an id that is empty or stands twice among {unanswered}"
        known.update(unanswered)
    return f"no result for {unanswered}" if unanswered else None


# --- window of whole turns ---


async def test_window_of_whole_turns(subject: Subject, path: Path) -> None:
    """Row "window of whole turns, starts at a user message": so does each of twelve windows, with whole turns in it."""
    await add(subject, path, Said("system", "Be kind."))
    for number in range(3):
        turn = [user(f"q{number}"), asks(f"c{number}"), gives(f"c{number}"), model(f"a{number}")]
        for said in turn:
            await add(subject, path, said, max_turns=2)
            first, second, *rest = await stored(subject, path)
            judge((first.role, second.role) == ("system", "user"), second)
            judge(not orphans(rest), orphans(rest))
            users = [each.text for each in (second, *rest) if each.role == "user"]
            judge(users == [f"q{each}" for each in range(max(0, number - 1), number + 1)], users)


async def test_late_result(subject: Subject, path: Path) -> None:
    """Row "a late result keeps its call": also when the call's turn would have left the window."""
    said = [user("q1"), asks("c1"), user("q2"), gives("c1"), model("a2"), user("q3"), model("a3")]
    await add(subject, path, *said, max_turns=2)
    history = await stored(subject, path)
    judge(not orphans(history), f"orphaned: {orphans(history)}")
    judge([result.call_id for each in history for result in each.results] == ["c1"], history)


async def test_ids_reused_across_turns(subject: Subject, path: Path) -> None:
    """Row "ids reused across turns are told apart": each call keeps its own arguments and its own result."""
    turns = [[user(f"q{n}"), asks("call_0", order=n), gives("call_0", f"order {n}"), model(f"a{n}")] for n in range(3)]
    said = [message for turn in turns for message in turn]
    await add(subject, path, *said)
    judge(await stored(subject, path) == said, await stored(subject, path))


# --- a failed turn leaves no trace ---


async def test_failed_turn_in_a_full_window(subject: Subject, path: Path) -> None:
    """Row "a failed turn leaves no trace", full window: the failed turn is not there, and the oldest one is."""
    said = [user("q1"), model("a1"), user("q2"), model("a2")]
    await add(subject, path, *said, max_turns=2)
    async with subject.open(path, max_turns=2) as store:
        with pytest.raises(ConnectionError):
            await store.bot(says(ConnectionError())).answer("s", "q3")
    judge(await stored(subject, path) == said, await stored(subject, path))


async def test_failed_turn_after_a_handoff(subject: Subject, path: Path) -> None:
    """Row "a failed turn leaves no trace", agent: the one that answered before answers again."""
    async with subject.open(path) as store:
        replies = says("a1", [Call("c1", "transfer_to_billing")], ConnectionError())
        bot = store.bot(replies, specialists=["Billing"])
        await bot.answer("s", "q1")
        with pytest.raises(ConnectionError):
            await bot.answer("s", "a bill")
    judge(stored_agent(path) == AGENT, stored_agent(path))


async def test_timed_out_tool(subject: Subject, path: Path) -> None:
    """Row "a failed turn leaves no trace", timeout: neither the question nor an open call is left."""
    await time_out_in_a_tool(subject, path)
    judge(await stored(subject, path) == [], await stored(subject, path))


async def test_conversation_goes_on_after_a_timeout(subject: Subject, path: Path) -> None:
    """Row "a failed turn leaves no trace", wedged: the next message is answered, from a valid prompt."""
    await time_out_in_a_tool(subject, path)
    prompts: list[Prompt] = []

    async def answer(prompt: Prompt) -> Reply:
        prompts.append(prompt)
        return "a2"

    async with subject.open(path) as store:
        assert await store.bot(answer).answer("s", "q2") == "a2"
    judge(complaint(prompts[0]) is None, complaint(prompts[0]))


async def time_out_in_a_tool(subject: Subject, path: Path) -> None:
    """One turn whose time is up while its tool runs."""
    scope = anyio.CancelScope()

    async def look_up() -> str:
        """Look it up."""
        scope.deadline = anyio.current_time()
        await anyio.sleep_forever()
        return "never"

    async with subject.open(path) as store:
        with scope:
            await store.bot(says([Call("c1", "look_up")]), tools=[look_up]).answer("s", "q1")
    assert scope.cancelled_caught


async def test_retried_message(subject: Subject, path: Path) -> None:
    """Row "a failed turn leaves no trace", retries: after two failures and a success the message stands there once."""
    async with subject.open(path) as store:
        bot = store.bot(says(ConnectionError(), ConnectionError(), "a1"))
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await bot.answer("s", "q1")
        await bot.answer("s", "q1")
    judge(await stored(subject, path) == [user("q1"), model("a1")], await stored(subject, path))


# --- two messages at once, a webhook delivered twice, deletion ---


async def test_messages_at_once(subject: Subject, path: Path) -> None:
    """Row "two messages at once in one conversation": five are answered one by one, each asked of the model once."""
    asked: list[Any] = []

    async def answer(prompt: Prompt) -> Reply:
        question = prompt[-1]["content"]
        asked.append(question)
        for _ in range(50):  # time enough for the others, were they let in
            await anyio.lowlevel.checkpoint()
        return f"to {question}"

    async with subject.open(path) as store:
        bot = store.bot(answer)
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(bot.answer, "s", f"q{number}")
    history = await stored(subject, path)
    judge(history == [each for question in asked for each in (user(question), model(f"to {question}"))], history)
    judge(sorted(asked) == [f"q{number}" for number in range(5)], asked)


async def test_webhook_delivered_twice(subject: Subject, path: Path) -> None:
    """Row "a webhook delivered twice": of four processes that get each of ten webhooks at once, one runs it."""
    deliveries = await anyio.to_thread.run_sync(deliver, subject, path, REDELIVERED, WORKERS)
    more = {message_id: times for message_id, times in deliveries.ran.items() if times > 1}
    judge(not more, f"{len(more)} of {len(REDELIVERED)} run more than once")
    judge(not deliveries.errors, deliveries.errors)
    judge(set(deliveries.ran) == set(REDELIVERED), deliveries.ran)
    for message_id in REDELIVERED:
        history = await stored(subject, path, f"chat of {message_id}")
        judge(history == [user("hi"), model("hello")], history)


async def test_equal_texts(subject: Subject, path: Path) -> None:
    """Row "a webhook delivered twice", equal text: two messages of one text and two ids are both answered."""
    async with subject.open(path) as store:
        bot = store.bot(says("a1", "a2"))
        answers = [await bot.answer("s", "hello?", message_id) for message_id in ("m1", "m2")]
    judge(answers == ["a1", "a2"], answers)


async def told_of(store: Store, happening: Callable[[], Awaitable[object]]) -> bool:
    """Whether a run is told of what happens, in another task, while the model is asked."""
    asked, happened = anyio.Event(), anyio.Event()
    told: list[BaseException] = []

    async def answer(prompt: Prompt) -> Reply:
        asked.set()
        await happened.wait()
        return "too late"

    async def run() -> None:
        try:
            await store.bot(answer).answer("s", "q")
        except Exception as error:  # noqa: BLE001  # which one is for the library to say
            told.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await asked.wait()
        await happening()
        happened.set()
    return bool(told)


async def test_deleted_during_a_run(subject: Subject, path: Path) -> None:
    """Row "delete during a run": nothing of the conversation comes back, and the run is told."""
    await add(subject, path, user("q1"), model("a1"))
    async with subject.open(path) as store:
        told = await told_of(store, lambda: store.delete("s"))
    history = await stored(subject, path)
    judge(history == [], history)
    judge(told, "the run ended as if nothing had happened")


async def test_deleted_and_used_anew_during_a_run(subject: Subject, path: Path) -> None:
    """Row "delete during a run", used anew: nothing of the old conversation gets into the new one of the same id."""
    async with subject.open(path) as store:

        async def use_anew() -> None:
            await store.delete("s")
            await (await store.conversation("s")).add(user("anew"))

        told = await told_of(store, use_anew)
    history = await stored(subject, path)
    judge(history == [user("anew")], history)
    judge(told, "the run ended as if nothing had happened")


# --- what was stored comes back equal ---


class Colour(enum.Enum):
    """A user's enum."""

    RED = "red"


@dataclasses.dataclass(frozen=True)
class Point:
    """A user's dataclass."""

    x: int


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


VALUES: Final[Mapping[str, Any]] = {
    "datetime": dt.datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
    "date": dt.date(2030, 1, 2),
    "timedelta": dt.timedelta(days=1, microseconds=1),
    "UUID": uuid.UUID(int=7),
    "Decimal": decimal.Decimal("1.10"),
    "bytes": b"\x00\xff",
    "set": {1, 2},
    "tuple": (1, (2, 3)),
    "int keys": {1: "one"},
    "NaN": math.nan,
    "infinity": [math.inf, -math.inf],
    "beyond 64 bits": 2**70,
    "lone surrogate": "\ud800",
    "NUL": "a\0b",
    "True and 1": [True, 1, 1.0],
    "600 levels": _nested(600),
}


def alike(first: Any, second: Any) -> bool:
    """Equal, and of the same kind: True is not 1, a tuple no list, and NaN is NaN."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return alike(list(first.items()), list(second.items()))
    for kind in (list, tuple):
        if isinstance(first, kind) and isinstance(second, kind):
            return len(first) == len(second) and all(map(alike, first, second))
    if isinstance(first, set | frozenset) and isinstance(second, set | frozenset):
        return first == second
    if isinstance(first, float) and math.isnan(first):
        return isinstance(second, float) and math.isnan(second)
    return type(first) is type(second) and bool(first == second)


@pytest.mark.parametrize("kind", VALUES)
async def test_value(subject: Subject, path: Path, kind: str) -> None:
    """Row "values that are not JSON": what a tool gave is the same on disk, or is refused before anything changes."""
    value = VALUES[kind]
    await add(subject, path, user("q1"), asks("c1"))
    refused = False
    async with subject.open(path) as store:
        conversation = await store.conversation("s")
        try:
            await conversation.add(gives("c1", value))
        except (TypeError, ValueError, RecursionError):
            refused = True
        in_memory = conversation.history
    with no_error():
        on_disk = await stored(subject, path)
    if refused:
        judge(len(in_memory) == len(on_disk) == 2, f"refused, and yet there: {in_memory} in memory, {on_disk} on disk")
        return
    [shown] = in_memory[-1].results
    [found] = on_disk[-1].results
    judge(alike(shown.content, value), f"{value!r} became {shown.content!r}")
    judge(alike(found.content, value), f"{value!r} in memory is {found.content!r} on disk")


@pytest.mark.parametrize("value", [Colour.RED, Point(1)], ids=["enum", "dataclass"])
async def test_value_of_a_class(subject: Subject, path: Path, value: Any) -> None:
    """Row "values that are not JSON", classes: memory shows what disk will, the plain value."""
    async with subject.open(path) as store:
        conversation = await store.conversation("s")
        for said in (user("q1"), asks("c1"), gives("c1", value)):
            await conversation.add(said)
        [shown] = conversation.history[-1].results
    [found] = (await stored(subject, path))[-1].results
    judge(alike(shown.content, found.content), f"{shown.content!r} in memory is {found.content!r} on disk")


# --- a corrupt row ---


def corrupt(path: Path) -> None:
    """Cut off the one message that says so, in the file."""
    with sqlite3.connect(path) as connection:
        statement = (
            "UPDATE chatflow_messages SET message_json = '{\"role\": \"us' WHERE message_json LIKE '%cut me off%'"
        )
        assert connection.execute(statement).rowcount == 1
    connection.close()


async def test_corrupt_row(subject: Subject, path: Path) -> None:
    """Row "a corrupt row": its conversation raises an error of the library's own that names it."""
    await add(subject, path, user("q1"), asks("c1"), gives("c1", "cut me off"), session_id="broken")
    corrupt(path)
    async with subject.open(path) as store:
        try:
            await store.conversation("broken")
        except Exception as error:  # noqa: BLE001  # which one is the question
            judge(isinstance(error, subject.error) and "broken" in str(error), repr(error))
        else:
            judge(holds=False, seen="loaded without the row")


async def test_other_conversations_beside_a_corrupt_row(subject: Subject, path: Path) -> None:
    """Row "a corrupt row", the others: they work, and all are listed, the corrupt one too."""
    await add(subject, path, user("cut me off"), session_id="broken")
    await add(subject, path, user("q1"), session_id="sound")
    corrupt(path)
    async with subject.open(path) as store:
        with no_error():
            listed = await store.session_ids()
            await store.bot(says("a2")).answer("sound", "q2")
    judge(set(listed) == {"broken", "sound"}, listed)
    judge(await stored(subject, path, "sound") == [user("q1"), user("q2"), model("a2")], "the other one has lost some")


# --- what a model is sent ---


async def prompt_of(subject: Subject, path: Path, *said: Said, text: str = "and now?") -> Prompt:
    """What the model is sent when *text* comes after *said*."""
    await add(subject, path, *said)
    prompts: list[Prompt] = []

    async def answer(prompt: Prompt) -> Reply:
        prompts.append(prompt)
        return "answer"

    async with subject.open(path) as store:
        await store.bot(answer).answer("s", text)
    return prompts[0]


PROMPTS: Final[Mapping[str, tuple[Said, ...]]] = {
    "open call": (user("q1"), asks("c1")),
    "late result": (user("q1"), asks("c1"), user("q2"), gives("c1"), model("a2")),
    "reused id": (user("q1"), asks("c1"), gives("c1"), model("a1"), user("q2"), asks("c1"), gives("c1"), model("a2")),
    "empty id": (user("q1"), asks(""), gives(""), model("a1")),
    "half a batch": (user("q1"), Said("model", calls=(Call("c1", "one"), Call("c2", "two"))), gives("c1")),
}


@pytest.mark.parametrize("case", PROMPTS)
async def test_prompt(subject: Subject, path: Path, case: str) -> None:
    """Row "always-valid prompt": whatever the history holds, no provider would refuse what the model is sent."""
    prompt = await prompt_of(subject, path, *PROMPTS[case])
    judge(complaint(prompt) is None, complaint(prompt))


async def test_prompt_keeps_every_message(subject: Subject, path: Path) -> None:
    """Row "always-valid prompt", vanishing: a user message without text is still one of those sent."""
    prompt = await prompt_of(subject, path, user("q1"), model("a1"), text="")
    roles = [message["role"] for message in prompt]
    judge(roles == ["system", "user", "assistant", "user"], roles)


# --- the active agent ---


async def hand_over(subject: Subject, path: Path) -> None:
    """A conversation in which Billing answers."""
    async with subject.open(path) as store:
        bot = store.bot(says([Call("c1", "transfer_to_billing")], "a1"), specialists=["Billing"])
        await bot.answer("s", "a bill")


async def test_agent_after_a_restart(subject: Subject, path: Path) -> None:
    """Row "active agent after restart": the one that was handed over to answers."""
    await hand_over(subject, path)
    prompts: list[Prompt] = []

    async def answer(prompt: Prompt) -> Reply:
        prompts.append(prompt)
        return "a2"

    async with subject.open(path) as store:
        await store.bot(answer, specialists=["Billing"]).answer("s", "q2")
    judge(prompts[0][0]["content"] == instructions("Billing"), prompts[0][0])


async def test_unknown_agent(subject: Subject, path: Path) -> None:
    """Row "active agent after restart", unknown name: another agent answers, and the stored name stays."""
    await hand_over(subject, path)
    async with subject.open(path) as store:
        await store.bot(says("a2")).answer("s", "q2")
    judge(stored_agent(path) == "Billing", stored_agent(path))


# --- databases in memory ---


async def test_memory(subject: Subject) -> None:
    """Row ":memory: and shared URIs": a conversation in a database in memory is there when it is asked for again."""
    with no_error():
        async with subject.open(":memory:") as store:
            await store.bot(says("a1")).answer("s", "q1")
            history = (await store.conversation("s")).history
    judge(history == [user("q1"), model("a1")], history)


@pytest.mark.parametrize("uri", SHARED_URIS)
async def test_shared_memory(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    """Row ":memory: and shared URIs", shared: two stores on one address have the same conversations, and no file."""
    monkeypatch.chdir(tmp_path)
    with no_error():
        async with subject.open(uri) as store, subject.open(uri) as other:
            await store.bot(says("a1")).answer("s", "q1")
            history = (await other.conversation("s")).history
    judge(history == [user("q1"), model("a1")], history)
    made = await anyio.to_thread.run_sync(lambda: list(tmp_path.iterdir()))
    judge(not made, f"made {made}")


@pytest.mark.parametrize("name", ["memory", "sub/:memory:", "mode=memory.db"])
async def test_path_like_an_address(subject: Subject, tmp_path: Path, name: str) -> None:
    """Row ":memory: and shared URIs", files: a path that only looks like an address in memory is a file."""
    await add(subject, str(tmp_path / name), user("q1"))
    assert (tmp_path / name).is_file()
    judge(await stored(subject, str(tmp_path / name)) == [user("q1")], "it was gone after a restart")
