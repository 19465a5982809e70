from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any, Final

import anyio
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.events import Done, RunEvent, UsageReported
from chatflow.core.memory import SessionStore
from chatflow.core.messages import MODEL_KEY, Message, Role
from chatflow.core.providers import ContextProvider, HistoryProvider, RunContext
from chatflow.core.session import AgentSession
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import ContextWindowError, EngineRateLimitError, SessionDeletedError, TurnInsideTurnError
from chatflow.runner import Runner
from chatflow.running.compacting import INSTRUCTIONS, Compactor
from chatflow.running.slots import give_back_slots
from chatflow.running.transcript import transcript
from chatflow.testing.conformance.service_engine import A2AEngine
from tests.runs import session_of, texts
from tests.strategies import results
from tests.test_runner_budget import CALL, look, numbers, sent, talk

SECRET: Final = "account 4711"
MARK: Final = {"chatflow": "summary"}


class Notes:
    """A compactor's function that notes what it was given, and numbers its summaries."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []

    async def __call__(self, messages: Sequence[Message]) -> str:
        self.given.append([message.text for message in messages])
        return f"summary {len(self.given)}"


def runner_of(compactor: Any, *, max_turns: int = 4, engine: Any = None, **arguments: Any) -> Runner:
    """A runner whose conversations keep so many turns."""
    engine = engine or ScriptedEngine(default="yes")
    store = SessionStore(default_max_turns=max_turns)
    return Runner(Agent("Support", **arguments.pop("agent", {})), store, engine, compactor=compactor, **arguments)


# --- when, and what ----------------------------------------------------------------------------------------------


async def test_turns_that_leave_are_summarised() -> None:
    """A turn that would push others out has all but half of the window summarised, in the place of those."""
    notes = Notes()
    runner = runner_of(notes)
    await talk(runner, *numbers[:4])
    assert notes.given == []
    await talk(runner, "five")
    assert notes.given == [["one", "yes", "two", "yes", "three", "yes"]]
    history = (await session_of(runner)).history
    assert [message.text for message in history] == ["summary 1", "four", "yes", "five", "yes"]
    assert (history[0].role, history[0].extra, history[0].usage) == (Role.SYSTEM, MARK, None)


async def test_not_every_turn_pays() -> None:
    """The next summary is made when the window is full again, of the one before and what leaves, and replaces it."""
    notes = Notes()
    runner = runner_of(notes)
    await talk(runner, *numbers, "six", "seven")
    assert len(notes.given) == 1
    await talk(runner, "eight")
    assert notes.given[1] == ["summary 1", "four", "yes", "five", "yes", "six", "yes"]
    assert texts(await session_of(runner)) == ["summary 2", "seven", "yes", "eight", "yes"]


async def test_model_is_sent_the_summary() -> None:
    """The model reads the summary after its instructions, and then what has stayed."""
    engine = ScriptedEngine(default="yes")
    runner = runner_of(Notes(), engine=engine, agent={"instructions": "Be kind."})
    await talk(runner, *numbers, "six")
    assert sent(engine.requests[-1]) == ["Be kind.", "summary 1", "four", "yes", "five", "yes", "six"]


async def test_number_of_turns_to_keep() -> None:
    """As many turns stay as were asked for."""
    notes = Notes()
    runner = runner_of(Compactor(notes, keep_turns=3))
    await talk(runner, *numbers)
    assert notes.given == [["one", "yes", "two", "yes"]]
    assert texts(await session_of(runner))[:2] == ["summary 1", "three"]


async def test_turns_that_a_limit_of_tokens_leaves_out() -> None:
    """Turns that were not sent, since all would be too long, leave too, with half of what was sent."""
    notes = Notes()
    runner = runner_of(notes, max_turns=40, max_prompt_tokens=7)
    await talk(runner, *numbers[:4])
    assert notes.given == []
    await talk(runner, "five")
    assert notes.given == [["one", "yes", "two", "yes", "three", "yes"]]
    assert texts(await session_of(runner)) == ["summary 1", "four", "yes", "five", "yes"]


async def test_turns_that_a_provider_had_no_room_for() -> None:
    """Turns that were left out after a provider's error leave too."""
    notes = Notes()

    def reply(request: EngineRequest) -> Any:
        return ContextWindowError("too long", model="m") if len(request.messages) > 6 else "yes"

    runner = runner_of(notes, max_turns=40, engine=ScriptedEngine(default=reply), on_context_window="shrink")
    await talk(runner, *numbers[:4])
    assert notes.given == [["one", "yes", "two", "yes", "three", "yes"]]


