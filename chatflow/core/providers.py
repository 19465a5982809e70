"""Context providers: what an application adds to an agent's runs, and what it learns from them."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import attrs

from chatflow.core.handoffs import handoff_tool_name
from chatflow.core.messages import ADDED_BY_KEY, AgentResponse, Message
from chatflow.core.state import Namespace
from chatflow.core.tools import Tool, to_tool
from chatflow.exceptions import ToolError, shorten

if TYPE_CHECKING:
    from chatflow.core.agent import Agent
    from chatflow.core.session import AgentSession

OnError = Literal["fail", "log"]


class _ClassName:
    """What stands for a name where a class gives none: its own."""

    def __get__(self, instance: object, owner: type) -> str:
        return owner.__name__


class ContextProvider:
    """What adds to the runs of an agent that has it: instructions, messages, tools. A base class; override either hook.

    In each turn, `before_run` is called the first time that the agent is to be asked, and `after_run` at the turn's
    end, once for each `before_run` that returned, in reverse order. Both belong to the turn: what they change in the
    session is committed with it, or leaves no trace. A turn that is resumed calls them anew.

    One object may serve many conversations at the same time, so it keeps what belongs to one in ``context.state``.

    Attributes:
        name: Tells the providers of an agent apart, and names its part of the state, the key ``"_" + name``; the name
            of the class by default. Keep it, or what was stored under it is not found again. Providers of one name, of
            several agents, share that part.
        on_error: What an exception of this provider does: ``"fail"`` fails the turn with it; ``"log"`` logs it, and
            the turn goes on as if the call that raised had changed and added nothing.
    """

    name: str = cast("str", _ClassName())
    on_error: OnError = "fail"

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        """Add to *context* what this run of *agent* is to have.

        For the agent that the turn begins with, the user's message is not in the history yet; it is `context.input`.
        """

    async def after_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        """Note what has come of the run: `context.response`, or `context.error` of a turn that failed.

        A turn that was answered commits after this, which may still fail: what is done elsewhere should bear that. Of
        a turn that failed, was cancelled or took too long nothing is committed, and each provider has 5 seconds, which
        no cancellation cuts short; an exception is then logged, and the turn's own error leaves.
        """


class HistoryProvider(ContextProvider):
    """Chooses what a model is sent of the conversation before this turn; what this turn says always follows.

    An agent has at most one. What is stored is the store's to say, and nothing of it is changed. As it is, it chooses
    what a conversation's window holds, as without it. Where a service keeps the history it is refused. What it chooses
    is cut as any history is where it is more than *max_prompt_tokens* lets through.
    """

    async def get_messages(self, agent: Agent, session: AgentSession, context: RunContext) -> Sequence[Message]:
        """The messages to send before those of this turn: of `context.history`, or others in their place.

        Called once in a turn, when *agent* is first asked, after its providers' `before_run`. System messages are sent
        only if they are chosen: ``prune(context.history, 5)`` keeps them, and whole turns. What is of this turn is not
        sent twice, and what a tool removes from the history later in the turn is not sent any more.
        """
        return context.history


@attrs.define(eq=False)
class Additions:
    """What one *provider* has added to a run, until that is closed."""

    provider: str
    instructions: list[str] = attrs.field(factory=list[str])
    messages: list[Message] = attrs.field(factory=list[Message])
    to_store: list[Message] = attrs.field(factory=list[Message])
    tools: list[Tool] = attrs.field(factory=list[Tool])
    is_closed: bool = False


@attrs.define(kw_only=True, eq=False)
class AgentRun:
    """One agent's part in one turn, which all of its providers see.

    *earlier* is the history that the turn began with, *said* what it has said so far. A turn that begins with a
    decision about a call goes on with the one that made it: that one counts as said, and what came since as earlier.
    """

    agent: Agent
    session: AgentSession
    input: Message
    earlier: Sequence[Message]
    said: Sequence[Message]
    added: list[Additions] = attrs.field(factory=list[Additions])
    response: AgentResponse | None = None
    error: BaseException | None = None
    _earlier_ids: frozenset[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._earlier_ids = frozenset(map(id, self.earlier))

    @property
    def instructions(self) -> list[str]:
        """What was added to the agent's instructions, in the providers' order."""
        return [text for added in self.added for text in added.instructions]

    @property
    def messages(self) -> list[Message]:
        """What is sent besides the conversation, in the providers' order."""
        return [message for added in self.added for message in added.messages]

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The agent's tools, then those that were added."""
        return (*self.agent.all_tools(), *chain.from_iterable(added.tools for added in self.added))

    def split_history(self) -> tuple[list[Message], list[Message]]:
        """The session's history as it is now: what stood there before this turn, and what is the turn's own."""
        history, earlier = self.session.history, self._earlier_ids
        return (
            [message for message in history if id(message) in earlier],
            [message for message in history if id(message) not in earlier],
        )


