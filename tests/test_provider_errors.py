from __future__ import annotations

import asyncio
import logging
from itertools import count
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chatflow.core.memory import SessionStore
from chatflow.core.messages import Message, Role, ToolResult
from chatflow.core.providers import RunContext
from chatflow.core.session import AgentSession
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionConflictError, UnmatchedToolResultError
from chatflow.runner import Runner
from chatflow.running import providing
from chatflow.testing.conformance.conversation import user
from chatflow.testing.conformance.provider_scripts import (
    LOOK,
    Scripted,
    adding,
    agent_with,
    asked,
    named_look,
    raising,
)
from chatflow.testing.conformance.stepping import CANCELLERS
from chatflow.testing.conformance.test_providers import Ledger
from tests.runs import session_of, texts

CALL = ScriptedEngine.call


# --- errors ---


async def test_failing_before() -> None:
    """An error before the run fails the turn with that very error; those that had begun see it, in reverse order."""
    log: list[str] = []
    error = LookupError("mine")
    store = SessionStore()
    providers = [Scripted("a", log), Scripted("b", log), Scripted("c", log, before=raising(error)), Scripted("d", log)]
    engine = ScriptedEngine(["no"])
    with pytest.raises(LookupError) as raised:
        await Runner(agent_with(*providers), store, engine).run_async("s", "hi")
    assert raised.value is error
    assert raised.value.__cause__ is None
    assert log == [
        *("a before Support", "b before Support", "c before Support"),
        *("b after Support: LookupError('mine')", "b done", "a after Support: LookupError('mine')", "a done"),
    ]
    assert engine.requests == []
    session = await store.get("s")
    assert session is not None
    assert len(session.history) == 0


async def test_failing_after() -> None:
    """An error after the run fails the turn, nothing is stored, and those still to be called see the error."""
    log: list[str] = []
    error = LookupError("mine")
    store = SessionStore()

    async def note(session: AgentSession, context: RunContext) -> None:
        context.state["noted"] = True

    providers = [
        Scripted("a", log, after=note),
        Scripted("b", log, after=raising(error)),
        Scripted("c", log, after=note),
    ]
    with pytest.raises(LookupError) as raised:
        await Runner(agent_with(*providers), store, ScriptedEngine(["hello"])).run_async("s", "hi")
    assert raised.value is error
    assert log[3:] == [
        *("c after Support: hello", "c done", "b after Support: hello"),
        *("a after Support: LookupError('mine')", "a done"),
    ]
    session = await store.get("s")
    assert session is not None
    assert (len(session.history), session.state) == (0, {})