async def test_turns_left_out_before_a_tool_was_called() -> None:
    """Turns that were left out after a provider's error leave, also where the model was asked again after that."""
    notes = Notes()
    said = iter([CALL("look")])

    def reply(request: EngineRequest) -> Any:
        return ContextWindowError("too long", model="m") if len(request.messages) > 6 else next(said, "yes")

    runner = runner_of(None, max_turns=40)
    await talk(runner, *numbers[:3])
    agent = Agent("Support", tools=[look], engine=ScriptedEngine(default=reply))
    await talk(Runner(agent, runner.session_store, on_context_window="shrink", compactor=notes), "four")
    assert notes.given == [["one", "yes", "two", "yes", "three", "yes"]]


async def test_what_a_provider_has_not_chosen_stays() -> None:
    """Where a provider chooses what is sent, what is left out of that has not left the window."""

    class All(HistoryProvider):
        pass

    notes = Notes()
    agent = {"context_providers": [All()]}
    runner = runner_of(notes, max_turns=4, max_prompt_tokens=3, agent=agent)
    await talk(runner, *numbers[:4])
    assert notes.given == []
    await talk(runner, "five")
    assert len(notes.given) == 1


async def test_other_system_messages_stay() -> None:
    """Other system messages stay where they are, and the next summary stands where the one before did."""
    notes = Notes()
    runner = runner_of(notes)
    await talk(runner, *numbers[:2])
    session = await session_of(runner)
    await session.add_message(Message(Role.SYSTEM, "VIP"))
    await talk(runner, *numbers[2:])
    await session.add_message(Message(Role.SYSTEM, "angry"))
    await talk(runner, "six", "seven", "eight")
    assert texts(session) == ["VIP", "summary 2", "angry", "seven", "yes", "eight", "yes"]
    assert notes.given[1][0] == "summary 1"


async def test_several_summaries_become_one() -> None:
    """Where a history from elsewhere holds several summaries, one stands for all of them."""
    notes = Notes()
    runner = runner_of(notes, max_turns=1)
    await talk(runner, "one")
    session = await session_of(runner)
    for text in ("old", "VIP", "older"):
        extra = {} if text == "VIP" else MARK
        await session.add_message(Message(Role.SYSTEM, text, extra=extra))
    await talk(runner, "two")
    assert notes.given == [["old", "older", "one", "yes"]]
    assert texts(session) == ["summary 1", "VIP", "two", "yes"]


async def test_call_that_waits_for_its_result() -> None:
    """A call without a result keeps its turn, and those after it, so that its result may still come."""
    notes = Notes()
    runner = runner_of(Compactor(notes, keep_turns=1), max_turns=3)
    await talk(runner, "one")
    session = await session_of(runner)
    async with session.turn():
        await session.add_message(Message(Role.USER, "two"))
        await session.add_message(Message(Role.MODEL, tool_calls=[CALL("look")]))
    await talk(runner, "three", "four")
    assert notes.given == [["one", "yes"]]
    await session.add_message(results(session.history[2].tool_calls[0].id))
    assert texts(session) == ["summary 1", "two", "", "three", "yes", "four", "yes", ""]


async def test_history_cleared_by_a_tool() -> None:
    """What a tool has removed in the turn is summarised no more, the former summary neither."""
    notes = Notes()

    async def forget(context: ToolContext) -> str:
        """Forget."""
        await context.session.clear_history()
        return "forgotten"

    engine = ScriptedEngine(default="yes").when("forget", call="forget")
    runner = runner_of(notes, engine=engine, max_prompt_tokens=20, agent={"tools": [forget]})
    await talk(runner, *numbers, "please forget")
    assert len(notes.given) == 1
    assert texts(await session_of(runner)) == ["please forget", "", "", "yes"]


