"""Agent: who answers, with which instructions, tools and colleagues to hand over to.

One class with all that users call on an agent, which is why it is long.
"""

from __future__ import annotations

import datetime as dt
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args, overload

from chatflow.core.budget import check_max_prompt_tokens
from chatflow.core.engine import DECIDED_ELSEWHERE, check_engine
from chatflow.core.handoffs import handoff_tool, handoff_tool_name
from chatflow.core.output import Output
from chatflow.core.providers import ContextProvider, HistoryProvider, OnError
from chatflow.core.service import ServiceSession
from chatflow.core.tools import Tool, to_tool
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.exceptions import HandoffError, ToolError, shorten

if TYPE_CHECKING:
    from chatflow.core.engine import Engine
    from chatflow.core.messages import AgentResponse
    from chatflow.core.service import OnLostServiceSession, ServiceSessionId
    from chatflow.core.session import AgentSession, SessionContext
    from chatflow.core.store import BaseSessionStore
    from chatflow.runner import Runner
    from chatflow.running.stream import RunStream

_Text: TypeAlias = str | Awaitable[str]
_Renderer: TypeAlias = "Callable[[AgentSession], _Text] | Callable[[SessionContext], _Text] | Callable[[], _Text]"
Instructions: TypeAlias = "str | _Renderer"

FRESH: Final[Any] = object()
"""Stands for a session that nobody has named."""