async def test_failing_model() -> None:
    """A turn whose model fails leaves by the model's error, and no state that a provider has set stays."""
    log: list[str] = []

    async def note(session: AgentSession, context: RunContext) -> None:
        context.state["noted"] = True
        assert context.response is None or context.error is None

    runner = Runner(agent_with(Scripted("a", log, before=note, after=note)), engine=ScriptedEngine([LookupError("x")]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi")
    assert log == ["a before Support", "a after Support: LookupError('x')", "a done"]
    assert (await session_of(runner)).state == {}


async def test_logged_before(caplog: pytest.LogCaptureFixture) -> None:
    """An error that is only logged leaves nothing of what that provider has added or changed, and the turn goes on."""
    log: list[str] = []

    async def fail(session: AgentSession, context: RunContext) -> None:
        context.add_instructions("dropped")
        context.add_messages(user("dropped"))
        context.add_messages(user("dropped"), store=True)
        context.add_tools(LOOK)
        context.state["noted"] = True
        session.metadata["noted"] = True
        await session.add_message(user("dropped"))
        raise LookupError("secret")

    async def keep(session: AgentSession, context: RunContext) -> None:
        context.state["noted"] = True
        context.add_tools(named_look())

    engine = ScriptedEngine(["one"])
    providers = [Scripted("a", log, before=keep), Scripted("b", log, before=fail, on_error="log"), Scripted("c", log)]
    runner = Runner(agent_with(*providers), engine=engine)
    await runner.run_async("conversation", "hi")
    assert asked(engine) == ["Be brief.", "hi"]
    session = await session_of(runner, "conversation")
    assert (texts(session), session.state, session.metadata) == (["hi", "one"], {"_a": {"noted": True}}, {})
    assert [line for line in log if "after" in line] == ["c after Support: one", "a after Support: one"]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == (
        "session 'conversation': provider 'b' failed in before_run; the turn goes on without that"
    )


async def test_logged_after(caplog: pytest.LogCaptureFixture) -> None:
    """An error after the run that is only logged leaves the rest of the turn, and nothing of that call."""

    async def fail(session: AgentSession, context: RunContext) -> None:
        context.state["after"] = True
        raise LookupError("secret")

    async def note(session: AgentSession, context: RunContext) -> None:
        context.state["before"] = True

    provider = Scripted("a", before=note, after=fail, on_error="log")
    runner = Runner(agent_with(provider), engine=ScriptedEngine(["one"]))
    assert (await runner.run_async("s", "hi")).content == "one"
    assert (await session_of(runner)).state == {"_a": {"before": True}}
    assert "provider 'a' failed in after_run" in caplog.text


@pytest.mark.parametrize("on_error", ["fail", "log"])
async def test_stored_result_without_a_call(on_error: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A stored message that the conversation can't take is its provider's error; `after_run` is called all the same."""
    log: list[str] = []
    orphan = Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="x", name="f", content=1)])
    provider = Scripted("a", log, before=adding(user("context"), orphan, store=True), on_error=on_error)
    runner = Runner(agent_with(provider), engine=ScriptedEngine(["one"]))
    if on_error == "fail":
        with pytest.raises(UnmatchedToolResultError):
            await runner.run_async("s", "hi")
        assert texts(await session_of(runner)) == []
    else:
        await runner.run_async("s", "hi")
        assert texts(await session_of(runner)) == ["hi", "one"]
        assert "provider 'a' failed in before_run" in caplog.text
    assert len(log) == 3


async def test_failing_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """An error after a failed turn is logged, the others are still called, and the first error leaves."""
    log: list[str] = []
    providers = [Scripted(name, log, after=raising(KeyError(name))) for name in "ab"]
    runner = Runner(agent_with(Scripted("first", log), *providers), engine=ScriptedEngine([LookupError("x")]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi")
    assert log[3:] == [f"{name} after Support: LookupError('x')" for name in ("b", "a", "first")] + ["first done"]
    assert caplog.text.count("failed in after_run of a turn that had failed") == 2


async def cancelled_elsewhere(session: AgentSession, context: RunContext) -> None:
    """Await a task that somebody has cancelled: raises what a cancellation of this code would raise."""
    task = asyncio.create_task(anyio.sleep_forever())
    await anyio.lowlevel.checkpoint()
    task.cancel()
    await task


async def test_cancellation_nobody_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """What a cancelled task of its own raises in a provider is an error like others."""
    hooks: dict[str, Any] = {"before": cancelled_elsewhere, "after": cancelled_elsewhere}
    engine = ScriptedEngine(["one"])
    providers = [
        Scripted("a", before=cancelled_elsewhere, on_error="log"),
        Scripted("b", after=cancelled_elsewhere, on_error="log"),
    ]
    assert (await Runner(agent_with(*providers), engine=engine).run_async("s", "hi")).content == "one"
    assert caplog.text.count("the turn goes on without that") == 2
    with pytest.raises(asyncio.CancelledError):
        await Runner(agent_with(Scripted("a", **hooks)), engine=engine).run_async("s", "hi")
    log: list[str] = []
    failing = ScriptedEngine([LookupError("x")])
    agent = agent_with(Scripted("a", log), Scripted("b", after=cancelled_elsewhere))
    with pytest.raises(LookupError):
        await Runner(agent, engine=failing).run_async("s", "hi")
    assert log[-1] == "a done"
    assert "provider 'b' failed in after_run of a turn that had failed" in caplog.text


# --- timeouts and cancellations ---


async def hang(session: AgentSession, context: RunContext) -> None:
    """Never end."""
    await anyio.sleep_forever()


@pytest.mark.parametrize("hook", ["before", "after"])
@pytest.mark.parametrize("on_error", ["fail", "log"])
async def test_turn_timeout(hook: str, on_error: Any) -> None:
    """The turn's timeout covers both hooks, whatever they say of errors; the others are told."""
    log: list[str] = []
    hooks: dict[str, Any] = {hook: hang}
    runner = Runner(
        agent_with(Scripted("a", log), Scripted("b", log, on_error=on_error, **hooks)),
        engine=ScriptedEngine(["hello"]),
        turn_timeout=0.05,
    )
    with pytest.raises(TimeoutError, match="turn_timeout"):
        await runner.run_async("s", "hi")
    assert log[-2].startswith("a after Support: TimeoutError")
    assert log[-1] == "a done"
    assert texts(await session_of(runner)) == []


async def test_last_word_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After a failed turn no provider is waited for without end, and the others are still called."""
    monkeypatch.setattr(providing, "LAST_WORD_SECONDS", 0.05)
    log: list[str] = []
    agent = agent_with(Scripted("a", log), Scripted("b", log, after=hang))
    with pytest.raises(LookupError):
        await Runner(agent, engine=ScriptedEngine([LookupError("x")])).run_async("s", "hi")
    assert log[-1] == "a done"
    assert "provider 'b' was given up in after_run of a failed turn, after 0.05 s" in caplog.text


@pytest.mark.parametrize("canceller", CANCELLERS)
async def test_cancelled_while_the_last_words_are_said(canceller: str) -> None:
    """Cancelled while its providers are told of its failure, a turn tells them all to the end, and its error leaves."""
    for step in count():
        ledger = Ledger()
        agent = agent_with(ledger.provider("a"), ledger.provider("b"))
        runner = Runner(agent, engine=ScriptedEngine([LookupError("x")]))
        failed: list[bool] = []

        async def run(runner: Runner = runner, failed: list[bool] = failed, ledger: Ledger = ledger) -> None:
            try:
                await runner.run_async("s", "hi")
            except LookupError:
                failed.append(True)
                assert ledger.ended == ["b", "a"]
                # Whoever cancels is still told: the task is to end.
                await anyio.lowlevel.checkpoint()
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # it runs in one
                    raise asyncio.CancelledError from None

        cancelled = await CANCELLERS[canceller](run, step, "waiting")
        assert ledger.ended == ledger.told == ledger.returned[::-1]
        if not cancelled:
            assert failed
            break


async def test_error_after_the_turn() -> None:
    """What a turn has failed with can still be asked for when it has ended."""
    kept: list[RunContext] = []

    async def keep(session: AgentSession, context: RunContext) -> None:
        kept.append(context)

    runner = Runner(agent_with(Scripted("a", before=keep)), engine=ScriptedEngine([LookupError("x")]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi")
    assert isinstance(kept[0].error, LookupError)


async def test_what_is_left_over_of_a_failed_turn() -> None:
    """What a provider has started can write nothing into its state once the turn has failed."""
    is_over, tasks = anyio.Event(), list[asyncio.Task[None]]()

    async def write_late(context: RunContext) -> None:
        await is_over.wait()
        with pytest.raises(SessionConflictError):
            context.state["late"] = True

    async def start(session: AgentSession, context: RunContext) -> None:
        tasks.append(asyncio.create_task(write_late(context)))

    runner = Runner(agent_with(Scripted("a", before=start)), engine=ScriptedEngine([LookupError("x")]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi")
    is_over.set()
    await tasks[0]
    session = await session_of(runner)
    await session.save()
    assert session.state == {}
