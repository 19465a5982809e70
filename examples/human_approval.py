"""Refunds that a person has to approve; each command is a process of its own, so that what waits outlives them all.

    python human_approval.py say ann "Order 404 came broken. I want my 20 euros back."
    python human_approval.py waiting
    python human_approval.py approve ann CALL
    python human_approval.py reject ann CALL "It was opened."

The turn in which an agent wants to pay back ends there, and the call waits in the file, for minutes or days. Whoever
decides runs it, once: a decision made again gives its answer again, and the opposite one is refused.

Set in the environment: CHAT_DB, the SQLite file (./refunds.db); MODEL, the model that answers, and its provider's key
(without a model a script answers).
"""

import argparse
import os
import sys
from collections.abc import AsyncIterator

import anyio

from chatflow import (
    Agent,
    AgentResponse,
    ApprovalDecidedError,
    ApprovalNotFoundError,
    ChatflowError,
    EngineRequest,
    LiteLLMEngine,
    Runner,
    ScriptedEngine,
    SessionContext,
    SessionNotFoundError,
    SQLiteSessionStore,
    ToolContext,
    tool,
)

MODEL = os.environ.get("MODEL")


@tool(requires_approval=True, idempotent=True)  # a payment that was cut off is made again, with the same key
async def refund(order_id: str, euros: int, context: ToolContext) -> str:
    """Pay back what an order has cost, or a part of it."""
    # Stands for the payment service: it takes a key, and pays once for each.
    print(f"[paying {euros} euros back for order {order_id}, key {context.idempotency_key[:8]}]")
    return f"{euros} euros are on their way."


def scripted() -> ScriptedEngine:
    """What the agent says where no model is named."""

    def outcome(request: EngineRequest) -> str:
        result = request.messages[-1].tool_results[-1]
        return f"I am sorry, we can't pay that back: {result.content}" if result.is_error else f"Yes: {result.content}"

    engine = ScriptedEngine(default="Which order is it, and how much has it cost?")
    engine.when(r"order (?P<order_id>\d+).*?(?P<euros>\d+) euros", call="refund")
    engine.when(result_of="refund", reply=outcome)
    return engine


support = Agent("Support", "Help with orders. Be brief.", model=MODEL or "gpt-4o", tools=[refund])


def show(response: AgentResponse) -> None:
    """Print what became of a turn: an answer, or what has to be decided first."""
    if response.duplicate:
        print("(decided before)")
    if response.content:
        print(f"{response.active_agent_name}: {response.content}")
    for call in response.awaiting_approval:
        print(f"{call.id} waits for approval: {call.name} {dict(call.args)}")


async def conversations(store: SQLiteSessionStore) -> AsyncIterator[SessionContext]:
    """All that are in the file, a page at a time."""
    after = None
    while True:
        page = await store.list_sessions(after=after)
        for info in page.items:
            session = await store.get(info.session_id)
            if session is not None:
                yield session
        if page.next is None:
            return
        after = page.next


async def main(options: argparse.Namespace) -> None:
    """Do what one command says."""
    async with SQLiteSessionStore(os.environ.get("CHAT_DB", "./refunds.db")) as store:
        runner = Runner(support, store, LiteLLMEngine() if MODEL else scripted())
        by = {
            "decided_by": os.environ.get("USER", "somebody")
        }  # who may decide is the application's to say, before it calls
        match options.command:
            case "say":
                show(await runner.run_async(options.customer, options.text))
            case "waiting":
                async for session in conversations(store):
                    for call in session.pending_approvals:
                        print(f"{session.session_id} {call.id}: {call.name} {dict(call.args)}")
            case "approve":
                show(await runner.approve(options.customer, options.call, metadata=by))
            case "reject":
                show(await runner.reject(options.customer, options.call, options.reason, metadata=by))


def arguments() -> argparse.Namespace:
    """The command, and what goes with it."""
    parser = argparse.ArgumentParser(description="Refunds that a person has to approve.")
    commands = parser.add_subparsers(dest="command", required=True)
    say = commands.add_parser("say", help="be a customer, and say something")
    say.add_argument("customer")
    say.add_argument("text")
    commands.add_parser("waiting", help="list the calls that wait for a decision")
    for name in ("approve", "reject"):
        decide = commands.add_parser(name, help=f"{name} a call")
        decide.add_argument("customer")
        decide.add_argument("call")
        if name == "reject":
            decide.add_argument("reason", nargs="?")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        anyio.run(main, arguments())
    except (ApprovalNotFoundError, SessionNotFoundError) as error:
        sys.exit(f"human_approval: {error.session_id} has no such call that waits; `waiting` lists those that do")
    except ApprovalDecidedError as error:
        before = "approved" if error.approved else "rejected"
        sys.exit(f"human_approval: {error.call_id} was {before} before, and that stands")
    except ChatflowError as error:
        sys.exit(f"human_approval: {error}")