async def test_rollback_by_a_tool() -> None:
    """What a tool has gone back behind is not there to leave."""
    notes = Notes()

    async def change_my_mind(context: ToolContext) -> str:
        """Go back."""
        before = context.session.checkpoint()
        for text in numbers:
            await context.session.add_message(Message(Role.USER, text))
        await context.session.rollback_to(before)
        return "done"

    engine = ScriptedEngine(default="yes").when("back", call="change_my_mind")
    runner = runner_of(notes, max_turns=2, engine=engine, agent={"tools": [change_my_mind]})
    await talk(runner, "one", "go back")
    assert notes.given == []
    assert texts(await session_of(runner)) == ["one", "yes", "go back", "", "", "yes"]


async def test_service_keeps_its_history() -> None:
    """A conversation whose history a service keeps is left as it is."""
    notes = Notes()
    runner = runner_of(notes, max_turns=2, engine=A2AEngine())
    await talk(runner, *numbers)
    assert notes.given == []
    assert len((await session_of(runner)).history) == 4


async def test_once_for_a_message() -> None:
    """A duplicate asks for no summary."""
    notes = Notes()
    runner = runner_of(notes, max_turns=1)
    for _ in range(3):
        await runner.run_async("s", "one", message_id="1")
        await runner.run_async("s", "two", message_id="2")
    assert len(notes.given) == 1


async def test_nobody_pays_for_what_is_lost() -> None:
    """A turn whose conversation was deleted once it was answered asks for no summary."""

    class Deletes(ContextProvider):
        async def after_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            if context.input.text == "two":
                await runner.session_store.delete("s")

    notes = Notes()
    runner = runner_of(notes, max_turns=1, agent={"context_providers": [Deletes()]})
    await talk(runner, "one")
    with pytest.raises(SessionDeletedError):
        await talk(runner, "two")
    assert notes.given == []


async def test_slot_is_held() -> None:
    """A turn that has given its slot back, since it waited for something, has one while it is summarised."""

    class Waits(ContextProvider):
        async def after_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            give_back_slots()

    held: list[float] = []

    async def look_at_slots(messages: Sequence[Message]) -> str:
        held.append(runner._slots._limiter().borrowed_tokens)
        return "so far"

    runner = runner_of(look_at_slots, max_turns=1, max_concurrent_turns=1, agent={"context_providers": [Waits()]})
    await talk(runner, "one", "two")
    assert held == [1]


async def test_failed_turn() -> None:
    """A turn that fails asks for no summary."""
    notes = Notes()
    engine = ScriptedEngine(["yes", EngineRateLimitError("busy", model="m")])
    runner = runner_of(notes, max_turns=1, engine=engine)
    await talk(runner, "one")
    with pytest.raises(EngineRateLimitError):
        await talk(runner, "two")
    assert notes.given == []


async def test_resumed_turn() -> None:
    """A message that failed after its tools had run is summarised when it is answered."""
    notes = Notes()

    async def look() -> str:
        """Look."""
        return "found"

    engine = ScriptedEngine(["yes", [CALL("look")], EngineRateLimitError("busy", model="m"), "done"])
    runner = runner_of(notes, max_turns=1, engine=engine, agent={"tools": [look]})
    await talk(runner, "one")
    with pytest.raises(EngineRateLimitError):
        await runner.run_async("s", "two", message_id="2")
    await runner.run_async("s", "two", message_id="2")
    assert texts(await session_of(runner)) == ["summary 1", "two", "", "", "done"]


# --- by a model --------------------------------------------------------------------------------------------------


