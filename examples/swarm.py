"""Three agents plan a journey: each hands over to the next, and all of them read and write one state.

    python swarm.py                            says what is written down here
    python swarm.py "And 3 nights in Lisbon?"  goes on, with the agent and the state of before

Conversation, agent and state are in a file, and each message is one commit: all that the agents have done for it,
handoffs included, or nothing.

Set in the environment: CHAT_DB, the SQLite file (./journey.db); MODEL, the model that answers, and its provider's key
(without a model a script answers).
"""

import os
import sys
from typing import Any

import anyio

from chatflow import (
    Agent,
    ChatflowError,
    EngineRequest,
    HandedOff,
    Handoff,
    LiteLLMEngine,
    Runner,
    ScriptedEngine,
    SQLiteSessionStore,
    ToolContext,
    ToolError,
    ToolStarted,
    last_result,
    tool,
)

MODEL = os.environ.get("MODEL")
WRITTEN = ("I would like to see Lisbon for 3 nights.", "And what does it come to?", "Rather Kyoto, for 5 nights.")
FLIGHTS = {"Lisbon": ("TP 571", 180), "Kyoto": ("JL 408", 940)}
HOTELS = {"Lisbon": ("Casa do Miradouro", 95), "Kyoto": ("Ryokan Kamo", 130)}


@tool
async def plan_journey(city: str, nights: int) -> Handoff:
    """Note where the user wants to go and for how long, and go on to the flight."""
    if city not in FLIGHTS:
        raise ToolError(f"We don't go to {city}, but to {' and '.join(FLIGHTS)}.")
    return Handoff(
        target_agent_name="Flights", reason="there is a city", context_updates={"city": city, "nights": nights}
    )


@tool
async def book_flight(context: ToolContext) -> Handoff:
    """Book the flight to the city of the journey, and go on to the hotel."""
    number, euros = FLIGHTS[context.state["city"]]
    return Handoff(
        target_agent_name="Hotels", reason="there is a flight", context_updates={"flight": number, "fare": euros}
    )


@tool
async def book_hotel(context: ToolContext) -> dict[str, Any]:
    """Book the hotel for the nights of the journey."""
    name, euros = HOTELS[context.state["city"]]
    context.state["hotel"], context.state["room"] = name, euros * context.state["nights"]
    return {"hotel": name, "flight": context.state["flight"], "nights": context.state["nights"]}


@tool
async def add_up(context: ToolContext) -> int:
    """What the journey costs, in euros."""
    return int(context.state["fare"] + context.state["room"])


model = MODEL or "gpt-4o"
planner = Agent("Planner", "Find out where the user wants to go, for how many nights. Be brief.", model, [plan_journey])
flights = Agent("Flights", "Book the flight at once.", model, [book_flight])
hotels = Agent("Hotels", "Book the hotel at once. Be brief.", model, [book_hotel, add_up])
planner.add_handoff(flights)
flights.add_handoff(hotels)
hotels.add_handoff(planner)


def scripted() -> ScriptedEngine:
    """What the agents say where no model is named."""

    def booked(request: EngineRequest) -> str:
        return "Flight {flight}, then {nights} nights at the {hotel}.".format(**last_result(request))

    engine = ScriptedEngine(default="Where would you like to go, and for how many nights?")
    journey = r"(?=.*(?P<city>Lisbon|Kyoto))(?=.*\b(?P<nights>\d+))"  # in whichever order they are said
    engine.when(journey, agent="Planner", call="plan_journey")
    engine.when(journey, result_of="transfer_to_planner", call="plan_journey")
    engine.when(result_of="plan_journey", agent="Flights", call="book_flight")
    engine.when(result_of="book_flight", agent="Hotels", call="book_hotel")
    engine.when(result_of="book_hotel", reply=booked)
    engine.when("Lisbon|Kyoto", agent="Hotels", call="transfer_to_planner", args={"reason": "another city"})
    engine.when("come to|cost", agent="Hotels", call="add_up")
    engine.when(result_of="add_up", reply=lambda request: f"{last_result(request)} euros in all.")
    return engine


async def say(runner: Runner, text: str) -> None:
    """Have one message answered, and print what each agent does meanwhile."""
    print(f"you: {text}")
    async with runner.run_stream("journey", text) as stream:
        async for event in stream:
            if isinstance(event, HandedOff):
                print(f"  handed over to {event.agent_name}: {event.handoff.reason}")
            elif isinstance(event, ToolStarted):
                print(f"  {event.agent_name} calls {event.call.name} {dict(event.call.args)}")
    print(f"{stream.response.active_agent_name}: {stream.response.content}")


async def main(*texts: str) -> None:
    """Say these things, and show the state that the agents share."""
    async with SQLiteSessionStore(os.environ.get("CHAT_DB", "./journey.db")) as store:
        runner = Runner(planner, store, LiteLLMEngine() if MODEL else scripted())
        for text in texts or WRITTEN:
            await say(runner, text)
        session = await store.get("journey")
        assert session is not None
        print(f"({session.active_agent_name} has the conversation; {dict(session.state)})")


if __name__ == "__main__":
    try:
        anyio.run(main, *sys.argv[1:])
    except ChatflowError as error:
        sys.exit(f"swarm: {error}")