class RunContext:
    """One run, an agent's part in one turn, as one of its providers sees it.

    What is added is for this run alone, marked with the provider's name, and can be added only inside `before_run`.
    """

    def __init__(self, run: AgentRun, additions: Additions) -> None:
        self._run: Final = run
        self._additions: Final = additions
        self._state: Final = Namespace(run.session, f"_{additions.provider}")

    @property
    def input(self) -> Message:
        """The user's message that this turn answers, or goes on to answer once a person has decided about a call."""
        return self._run.input

    @property
    def state(self) -> MutableMapping[str, Any]:
        """The provider's own part of the session's state: committed with the turn, or rolled back with it."""
        return self._state

    @property
    def history(self) -> tuple[Message, ...]:
        """The conversation before this turn, as far as it is in the session's history still."""
        return tuple(self._run.split_history()[0])

    @property
    def messages(self) -> tuple[Message, ...]:
        """What this turn has said so far: the user's message, calls and their results, the answer.

        Of one that goes on after a decision about a call: also the turn that made it.
        """
        return tuple(self._run.said)

    @property
    def response(self) -> AgentResponse | None:
        """In `after_run`, the turn's answer; None for a turn that failed."""
        return self._run.response

    @property
    def error(self) -> BaseException | None:
        """In `after_run`, what the turn failed with; None for one that was answered."""
        return self._run.error

    def add_instructions(self, text: str) -> None:
        """Add to the agent's instructions, after a blank line.

        Raises:
            RuntimeError: `before_run` has ended.
            TypeError: *text* is not a string.
        """
        additions = self._open()
        if not isinstance(text, str):
            raise TypeError(f"instructions must be a string, not {type(text).__name__}")
        additions.instructions.append(text)

    def add_messages(self, *messages: Message, store: bool = False) -> None:
        """Have the model sent *messages* before the user's message of this turn; system messages go in front.

        With *store* they become part of the conversation: before the user's message, or, for an agent that the
        conversation was handed to in this turn, after what was said so far. Otherwise they are sent in this turn and
        forgotten; where a service keeps the history, it is sent them once.

        Raises:
            RuntimeError: `before_run` has ended.
            TypeError: One of them is not a Message.
        """
        additions = self._open()
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"add_messages takes messages, not {type(message).__name__}")
        kept = additions.to_store if store else additions.messages
        kept += [added_by(additions.provider, message) for message in messages]

    def add_tools(self, *tools: Tool | Callable[..., Any]) -> None:
        """Offer *tools* with the agent's own. A function is made a tool each time: better to make one and keep it.

        Raises:
            RuntimeError: `before_run` has ended.
            ToolError: A function can't be made a tool, or the agent or another provider has another tool of its name.
            TypeError: One of them is neither a tool nor a function.
        """
        additions = self._open()
        for tool in map(to_tool, tools):
            if not any(tool is present for present in (*self._run.tools, *additions.tools)):
                self._refuse_taken(tool)
                additions.tools.append(tool)

    def _open(self) -> Additions:
        if self._additions.is_closed:
            raise RuntimeError(
                f"provider {shorten(self._additions.provider)}: before_run has ended, and only inside it something can"
                " be added to a run"
            )
        return self._additions

    def _refuse_taken(self, tool: Tool) -> None:
        agent = self._run.agent
        owners = {handoff_tool_name(peer.name): f"the handoff to {shorten(peer.name)}" for peer in agent.handoffs}
        owners |= {present.name: "a tool" for present in agent.tools}
        taken = {name: f"agent {shorten(agent.name)} has {what} of that name" for name, what in owners.items()}
        for added in (*self._run.added, self._additions):
            whose = f"provider {shorten(added.provider)} has added one of that name"
            taken |= {present.name: whose for present in added.tools}
        if tool.name in taken:
            raise ToolError(
                f"provider {shorten(self._additions.provider)} adds a tool named {tool.name}, and {taken[tool.name]};"
                " give one of them another name=",
                tool=tool.name,
            )


def added_by(provider: str, message: Message) -> Message:
    """*message* as one that *provider* has added."""
    return attrs.evolve(message, extra={**message.extra, ADDED_BY_KEY: provider})