async def test_by_the_model_that_answers() -> None:
    """Without more, the model of the agent that answers is asked, by its engine, with a text and no tools."""
    engine = ScriptedEngine(default="yes").when(agent="Summariser", reply="They said numbers.")
    support = Agent("Support", "Be kind.", "gpt-4o", engine=engine, settings={"temperature": 1})
    runner = Runner(support, SessionStore(default_max_turns=2), compactor=Compactor())
    await talk(runner, *numbers[:3])
    request = engine.requests[-1]
    assert [message.role for message in request.messages] == [Role.SYSTEM, Role.USER]
    assert sent(request) == [
        INSTRUCTIONS,
        "The conversation:\n\nUser: one\n\nSupport: yes\n\nUser: two\n\nSupport: yes",
    ]
    assert (request.agent.model, request.tools, dict(request.settings)) == ("gpt-4o", (), {})
    assert texts(await session_of(runner)) == ["They said numbers.", "three", "yes"]


async def test_by_an_agent() -> None:
    """An agent's instructions, engine and settings are used, and its name stands in the message."""
    engine = ScriptedEngine([EngineReply(text="short", extra={MODEL_KEY: "small", "reasoning_content": "hm"})])

    def instruct(session: AgentSession) -> str:
        return f"Summarise {session.session_id}."

    short = Agent("Short", instruct, tools=[look], engine=engine, settings={"temperature": 0})
    runner = runner_of(short, max_turns=1)
    await talk(runner, "one", "two")
    (request,) = engine.requests
    assert (request.agent, request.tools, dict(request.settings)) == (short, (), {"temperature": 0})
    assert sent(request)[0] == "Summarise s."
    summary = (await session_of(runner)).history[0]
    assert (summary.text, summary.agent_name, summary.extra) == ("short", "Short", {**MARK, MODEL_KEY: "small"})


async def test_by_an_agent_without_an_engine() -> None:
    """The runner's engine answers for an agent without one."""
    engine = ScriptedEngine(default="yes").when(agent="Short", reply="short")
    runner = runner_of(Agent("Short", model="small"), max_turns=1, engine=engine)
    await talk(runner, "one", "two")
    assert engine.requests[-1].agent.model == "small"
    assert texts(await session_of(runner))[0] == "short"


async def test_after_a_handoff() -> None:
    """The model of the agent that has answered is asked, whoever the turn began with."""
    billing = Agent("Billing", model="b", engine=ScriptedEngine(default="billing").when(agent="Summariser", reply="s"))
    engine = ScriptedEngine(default="yes").when("bill", call="transfer_to_billing")
    runner = Runner(
        Agent("Support", handoffs=[billing]), SessionStore(default_max_turns=1), engine, compactor=Compactor()
    )
    await talk(runner, "one", "the bill")
    assert billing.engine.requests[-1].agent.model == "b"  # type: ignore[union-attr]


async def test_usage() -> None:
    """What a summary has cost stands in its message, in the response, and is told to whoever listens."""
    engine = ScriptedEngine(default=EngineReply(text="yes", usage={"total": 10}))
    engine.when(agent="Summariser", reply=EngineReply(text="short", usage={"total": 7}))
    runner = runner_of(Compactor(), max_turns=1, engine=engine)
    await talk(runner, "one")
    events: list[RunEvent] = []
    async with runner.run_stream("s", "two") as stream:
        events += [event async for event in stream]
    assert [event.usage for event in events if isinstance(event, UsageReported)] == [{"total": 10}, {"total": 7}]
    assert stream.response.usage == {"total": 17}
    assert isinstance(events[-1], Done)
    assert [message.usage for message in (await session_of(runner)).history] == [{"total": 7}, None, {"total": 10}]


async def test_usage_of_a_reply_without_text() -> None:
    """What a reply has cost counts, also where no summary comes of it."""
    engine = ScriptedEngine(default=EngineReply(text="yes", usage={"total": 10}))
    engine.when(agent="Summariser", reply=EngineReply(text="  ", usage={"total": 7}))
    runner = runner_of(Compactor(), max_turns=1, engine=engine)
    await talk(runner, "one")
    assert (await runner.run_async("s", "two")).usage == {"total": 17}
    session = await session_of(runner)
    assert (texts(session), session.usage.total) == (["two", "yes"], {"total": 27})


