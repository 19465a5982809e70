"""What an agent's model is asked with: the conversation, and what the agent's providers add to it or choose of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import attrs

from chatflow.core.engine import EngineReply
from chatflow.core.messages import Message, Role
from chatflow.core.providers import AgentRun
from chatflow.core.service import ServiceStep
from chatflow.core.tools import Tool
from chatflow.core.turn import Turn
from chatflow.core.values import EMPTY

_MOST_PROBLEMS: Final = 10
"""So many are told to a model; they tend to have one cause."""


@attrs.define(eq=False)
class Contents:
    """What the agent of *run* is asked with in *turn*; *came_after* was said last when the agent came in.

    The turn *goes_on* with an earlier one where a person has decided about a call of that: others may stand between.
    """

    turn: Turn
    run: AgentRun
    came_after: Message | None
    goes_on: bool = False
    choose: Callable[[], Awaitable[Sequence[Message]]] | None = None
    """Asks the agent's history provider, if it has one."""
    _chosen: Sequence[Message] = ()
    _chosen_from: Sequence[Message] | None = None
    _is_told: bool = False
    """Whether what was added has been sent: a service that keeps the history is sent it once."""
    _was_told: bool = False
    """The same before the model was asked last."""
    _correction: Sequence[Message] = ()
    """What is sent last, about an answer that was refused; it is stored nowhere."""
    _is_held: bool = False
    """Whether a service has that answer in the session that it is asked in again."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What the model is offered."""
        return self.run.tools

    async def instructions(self) -> str:
        """The agent's instructions, and after them what was added."""
        parts = [await self.run.agent.render_instructions(self.run.session), *self.run.instructions]
        return "\n\n".join(part for part in parts if part.strip())

    async def messages(self) -> tuple[Sequence[Message], frozenset[int]]:
        """What the prompt is made of, and which of it, by ids, was added for this turn or said by it.

        The same beginning each time in a turn, as far as nobody changes the history behind it.
        """
        self._was_told, self._is_told = self._is_told, True
        return await self.expected()

    async def expected(self, *coming: Message) -> tuple[Sequence[Message], frozenset[int]]:
        """The same as it would be with *coming*, which the turn has not said so far."""
        added, session = self.run.messages, self.run.session
        if self.choose is not None and self._chosen_from is None:
            self._chosen_from = session.history
            self._chosen = await self.choose()
        before, own = self.run.split_history()
        if self._chosen_from is not None:
            left_out = set(map(id, self._chosen_from)) - set(map(id, session.history)) | set(map(id, own))
            before = [message for message in self._chosen if id(message) not in left_out]
        systems = [message for message in added if message.role is Role.SYSTEM]
        others = [message for message in added if message.role is not Role.SYSTEM]
        at = self._place(own)
        turn = [*systems, *own[:at], *others, *own[at:], *coming, *self._correction]
        said, later = self._gone_on_with(turn, before)
        return [*before[:later], *turn[:said], *before[later:], *turn[said:]], frozenset(map(id, turn))

    def _gone_on_with(self, turn: Sequence[Message], before: Sequence[Message]) -> tuple[int, int]:
        """How much of *turn* was said by the one that it goes on with, and where of *before* begins what came later."""
        ids = list(map(id, self.run.session.history)) if self.goes_on else []
        if id(self.run.input) not in ids:
            return 0, len(before)
        own = set(map(id, turn))
        gone_on_with = set(map(id, self.turn.working.base.history)) & own
        said = 1 + max(place for place, message in enumerate(turn) if id(message) in gone_on_with)
        after = set(ids[ids.index(id(self.run.input)) :])
        return said, next((place for place, message in enumerate(before) if id(message) in after), len(before))

    def unseen(self) -> tuple[Sequence[Message], int]:
        """The same where a service keeps the history, and how many of these messages the service has seen.

        What was added is sent once: with the first request of its agent in this turn.
        """
        working, added = self.turn.working, self.run.messages
        history, seen = working.window.history(), working.seen
        body = list(history.body_from(0))
        systems = [*history.systems_from(0), *(message for message in added if message.role is Role.SYSTEM)]
        self._was_told, self._is_told = self._is_told, True
        if not self._was_told:
            earlier = set(map(id, self.run.earlier))
            own = [message for message in body if id(message) not in earlier]
            at = self._place(own)
            place = max(seen, len(body) if at == len(own) else [*map(id, body)].index(id(own[at])))
            body[place:place] = [message for message in added if message.role is not Role.SYSTEM]
        if self._is_held:
            return [*systems, *body, *self._correction], len(systems) + len(body)
        systems += self._correction
        return [*systems, *body], len(systems) + seen

    def correct(self, reply: EngineReply, step: ServiceStep | None, problems: Mapping[str, str]) -> None:
        """Have the next request ask again, saying what is wrong with *reply*, which *step* has come to at a service.

        A service is asked from where it was asked before, and is told in the instructions, which it does not keep, so
        that it goes on from what is stored here. A session that has one id for all of it holds the reply already, and
        takes what is wrong with it as a user's message.
        """
        working = self.turn.working
        kept, refusal = working.service, _refusal(problems)
        self._is_held = step is not None and kept is not None and step.session.id == kept.id
        if self._is_held and reply.tool_calls:
            # It was offered no tools: nobody will answer these calls, which the service would wait for.
            working.service, self._is_held = None, False
        if self._is_held:
            self._correction = [Message(Role.USER, refusal)]
            return
        self._is_told = self._was_told
        if step is not None:
            said = f"You have answered this before, with:\n{reply.text}"
            self._correction = [Message(Role.SYSTEM, f"{said}\n\n{refusal}")]
            return
        extra = EMPTY if reply.tool_calls else reply.extra  # it may speak of calls, which are not sent
        answer = Message(Role.MODEL, reply.text, agent_name=self.run.agent.name, extra=extra)
        self._correction = [*([answer] if answer.text.strip() else []), Message(Role.USER, refusal)]

    def _place(self, own: Sequence[Message]) -> int:
        """Where among the turn's *own* messages the added ones stand."""
        places = {id(message): place for place, message in enumerate(own)}
        if self.turn.working.service is not None and self.came_after is not None:
            # The service has the user's message by now, and takes only what comes after its own last word.
            return places.get(id(self.came_after), len(own) - 1) + 1
        return places.get(id(self.run.input), 0)


def _refusal(problems: Mapping[str, str]) -> str:
    shown = [f"- {path}: {problem}" for path, problem in list(problems.items())[:_MOST_PROBLEMS]]
    if len(problems) > len(shown):
        shown.append(f"- and {len(problems) - len(shown)} more")
    return "\n".join(["That answer can't be used:", *shown, "Answer again, with the corrected JSON and nothing else."])
