"""What an agent's model is asked with: the conversation, and what the agent's providers add to it or choose of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs

from chatflow.core.messages import Message, Role
from chatflow.core.providers import AgentRun
from chatflow.core.tools import Tool
from chatflow.core.turn import Turn


@attrs.define(eq=False)
class Contents:
    """What the agent of *run* is asked with in *turn*; *came_after* was said last when the agent came in."""

    turn: Turn
    run: AgentRun
    came_after: Message | None
    choose: Callable[[], Awaitable[Sequence[Message]]] | None = None
    """Asks the agent's history provider, if it has one."""
    _chosen: Sequence[Message] = ()
    _chosen_from: Sequence[Message] | None = None
    _is_told: bool = False
    """Whether what was added has been sent: a service that keeps the history is sent it once."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What the model is offered."""
        return self.run.tools

    async def instructions(self) -> str:
        """The agent's instructions, and after them what was added."""
        parts = [await self.run.agent.render_instructions(self.run.session), *self.run.instructions]
        return "\n\n".join(part for part in parts if part.strip())

    async def messages(self) -> Sequence[Message]:
        """What the prompt is made of: what came before this turn, what was added for it, and what it has said.

        The same beginning each time in a turn, as far as nobody changes the history behind it.
        """
        added, session = self.run.messages, self.run.session
        self._is_told = True
        if self.choose is not None and self._chosen_from is None:
            self._chosen_from = session.history
            self._chosen = await self.choose()
        if self._chosen_from is None and not added:
            return session.history
        before, own = self.run.split_history()
        if self._chosen_from is not None:
            left_out = set(map(id, self._chosen_from)) - set(map(id, session.history)) | set(map(id, own))
            before = [message for message in self._chosen if id(message) not in left_out]
        systems = [message for message in added if message.role is Role.SYSTEM]
        others = [message for message in added if message.role is not Role.SYSTEM]
        at = self._place(own)
        return [*before, *systems, *own[:at], *others, *own[at:]]

    def unseen(self) -> tuple[Sequence[Message], int]:
        """The same where a service keeps the history, and how many of these messages the service has seen.

        What was added is sent once: with the first request of its agent in this turn.
        """
        working, added = self.turn.working, self.run.messages
        history, seen = working.window.history(), working.seen
        body = list(history.body_from(0))
        systems = [*history.systems_from(0), *(message for message in added if message.role is Role.SYSTEM)]
        if not self._is_told:
            self._is_told = True
            earlier = set(map(id, self.run.earlier))
            own = [message for message in body if id(message) not in earlier]
            place = max(seen, len(body) - len(own) + self._place(own))
            body[place:place] = [message for message in added if message.role is not Role.SYSTEM]
        return [*systems, *body], len(systems) + seen

    def _place(self, own: Sequence[Message]) -> int:
        """Where among the turn's *own* messages the added ones stand."""
        places = {id(message): place for place, message in enumerate(own)}
        if self.turn.working.service is not None and self.came_after is not None:
            # The service has the user's message by now, and takes only what comes after its own last word.
            return places.get(id(self.came_after), len(own) - 1) + 1
        return places.get(id(self.run.input), 0)