async def test_streamed_turn_is_the_same() -> None:
    """A streamed turn stores what an unstreamed one does."""
    stored: list[Any] = []
    for streams in (False, True):
        runner = runner_of(Notes(), max_prompt_tokens=9, max_turns=3)
        for text in (*numbers, *numbers):
            if streams:
                await runner.run_stream("s", text).collect()
            else:
                await runner.run_async("s", text)
        stored.append([(message.role, message.text, message.extra) for message in (await session_of(runner)).history])
    assert stored[0] == stored[1]
    assert stored[0][0][1] == "summary 3"


# --- where there is no room for all of it ------------------------------------------------------------------------


class Small(ScriptedEngine):
    """Finds requests of more than so many words too long, and else says how many it was sent."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.counts: list[int] = []
        self.when(lambda request: True, reply=self.say)

    def say(self, request: EngineRequest) -> Any:
        """How long it was."""
        self.counts.append(words := sum(len(message.text.split()) for message in request.messages))
        if words > self.most:
            raise ContextWindowError("model 's': too long", model="s")
        return EngineReply(text=f"of {words} words", usage={"total": words})


class Uncounted:
    """An engine that can't count."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def generate(self, request: EngineRequest) -> EngineReply:
        """As that one does."""
        return await self.engine.generate(request)


async def long_talk(runner: Runner, turns: int = 8) -> None:
    """So many turns without a compactor, and then one with *runner*'s."""
    before = Runner(Agent("Support"), runner.session_store, ScriptedEngine(default="yes"))
    await talk(before, *(f"turn {number}" for number in range(turns)))
    await talk(runner, "next")


BOUND: Final = 17
"""Words for three turns: five each ("User: turn 0" and "Support: yes"), and two besides. A summary has eight."""


