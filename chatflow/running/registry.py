"""The agents of a runner: who they are, what answers for them, and what their stored answers say."""

from __future__ import annotations

import logging
from functools import cache
from typing import Final

import attrs

from chatflow.core.agent import Agent
from chatflow.core.engine import Engine
from chatflow.core.messages import AgentResponse
from chatflow.engines.litellm import LiteLLMEngine
from chatflow.exceptions import shorten

logger = logging.getLogger("chatflow.runner")


class Registry:
    """The agents of one runner, and what answers for them.

    Nobody else's agents count, not even those that the session was given: after a restart they would be gone.
    """

    def __init__(self, starting_agent: Agent, engine: Engine | None) -> None:
        self.starting_agent: Final = starting_agent
        self._engine: Final = engine

    def agents(self) -> dict[str, Agent]:
        """The starting agent and all that handoffs lead to, by name, as things stand now."""
        return self.starting_agent.reachable()

    def engine_for(self, agent: Agent) -> Engine:
        """The agent's own engine, else the runner's, else one that asks by the agent's model."""
        return agent.engine or self._engine or _default_engine()

    def with_output(self, response: AgentResponse, session_id: str) -> AgentResponse:
        """A stored answer with its output, as the type that its agent's answers are of now; None where it is not."""
        agent = self.agents().get(response.active_agent_name)
        if agent is None or agent.output is None or response.stop_reason in {"approval", "not_stored"}:
            return response
        try:
            return attrs.evolve(response, output=agent.output.read(response.content))
        except Exception as error:  # noqa: BLE001  # what was answered stays answered, whatever a type makes of it now
            logger.warning(
                "session %s: the stored answer of agent %s is not of its output_type now (%s)",
                shorten(session_id),
                shorten(agent.name),
                type(error).__name__,
            )
            return response


@cache
def _default_engine() -> Engine:
    # One for all: it keeps nothing of whom it answers, and a runner may be made for each message.
    return LiteLLMEngine()