_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Agent:
    """One of the agents a conversation can be with.

    Sessions store an agent by its *name*, which therefore is unique among all agents that hand over to one another.
    *instructions* is text, or a function that takes the session or nothing and returns the text, async or not; it is
    called on the event loop at each turn, so it must not block. *tools* are tools or functions to make tools of.
    *handoffs* are agents this one may hand the conversation to; two may name each other, with `add_handoff`. *engine*
    answers for this agent; without one the runner's does, by *model*. *context_providers* add to its runs, in this
    order; at most one of them is a `HistoryProvider`. *settings* go with each of its requests, by the names that the
    engine knows them by, and before the engine's own: ``{"temperature": 0, "tool_choice": "auto"}``. It is sent at most
    *max_prompt_tokens* of a conversation, instructions and tools included, as `Runner` says; without a number as many
    as its runner's.

    With an *output_type* the response's `output` is an instance of it: an attrs class, a dataclass, a pydantic model,
    or anything else that pydantic can check and describe, such as ``list[Order]``; not `str`, which is what an agent
    answers without one. The model is told its schema; an answer that is not of it is asked for once more, with what is
    wrong with it, and then is an `EngineOutputError`.

    Raises:
        ToolError: A function can't be made a tool, or two tools have one name.
        HandoffError: Two different agents have one name, or names that give one tool name, or it names itself.
        TypeError: An argument is of a wrong type, or *output_type* can't be described to a model.
        ValueError: *name*, *model* or a setting's name is blank, or a setting is what every request has otherwise, such
            as ``model``, or two providers have one name or both choose the history, or *max_prompt_tokens* is below 1.
    """

    def __init__(
        self,
        name: str,
        instructions: Instructions = "",
        model: str = "gemini-2.5-flash",
        tools: Iterable[Tool | Callable[..., Any]] = (),
        handoffs: Iterable[Agent] = (),
        engine: Engine | None = None,
        context_providers: Iterable[ContextProvider] = (),
        settings: Mapping[str, Any] = EMPTY,
        output_type: Any = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._name: Final = _named("name", name)
        self._model: Final = _named("model", model)
        self._takes_session: Final = _takes_session(instructions)
        self._instructions: Final = instructions
        if engine is not None:
            check_engine(engine)
        self._engine: Final = engine
        self._context_providers: Final = _providers(context_providers)
        if not isinstance(settings, Mapping):
            raise TypeError(f"settings must be a mapping, not {type(settings).__name__}")
        self._settings: Final = FrozenDict({_setting(name): settings[name] for name in settings})
        self._output_type: Final = output_type
        self._output: Final = None if output_type is None else self._described(output_type)
        self._max_prompt_tokens: Final = check_max_prompt_tokens(max_prompt_tokens)
        self._tools: dict[str, Tool] = {}
        self._handoffs: dict[str, tuple[Agent, Tool]] = {}
        for each in _several("tools", tools):
            self.add_tool(each)
        for peer in _several("handoffs", handoffs):
            self.add_handoff(peer)

    @property
    def name(self) -> str:
        """What sessions know it by."""
        return self._name

    @property
    def instructions(self) -> Instructions:
        """As given; `render_instructions` makes text of them."""
        return self._instructions

    @property
    def model(self) -> str:
        """The model that answers, unless the engine decides by itself."""
        return self._model

    @property
    def engine(self) -> Engine | None:
        """What answers for this agent, where it has an engine of its own."""
        return self._engine

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Its own tools, in the order they were added; those that hand over are in `all_tools`."""
        return tuple(self._tools.values())

    @property
    def handoffs(self) -> tuple[Agent, ...]:
        """The agents it may hand over to, in the order they were added."""
        return tuple(peer for peer, _ in self._handoffs.values())

    @property
    def context_providers(self) -> tuple[ContextProvider, ...]:
        """What adds to its runs, in the order of the calls."""
        return self._context_providers

    @property
    def settings(self) -> Mapping[str, Any]:
        """What goes with each of its requests, by name."""
        return self._settings

    @property
    def output_type(self) -> Any:
        """What its answers are to be; None for text."""
        return self._output_type

    @property
    def output(self) -> Output | None:
        """The schema of its answers and the check of them, where it has an output type."""
        return self._output

    @property
    def max_prompt_tokens(self) -> int | None:
        """How many tokens it is sent at most, where it has a limit of its own."""
        return self._max_prompt_tokens

    @property
    def history_provider(self) -> HistoryProvider | None:
        """The one of them that chooses what is sent of the history, if one does."""
        return next((each for each in self._context_providers if isinstance(each, HistoryProvider)), None)

    def __repr__(self) -> str:
        return f"<Agent {shorten(self._name)}>"

    def add_tool(self, function: Tool | Callable[..., Any]) -> Tool:
        """Add a tool, or make one of a function; adding the same tool again changes nothing.

        Raises:
            ToolError: The function can't be made a tool, or another tool of this agent has its name.
            HandoffError: A tool that hands over has its name.
            TypeError: It is neither a tool nor a function.
        """
        added = to_tool(function)
        present = self._tools.get(added.name)
        if present is not None and present is not added:
            raise ToolError(
                f"agent {shorten(self._name)} has a tool named {added.name} already; give one of them another name=",
                tool=added.name,
            )
        if added.name in self._handoffs:
            raise self._tool_in_the_way(added.name, self._handoffs[added.name][0])
        self._tools[added.name] = added
        return added

    @overload
    def tool(
        self,
        function: Tool | Callable[..., Any],
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        idempotent: bool = False,
        requires_approval: bool = False,
    ) -> Tool: ...

    @overload
    def tool(
        self,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        idempotent: bool = False,
        requires_approval: bool = False,
    ) -> Callable[[Callable[..., Any]], Tool]: ...

    def tool(
        self,
        function: Tool | Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        idempotent: bool = False,
        requires_approval: bool = False,
    ) -> Tool | Callable[[Callable[..., Any]], Tool]:
        """Make a function a tool of this agent, as ``@agent.tool`` or ``@agent.tool(name=...)``; see `Tool`.

        Raises:
            ToolError: As `add_tool` does.
            HandoffError: As `add_tool` does.
        """
        plain = name is None and description is None and not idempotent and not requires_approval

        def add(decorated: Tool | Callable[..., Any]) -> Tool:
            if plain:
                return self.add_tool(decorated)
            return self.add_tool(
                Tool(
                    decorated,
                    name=name,
                    description=description,
                    idempotent=idempotent,
                    requires_approval=requires_approval,
                )
            )

        return add if function is None else add(function)

    def add_handoff(self, agent: Agent) -> None:
        """Let this agent hand the conversation over to *agent*; adding the same agent again changes nothing.

        Raises:
            HandoffError: It is this very agent; or another agent within reach has its name; or the name of the tool
                that would hand over to it is taken.
            TypeError: It is not an agent.
        """
        _require_agent(agent)
        if agent is self:
            raise HandoffError(f"agent {shorten(self._name)} can't hand over to itself")
        name = handoff_tool_name(agent.name)
        present = self._handoffs.get(name)
        if present is not None and present[0] is agent:
            return
        reach(self, agent)
        if present is not None:
            raise HandoffError(
                f"agents {shorten(present[0].name)} and {shorten(agent.name)} would both be handed over to by a tool"
                f" named {name}; give one of them another name"
            )
        if name in self._tools:
            raise self._tool_in_the_way(name, agent)
        self._handoffs[name] = agent, handoff_tool(name, agent)

    def all_tools(self) -> tuple[Tool, ...]:
        """What a model is offered: its own tools, then one for each agent it may hand over to."""
        return (*self.tools, *(handing_over for _, handing_over in self._handoffs.values()))

    async def render_instructions(self, session: AgentSession) -> str:
        """The instructions as text for this turn.

        Raises:
            TypeError: The function given as instructions returned something other than text.
            Exception: Whatever that function raises, unchanged.
        """
        text: Any = self._instructions
        if not isinstance(text, str):
            text = text(session) if self._takes_session else text()
            if inspect.isawaitable(text):
                text = await text
        if not isinstance(text, str):
            raise TypeError(
                f"the instructions of agent {shorten(self._name)} must return a string, not {type(text).__name__}"
            )
        return text

    def reachable(self) -> dict[str, Agent]:
        """This agent and all that handoffs lead to, by name, as things stand now; the nearest come first.

        Raises:
            HandoffError: Two different agents among them have one name.
        """
        return reach(self)

    # --- running by itself ---

    def create_session(
        self,
        session_id: str | None = None,
        store: BaseSessionStore | None = None,
        *,
        max_turns: int | None = None,
        expires_after: dt.timedelta | float | None = None,
    ) -> SessionContext:
        """A new session with this agent; nothing is read or written before its first turn.

        Without a *session_id* it has a random one of 128 bits. Without a *store* the session carries its own history;
        with one, its first turn creates the conversation there, or goes on with the one of that id. *max_turns* and
        *expires_after* are those of a conversation that it creates, as in `BaseSessionStore.get_or_create`. A first
        turn that fails leaves the conversation, empty.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: *session_id* is empty, or a number is too small.
            StoreOwnerRequiredError: The store requires an owner.
        """
        from chatflow.core.session import begin_session

        return begin_session(self, session_id, store, max_turns=max_turns, expires_after=expires_after)

    def get_session(
        self,
        service_session_id: ServiceSessionId,
        session_id: str | None = None,
        store: BaseSessionStore | None = None,
    ) -> SessionContext:
        """A new session that goes on with what a service keeps under *service_session_id*.

        Nothing is checked: not whether the service knows the id, and not whose it is. A service tells its ids apart by
        key or project, not by your users, so an id that came from outside may be another user's. The checked way is
        ``await store.for_owner(owner).get_by_service_id(agent, id)``.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: An id is empty.
            StoreOwnerRequiredError: The store requires an owner.
        """
        from chatflow.core.session import begin_session

        service = ServiceSession(service_session_id, self._name)
        return begin_session(self, session_id, store, service=service)

    async def run(
        self,
        user_message: str,
        *,
        session: AgentSession = FRESH,
        metadata: Mapping[str, Any] | None = None,
        message_id: str | None = None,
        on_lost_service_session: OnLostServiceSession = "raise",
    ) -> AgentResponse:
        """Answer *user_message*: one turn of *session*, or, where none is named, of a new one that is not kept.

        As `Runner.run_async` with this as its starting agent and all other settings as they are by default; a `Runner`
        of your own has more.

        Raises:
            SessionError: The session's active agent can't be reached from this agent by handoffs; nothing was changed.
            ChatflowError: As `Runner.run_async` does.
        """
        session, runner = self._ready(session, on_lost_service_session)
        return await runner.run_session(session, user_message, metadata, message_id=message_id)

    def run_stream(
        self,
        user_message: str,
        *,
        session: AgentSession = FRESH,
        metadata: Mapping[str, Any] | None = None,
        message_id: str | None = None,
        on_lost_service_session: OnLostServiceSession = "raise",
    ) -> RunStream:
        """As `run`, and what happens is told while it happens: see `RunStream`.

        Arguments are looked at now, and what else `run` raises is raised by the stream.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: *message_id* is empty, or *on_lost_service_session* unknown.
            SessionStateError: *metadata* holds what can't be kept.
        """
        session, runner = self._ready(session, on_lost_service_session)
        return runner.stream_session(session, user_message, metadata, message_id=message_id)

    async def approve(
        self,
        call_id: str,
        *,
        session: AgentSession,
        metadata: Mapping[str, Any] | None = None,
        on_lost_service_session: OnLostServiceSession = "raise",
    ) -> AgentResponse:
        """Run a call that waits in *session*, and go on with what comes of it: one turn, as `Runner.approve` is.

        Raises:
            ChatflowError: As `run` and `Runner.approve` do.
        """
        session, runner = self._ready(session, on_lost_service_session)
        return await runner.approve_session(session, call_id, metadata=metadata)

    async def reject(
        self,
        call_id: str,
        *,
        session: AgentSession,
        reason: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_lost_service_session: OnLostServiceSession = "raise",
    ) -> AgentResponse:
        """Refuse a call that waits in *session*, and go on without it: one turn, as `Runner.reject` is.

        Raises:
            ChatflowError: As `run` and `Runner.reject` do.
        """
        session, runner = self._ready(session, on_lost_service_session)
        return await runner.reject_session(session, call_id, reason, metadata=metadata)

    def _ready(self, session: AgentSession, on_lost: OnLostServiceSession) -> tuple[AgentSession, Runner]:
        """The session to run in, a new one where none is named, and what runs it."""
        from chatflow.core.session import AgentSession
        from chatflow.runner import Runner

        session = self.create_session() if session is FRESH else session
        if not isinstance(session, AgentSession):
            # None too: whoever looked for a session and found none would talk to one that forgets.
            raise TypeError(f"session must be an AgentSession or left out, not {type(session).__name__}")
        return session, Runner(self, session.store, on_lost_service_session=on_lost)

    def _described(self, output_type: Any) -> Output:
        # Describing a type runs what others wrote: any exception means that it can't be used.
        try:
            return Output(output_type)
        except Exception as error:
            reason = str(error).partition("\n\n")[0]
            raise TypeError(
                f"the output_type of agent {shorten(self._name)} can't be described to a model: {reason}"
            ) from error

    def _tool_in_the_way(self, name: str, peer: Agent) -> HandoffError:
        return HandoffError(
            f"agent {shorten(self._name)} has a tool named {name}, and the tool that hands over to agent"
            f" {shorten(peer.name)} has that name too; give one of them another name"
        )


def reach(*starts: Agent) -> dict[str, Agent]:
    """*starts* and all that their handoffs lead to, by name; `HandoffError` if two different ones have one name."""
    found: dict[str, Agent] = {}
    ahead = deque(starts)
    while ahead:
        agent = ahead.popleft()
        known = found.get(agent.name)
        if known is agent:
            continue
        if known is not None:
            raise HandoffError(
                f"two different agents are named {shorten(agent.name)}; a conversation stores its agent by name, so"
                " give one of them another"
            )
        found[agent.name] = agent
        ahead.extend(agent.handoffs)
    return found


def _named(argument: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a string, not {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{argument} must not be blank, and is {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{argument} must be text that UTF-8 can encode, and is {value!r}") from error
    return str.__str__(value)  # of an enum's member, its value


def _setting(name: object) -> str:
    name = _named("a setting's name", name)
    if name in DECIDED_ELSEWHERE:
        raise ValueError(f"settings can't hold {name!r}: {DECIDED_ELSEWHERE[name]}")
    return name


def _several(argument: str, values: Any) -> Iterable[Any]:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise TypeError(f"{argument} must be a list or the like, not {type(values).__name__}")
    several: Iterable[Any] = values
    return several


def _providers(values: Any) -> tuple[ContextProvider, ...]:
    found: dict[str, ContextProvider] = {}
    for each in _several("context_providers", values):
        if not isinstance(each, ContextProvider):
            raise TypeError(f"context_providers are instances of ContextProvider, not {each!r}")
        name = _named("a context provider's name", each.name)
        if each.on_error not in get_args(OnError):
            raise ValueError(f"on_error of provider {shorten(name)} must be 'fail' or 'log', not {each.on_error!r}")
        if name in found:
            raise ValueError(f"two context providers are named {shorten(name)}; give one of them another name")
        found[name] = each
    choosing = [name for name, each in found.items() if isinstance(each, HistoryProvider)]
    if len(choosing) > 1:
        raise ValueError(f"one HistoryProvider chooses what is sent of the history, not {' and '.join(choosing)}")
    return tuple(found.values())


def _require_agent(value: object) -> None:
    if not isinstance(value, Agent):
        raise TypeError(f"handoffs are agents, not {type(value).__name__}")


def _takes_session(instructions: object) -> bool:
    """Whether the instructions are a function to be called with the session."""
    if isinstance(instructions, str):
        return False
    if not callable(instructions):
        raise TypeError(f"instructions must be a string or a function, not {type(instructions).__name__}")
    try:
        parameters = inspect.signature(instructions).parameters.values()
    except ValueError as error:
        raise TypeError(f"instructions: {error}; wrap it in a function of your own") from error
    needed = [each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        raise TypeError(
            "a function given as instructions takes the session or nothing, and this one needs"
            f" {', '.join(each.name for each in needed)}"
        )
    # A default is there to be kept, as in `lambda text=text: ...`, except where the name says what it is for.
    return bool(needed) or any(each.name == "session" or each.kind is each.VAR_POSITIONAL for each in parameters)