@pytest.mark.parametrize("where", ["agent", "runner", "provider", "provider, from a function"])
async def test_as_much_as_there_is_room_for(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """A summary is made of as many of the oldest turns as its maker has room for; the others leave with the next."""
    provider = where.startswith("provider")
    engine = Small(BOUND if provider else 1000)
    short: Any = Agent("Short", engine=engine, max_prompt_tokens=BOUND if where == "agent" else None)
    if where == "provider, from a function":
        model = short

        async def short(messages: Sequence[Message]) -> str:
            request = EngineRequest(
                agent=model, messages=[Message(Role.USER, f"The conversation: {transcript(messages)}")]
            )
            return (await engine.generate(request)).text or ""

    limit = BOUND if where == "runner" else None
    counting = ScriptedEngine(default="yes")
    runner = runner_of(
        Compactor(short, keep_turns=1),
        max_turns=100,
        engine=counting,
        agent={"max_prompt_tokens": 5} if where != "runner" else {},
        max_prompt_tokens=limit,
    )
    await long_talk(runner)
    assert texts(await session_of(runner))[:2] == (["of 12 words", "turn 2"] if provider else ["of 17 words", "turn 3"])
    assert engine.counts == ([42, 22, 12] if provider else [17])
    assert ("too long; a summary of 4 messages is asked for in place of 8" in caplog.text) is provider
    await talk(runner, "again")
    assert texts(await session_of(runner))[:2] == ["of 15 words", "turn 3" if provider else "turn 4"]


async def test_engine_that_can_not_count_the_conversation() -> None:
    """A runner's number is not for a summariser whose engine can't count; one of its own is, and says so."""
    runner = runner_of(
        Compactor(Agent("Short", engine=Uncounted(engine := Small(1000))), keep_turns=1),
        max_turns=100,
        max_prompt_tokens=BOUND,
    )
    await long_talk(runner)
    assert len(engine.counts) == 1


async def test_own_limit_needs_an_engine_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    """A summariser with a number of its own, whose engine can't count, fails with what to do about it."""
    short = Agent("Short", engine=Uncounted(Small(1000)), max_prompt_tokens=50)
    runner = runner_of(Compactor(short), max_turns=2)
    await talk(runner, *numbers[:3])
    assert "give it an async method count_tokens" in caplog.text


async def test_answering_agents_limit() -> None:
    """Without a summariser of one's own the limit of the agent that answers is its summary's too."""
    limit = len(INSTRUCTIONS.split()) + 40
    engine = ScriptedEngine(default="yes").when(agent="Summariser", reply="so far")
    store = SessionStore(default_max_turns=100)
    agent = Agent("Support", engine=engine, max_prompt_tokens=limit)
    runner = Runner(agent, store, compactor=Compactor(keep_turns=1))
    await talk(
        Runner(Agent("Support", engine=engine), store), *(f"turn {number} {'word ' * 30}" for number in range(20))
    )
    await talk(runner, "next")
    assert engine.requests[-1].agent.name == "Summariser"
    assert await engine.count_tokens(engine.requests[-1]) <= limit
    assert texts(await session_of(runner))[0] == "so far"


@pytest.mark.parametrize("where", ["agent", "provider"])
async def test_turn_that_has_no_room_by_itself(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no room for a single turn, that is logged, and the turn commits as without a compactor."""
    engine = Small(4 if where == "provider" else 1000)
    short = Agent("Short", engine=engine, max_prompt_tokens=4 if where == "agent" else None)
    runner = runner_of(Compactor(short, keep_turns=1), max_turns=100, agent={"max_prompt_tokens": 5})
    await long_talk(runner)
    assert engine.counts == ([42, 22, 12, 7] if where == "provider" else [])
    assert "no summary was made of 16 messages, and the turn commits without it: " in caplog.text
    assert len((await session_of(runner)).history) == 18


class Crowd(ContextProvider):
    """Stores what others have said, in turns of their own, so that many leave at once."""

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        if context.input.text == "listen":
            said = [Message(Role.USER, f"turn {number}") for number in range(4)]
            context.add_messages(*said, store=True)


async def crowded(compactor: Any) -> Runner:
    """A conversation that has to drop its first four turns, all with one commit: seven words, then three each."""
    runner = runner_of(compactor, max_turns=2, agent={"context_providers": [Crowd()]})
    await talk(runner, "turn x", "listen")
    return runner


async def test_what_has_to_leave_goes_step_by_step() -> None:
    """What this commit drops is summarised in steps, each of the summary so far and what follows, as one message."""
    engine = Small(14)
    runner = await crowded(Compactor(Agent("Short", engine=engine)))
    assert engine.counts == [16, 10, 16, 13, 13]
    said = [sent(request)[0].split("\n\n")[1:] for request in engine.requests]
    assert said[1] == ["User: turn x", "Support: yes", "User: turn 0"]
    assert said[3] == ["Summary of what came before: of 10 words", "User: turn 1"]
    assert said[4] == ["Summary of what came before: of 13 words", "User: turn 2"]
    session = await session_of(runner)
    assert texts(session) == ["of 13 words", "turn 3", "listen", "yes"]
    assert (session.history[0].usage, session.usage.total) == ({"total": 36}, {"total": 36})


async def test_step_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Where a later step fails the summary of those before stays, and what both have cost."""
    engine = ScriptedEngine([EngineReply(text="first", usage={"total": 2}), EngineReply(usage={"total": 3})])
    runner = await crowded(Compactor(Agent("Short", engine=engine, max_prompt_tokens=12)))
    session = await session_of(runner)
    assert texts(session) == ["first", "turn 3", "listen", "yes"]
    assert (session.history[0].usage, session.usage.total) == ({"total": 5}, {"total": 5})
    assert "no summary was made of 2 messages, and the turn commits without it: ValueError" in caplog.text


async def test_what_a_failing_step_has_done() -> None:
    """What a step that fails has changed in the session is undone, and not what those before have."""
    done: list[str] = []

    async def summarise(messages: Sequence[Message]) -> str:
        if len(messages) > 3:
            raise ContextWindowError("too long", model="s")
        session = await session_of(runner)
        done.append(f"step {len(done) + 1}")
        session.state["done"] = done[-1]
        return "first" if len(done) == 1 else ""

    runner = runner_of(Compactor(summarise), max_turns=2, agent={"context_providers": [Crowd()]})
    await talk(runner, "turn x", "listen")
    session = await session_of(runner)
    assert (done, session.state, session.history[0].text) == (["step 1", "step 2"], {"done": "step 1"}, "first")


async def test_steps_have_one_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    """All steps are within the one time limit; what was summarised before it ran out stays."""
    given: list[int] = []

    async def summarise(messages: Sequence[Message]) -> str:
        if len(messages) > 3:
            raise ContextWindowError("too long", model="s")
        given.append(len(messages))
        if len(given) > 1:
            await anyio.sleep_forever()
        return "first"

    runner = await crowded(Compactor(summarise, timeout=0.01))
    assert texts(await session_of(runner))[0] == "first"
    assert (len(given), "TimeoutError" in caplog.text) == (2, True)


# --- when it fails -----------------------------------------------------------------------------------------------


class Wrong:
    """An engine that does not do what engines do."""

    async def generate(self, request: EngineRequest) -> Any:
        return SECRET


async def _raises(messages: Sequence[Message]) -> str:
    raise RuntimeError("no")


async def _empty(messages: Sequence[Message]) -> str:
    return " \n"


async def _awaits_a_cancelled_task(messages: Sequence[Message]) -> str:
    task = asyncio.create_task(anyio.sleep_forever())
    task.cancel()
    await task
    return "never"


def _plain(messages: Sequence[Message]) -> Any:
    return "not awaited"


async def _no_text(messages: Sequence[Message]) -> Any:
    return 5


async def _hangs(messages: Sequence[Message]) -> str:
    await anyio.sleep_forever()
    return "never"


FAILING: dict[str, tuple[Any, str]] = {
    "raises": (_raises, "RuntimeError"),
    "empty": (_empty, "ValueError"),
    "another type": (_no_text, "TypeError"),
    "no async function": (_plain, "TypeError"),
    "a cancellation that nobody asked for": (_awaits_a_cancelled_task, "CancelledError"),
    "too slow": (Compactor(_hangs, timeout=1e-9), "TimeoutError"),
    "an engine's error": (
        Agent("Short", engine=ScriptedEngine([EngineRateLimitError("model 'm': busy", model="m")])),
        "model 'm': busy",
    ),
    "an engine that gives no reply": (Agent("Short", engine=Wrong()), "TypeError"),
    "an engine that gives no text": (Agent("Short", engine=ScriptedEngine([EngineReply()])), "ValueError"),
    "instructions that fail": (Agent("Short", lambda: 1 / 0, engine=ScriptedEngine()), "ZeroDivisionError"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", FAILING)
async def test_failing_compactor(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A compactor that fails is logged, without content, and the turn commits as without one."""
    compactor, logged = FAILING[name]
    runner = runner_of(compactor, max_turns=2)
    await talk(runner, f"my {SECRET}", *numbers[1:3])
    assert texts(await session_of(runner)) == ["two", "yes", "three", "yes"]
    (record,) = [record for record in caplog.records if record.name == "chatflow.runner"]
    assert record.message == (
        f"session 's': no summary was made of 4 messages, and the turn commits without it: {logged}"
    )
    assert SECRET not in caplog.text


async def test_summary_that_leaves_no_room(caplog: pytest.LogCaptureFixture) -> None:
    """A summary beside which no message has room is refused like one that fails, and the conversation goes on."""

    async def talkative(messages: Sequence[Message]) -> str:
        return "word " * 18

    runner = runner_of(talkative, max_turns=40, max_prompt_tokens=20)
    await talk(runner, *(f"question {number} is it ok?" for number in range(12)))
    session = await session_of(runner)
    assert all(message.extra.get("chatflow") is None for message in session.history)
    assert "no summary was made" in caplog.text


async def test_what_a_failing_compactor_has_done() -> None:
    """What a compactor that fails has changed in the session is undone."""
    runner = runner_of(None, max_turns=1)

    async def change(messages: Sequence[Message]) -> str:
        session = await session_of(runner)
        session.state["half"] = "done"
        await session.add_message(Message(Role.SYSTEM, "half"))
        raise RuntimeError("no")

    again = Runner(runner.starting_agent, runner.session_store, ScriptedEngine(default="yes"), compactor=change)
    await talk(again, "one", "two")
    session = await session_of(runner)
    assert (texts(session), dict(session.state)) == (["two", "yes"], {})


async def test_compactor_is_part_of_the_turn() -> None:
    """What a compactor changes in state is committed with the turn; messages it must leave alone."""
    runner = runner_of(None, max_turns=1)

    async def count(messages: Sequence[Message]) -> str:
        session = await session_of(runner)
        session.state["summaries"] = session.state.get("summaries", 0) + 1
        if session.state["summaries"] > 1:
            await session.clear_history()
        return "so far"

    again = Runner(runner.starting_agent, runner.session_store, ScriptedEngine(default="yes"), compactor=count)
    await talk(again, "one", "two")
    session = await session_of(runner)
    assert (texts(session), dict(session.state)) == (["so far", "two", "yes"], {"summaries": 1})
    await talk(again, "three")
    assert (texts(session), dict(session.state)) == (["so far", "three", "yes"], {"summaries": 1})


async def test_compactor_that_runs_the_same_conversation(caplog: pytest.LogCaptureFixture) -> None:
    """A compactor that would wait for its own turn is refused, and that is its failure."""
    runners: list[Runner] = []

    async def run(messages: Sequence[Message]) -> str:
        return (await runners[0].run_async("s", "again")).content

    runners.append(runner_of(run, max_turns=1))
    await talk(runners[0], "one", "two")
    assert texts(await session_of(runners[0])) == ["two", "yes"]
    assert TurnInsideTurnError.__name__ not in caplog.text
    assert "a turn of this conversation" in caplog.text


async def test_cancelled_while_it_is_summarised() -> None:
    """A run that is cancelled while its turn is summarised leaves no trace, as any other."""
    begun = anyio.Event()

    async def hang(messages: Sequence[Message]) -> str:
        begun.set()
        await anyio.sleep_forever()
        return "never"

    runner = runner_of(Compactor(hang, timeout=None), max_turns=1)
    await talk(runner, "one")
    task = asyncio.create_task(runner.run_async("s", "two"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert texts(await session_of(runner)) == ["one", "yes"]
    await talk(runner_of(None), "works")


@pytest.mark.parametrize("limit", [None, 1000], ids=str)
async def test_time_of_its_own(limit: float | None) -> None:
    """A summary takes nothing of the turn's own time, and has a limit of its own, if any."""
    deadlines: list[float] = []

    async def note(messages: Sequence[Message]) -> str:
        deadlines.append(anyio.current_effective_deadline() - anyio.current_time())
        return "so far"

    await talk(runner_of(Compactor(note, timeout=limit), max_turns=1, turn_timeout=100), "one", "two")
    assert 500 < deadlines[0] <= (limit or math.inf)


async def test_providers_come_first() -> None:
    """What providers store at the end of a turn is there when it is summarised, and stays."""

    class Last(ContextProvider):
        async def after_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            await session.add_message(Message(Role.SYSTEM, f"after {context.input.text}"))

    notes = Notes()
    runner = runner_of(notes, max_turns=1, agent={"context_providers": [Last()]})
    await talk(runner, "one", "two")
    assert texts(await session_of(runner)) == ["after one", "after two", "summary 1", "two", "yes"]


async def test_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A summary is logged by counts alone."""
    caplog.set_level(logging.INFO, "chatflow")
    runner = runner_of(Notes(), max_turns=1)
    await talk(runner, "one", "two")
    assert [record.message for record in caplog.records if record.name == "chatflow.runner"] == [
        "session 's': a summary stands for 2 more messages"
    ]


def plain(messages: Sequence[Message]) -> Any:
    """A function that is not async."""
    return "a summary"


class PlainSummary:
    def __call__(self, messages: Sequence[Message]) -> Any:
        return "a summary"


@pytest.mark.parametrize(("function", "name"), [(plain, "plain"), (PlainSummary(), "PlainSummary")])
async def test_summary_that_is_not_async(caplog: pytest.LogCaptureFixture, function: Any, name: str) -> None:
    """A function that is not async makes no summary, and the log names it."""
    runner = runner_of(function)
    await talk(runner, *numbers[:5])
    assert f"TypeError: compactor {name} must be async: it returned str, which can't be awaited" in caplog.text
