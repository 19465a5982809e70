"""Who answers in ``chatflow chat`` where no model is named: agents by a script, with nothing behind them.

Their names are nobody else's: a runner does accepted messages of its conversation that wait for an agent of that name.
"""

from __future__ import annotations

from typing import Final

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.messages import Role
from chatflow.core.tools import tool
from chatflow.engines.scripted import ScriptedEngine

SAYS_SO: Final = (
    "no model is named, so a script answers, offline: --model NAME asks a model, --agents MODULE:AGENT runs your own."
    ' Try "where is order 404?", "refund order 404" or "my invoice is wrong"'
)

_BILLING: Final = "Scripted billing"


def offline_agent() -> Agent:
    """Two agents that show what there is: a tool, one that a person has to approve, a handoff."""

    @tool
    async def check_order_status(order_id: str) -> dict[str, str]:
        """Check shipment tracking for an order."""
        return {"order_id": order_id, "status": "IN_TRANSIT", "eta": "Tomorrow"}

    @tool(requires_approval=True)
    async def refund(order_id: str) -> str:
        """Pay an order back."""
        return f"order {order_id} is paid back (not really: this is a script)"

    billing = Agent(_BILLING, "Billing specialist.")
    tools = [check_order_status, refund]
    return Agent("Scripted support", "Help with orders.", tools=tools, handoffs=[billing])


def offline_engine() -> ScriptedEngine:
    """What those agents say."""
    engine = ScriptedEngine(default=_echo)
    engine.when(agent=_BILLING, reply="Billing here. Which invoice is it?")
    engine.when(r"refund.*?order (?P<order_id>\d+)", call="refund")
    engine.when(r"order (?P<order_id>\d+)", call="check_order_status")
    engine.when("invoice", call="transfer_to_scripted_billing")
    engine.when(result_of="check_order_status", reply="It is on its way, and arrives tomorrow.")
    engine.when(result_of="refund", reply="That is settled.")
    return engine


def _echo(request: EngineRequest) -> str:
    said = [message.text for message in request.messages if message.role is Role.USER]
    return f"You said: {said[-1]} (This is message {len(said)} that I can see of yours.)"
