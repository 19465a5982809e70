"""The context providers in one turn: called before their agent is first asked, and told at the end how it went."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import anyio

from chatflow.core.agent import Agent
from chatflow.core.finish import finish, is_cancellation
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.providers import Additions, AgentRun, ContextProvider, HistoryProvider, RunContext, added_by
from chatflow.core.turn import Turn
from chatflow.exceptions import shorten
from chatflow.running.contents import Contents

logger = logging.getLogger("chatflow.runner")

LAST_WORD_SECONDS: Final = 5.0
"""How long each `after_run` may take once its turn has failed: whoever cancelled it waits for that."""


class Providing:
    """The providers of all agents that are asked in *turn*; *said* is what it has said so far."""

    def __init__(self, turn: Turn) -> None:
        self.said: Final[list[Message]] = []
        self._turn: Final = turn
        self._contents: Final[dict[str, Contents]] = {}
        self._begun: Final[list[tuple[ContextProvider, AgentRun, RunContext]]] = []
        self._input: Message | None = None
        self._earlier: Sequence[Message] = ()
        self._goes_on = False

    def begin(self, user_message: Message) -> None:
        """Note what the turn answers, which has not been said yet."""
        self._input, self._earlier = user_message, self._turn.working.base.history

    def go_on(self, said: Sequence[Message]) -> None:
        """Note that the turn goes on with an earlier one: *said*, from its user's message on, counts as said by it."""
        own = set(map(id, said))
        self._input, self._goes_on = said[0], True
        self._earlier = [message for message in self._turn.working.base.history if id(message) not in own]
        self.said.extend(said)

    async def prepare(self, agent: Agent) -> Contents:
        """What *agent* is to be asked with; its providers are called the first time only."""
        contents = self._contents.get(agent.name)
        if contents is not None:
            return contents
        assert self._input is not None
        run = AgentRun(
            agent=agent,
            session=self._turn.session,
            input=self._input,
            earlier=self._earlier,
            said=self.said,
        )
        came_after = self.said[-1] if self.said else None
        contents = self._contents[agent.name] = Contents(self._turn, run, came_after, self._goes_on)
        for provider in agent.context_providers:
            await self._before(provider, run, contents)
        return contents

    async def _before(self, provider: ContextProvider, run: AgentRun, contents: Contents) -> None:
        additions = Additions(provider.name)
        context = RunContext(run, additions)
        if isinstance(provider, HistoryProvider):
            contents.choose = lambda: self._choose(provider, run, context)
        with self._guarded(provider, "before_run"):
            try:
                await provider.before_run(run.agent, run.session, context)
            finally:
                additions.is_closed = True
            self._begun.append((provider, run, context))
            for message in additions.to_store:
                await run.session.add_message(message)
            run.added.append(additions)

    async def _choose(self, provider: HistoryProvider, run: AgentRun, context: RunContext) -> Sequence[Message]:
        """What *provider* chooses of the history, or all of it where that fails and is only logged."""
        history = run.session.history
        with self._guarded(provider, "get_messages"):
            found = await provider.get_messages(run.agent, run.session, context)
            chosen = list(found) if isinstance(found, Iterable) else [found]
            for message in chosen:
                if not isinstance(message, Message):
                    raise TypeError(
                        f"get_messages of provider {shorten(provider.name)} must return messages, not"
                        f" {type(message).__name__}"
                    )
            stored = set(map(id, history))
            return [message if id(message) in stored else added_by(provider.name, message) for message in chosen]
        return history

    async def succeed(self, response: AgentResponse) -> None:
        """Tell the providers that the turn is answered, before it commits; an error of one of them fails it."""
        for contents in self._contents.values():
            contents.run.response = response
        while self._begun:
            provider, run, context = self._begun.pop()
            with self._guarded(provider, "after_run"):
                await provider.after_run(run.agent, run.session, context)

    async def fail(self, error: BaseException) -> None:
        """Tell the providers that have not been told yet that the turn has failed; no cancellation leaves one out."""
        for contents in self._contents.values():
            contents.run.response, contents.run.error = None, error
        # An error that is kept where its traceback leads to would stay until the garbage is collected.
        self._contents.clear()
        while self._begun:
            with suppress(asyncio.CancelledError):  # which has come meanwhile, and after an error that goes before it
                await finish(self._tell(*self._begun.pop()))

    async def _tell(self, provider: ContextProvider, run: AgentRun, context: RunContext) -> None:
        try:
            with anyio.move_on_after(LAST_WORD_SECONDS) as scope:
                await provider.after_run(run.agent, run.session, context)
            if scope.cancelled_caught:
                self._log(provider, f"was given up in after_run of a failed turn, after {LAST_WORD_SECONDS:g} s")
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # the turn's own error leaves
            self._log(provider, "failed in after_run of a turn that had failed", error)

    @contextmanager
    def _guarded(self, provider: ContextProvider, hook: str) -> Generator[None]:
        """Where *provider* says so, log its error and undo what it has done, instead of letting the turn fail."""
        working = self._turn.working
        before = working.snapshot() if provider.on_error == "log" else None
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            # Awaiting a task that was cancelled raises the same as being cancelled, and is an error like others.
            if before is None or is_cancellation(error):
                raise
            working.go_back(before)
            self._log(provider, f"failed in {hook}; the turn goes on without that", error)

    def _log(self, provider: ContextProvider, what: str, error: BaseException | None = None) -> None:
        logger.log(
            logging.WARNING if error is None else logging.ERROR,
            "session %s: provider %s %s",
            shorten(self._turn.session.session_id),
            shorten(provider.name),
            what,
            exc_info=error,
        )
