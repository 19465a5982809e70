"""ScriptedEngine: answers by rule or from a list, with no model and no network, and the same way each time."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import anyio.lowlevel
import attrs

from chatflow.core.engine import EngineReply, EngineRequest, ReplyPart
from chatflow.core.events import ReasoningDelta, TextDelta
from chatflow.core.messages import Message, Role, ToolCall
from chatflow.engines.common_form import as_json
from chatflow.engines.result_form import result_text
from chatflow.exceptions import EngineError, shorten

Reply: TypeAlias = "str | EngineReply | ToolCall | Sequence[ToolCall] | BaseException | type[BaseException]"
"""What a script says at one point: text, calls, a whole reply, or an error to raise."""

Scripted: TypeAlias = "Reply | Callable[[EngineRequest], Reply | Awaitable[Reply]]"
"""A reply, or a function of the request that makes one."""

REASONING_KEY: Final = "reasoning_content"
"""In a reply's `extra`: what the model thought before it answered, by the name that providers give it."""

Condition: TypeAlias = "str | re.Pattern[str] | Callable[[EngineRequest], object]"


@attrs.frozen(kw_only=True)
class _Rule:
    pattern: re.Pattern[str] | None
    predicate: Callable[[EngineRequest], object] | None
    agent: str | None
    result_of: str | None
    call: str | None
    args: Mapping[str, Any]
    reply: Scripted | None

    def answer(self, request: EngineRequest) -> Scripted | None:
        """What the rule says to the request, or None where it does not apply."""
        groups = self._groups(request) if self._is_for(request) else None
        if groups is None or self.call is None:
            return None if groups is None else self.reply
        return ToolCall(id="", name=self.call, args={**groups, **self.args})

    def _is_for(self, request: EngineRequest) -> bool:
        return (
            (self.agent is None or self.agent == request.agent.name)
            and (self.result_of is None or self.result_of in _results_at_the_end(request))
            and (self.predicate is None or bool(self.predicate(request)))
        )

    def _groups(self, request: EngineRequest) -> dict[str, str] | None:
        if self.pattern is None:
            return {}
        if self.result_of is None and _is_answered_by_a_tool(request):
            return None
        found = self.pattern.search(user_text(request))
        return found and {name: text for name, text in found.groupdict().items() if text is not None}


class ScriptedEngine:
    r"""An engine that says what it is told to, for tests and demonstrations.

    Fixed *replies* are taken in order, one a request. When there are none left the rules made with `when` are tried in
    order and the first that applies answers; then *default* does; then `EngineError` says which request had no reply::

        engine = ScriptedEngine(default="How can I help?")
        engine.when(r"order (?P<order_id>\d+)", call="check_order_status")
        engine.when(result_of="check_order_status", reply=lambda request: f"It is {last_result(request)['status']}.")
        engine.when("invoice", call="transfer_to_billing")
        engine.when(agent="Billing", reply="Billing here. Which invoice is it?")

    A reply is text, a `ToolCall` or several, an `EngineReply`, an exception to raise, or a function of the
    `EngineRequest`, async or not, that returns one of these; `user_text` and `last_result` look into the request.
    A call whose id is empty gets one that is unique in this engine and in what is sent of the conversation. Rules
    remember nothing, so conversations may use one engine at the same time; fixed replies go to whoever asks next.

    Attributes:
        requests: All requests so far, in the order they came.

    Raises:
        TypeError: A reply is none of these.
    """

    def __init__(self, replies: Iterable[Scripted] = (), *, default: Scripted | None = None) -> None:
        if isinstance(replies, str) or not isinstance(replies, Iterable):
            raise TypeError(f"replies must be a list of replies, not {type(replies).__name__}")
        self._replies: Final[deque[Scripted]] = deque(
            _checked(reply, f"replies[{position}]") for position, reply in enumerate(replies)
        )
        self._default: Final[Scripted | None] = None if default is None else _checked(default, "default")
        self._rules: Final[list[_Rule]] = []
        self._numbers: Final = itertools.count(1)
        self.requests: Final[list[EngineRequest]] = []

    @staticmethod
    def call(name: str, /, **args: Any) -> ToolCall:
        """A call to be scripted; the engine gives it its id when it is used."""
        return ToolCall(id="", name=name, args=args)

    def when(
        self,
        condition: Condition | None = None,
        /,
        *,
        agent: str | None = None,
        result_of: str | None = None,
        reply: Scripted | None = None,
        call: str | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> ScriptedEngine:
        """Add a rule; it applies to a request that meets all that is given here.

        Args:
            condition: A regular expression, searched for in the last user message in any case, or a function of the
                request. An expression without *result_of* applies only until a tool has answered that message, so that
                a rule that calls a tool does not call it for ever.
            agent: The name of the agent that is asked.
            result_of: The request ends with results, and one is of this tool.
            reply: What is said then.
            call: Instead of *reply*, a tool to call. The expression's named groups are its arguments.
            args: More arguments for that call.

        Returns:
            The engine, for the next rule.

        Raises:
            TypeError: Neither *reply* nor *call* is given, or both, or one of a wrong type.
        """
        if (reply is None) == (call is None):
            raise TypeError("when() takes either reply= or call=")
        if args is not None and call is None:
            raise TypeError("when() takes args= only together with call=")
        pattern = re.compile(condition, re.IGNORECASE) if isinstance(condition, str) else None
        if isinstance(condition, re.Pattern):
            pattern = condition
        if condition is not None and pattern is None and not callable(condition):
            raise TypeError(f"condition must be a regular expression or a function, not {type(condition).__name__}")
        self._rules.append(
            _Rule(
                pattern=pattern,
                predicate=condition if pattern is None and callable(condition) else None,
                agent=agent,
                result_of=result_of,
                call=call,
                args=args or {},
                reply=None if reply is None else _checked(reply, "reply"),
            )
        )
        return self

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Reply as scripted.

        Raises:
            EngineError: Nothing is scripted for this request.
            TypeError: A scripted function returned something that is no reply.
            BaseException: What the script says to raise.
        """
        self.requests.append(request)
        number = len(self.requests)
        scripted = self._next(request)
        # As with a model, other tasks get on meanwhile, and a cancellation arrives.
        await anyio.lowlevel.checkpoint()
        if scripted is None:
            last = request.messages[-1].role.value if request.messages else "no"
            raise EngineError(
                f"nothing is scripted for request {number}, of agent {shorten(request.agent.name)}, that ends with"
                f" {last} message; engine.requests[{number - 1}] is the request",
                model=request.agent.model,
            )
        said: Any = scripted
        if _is_function(said):
            made: Any = said(request)
            said = _checked(await made if inspect.isawaitable(made) else made, "a scripted function's reply")
            if _is_function(said):
                raise TypeError("a scripted function must return a reply, not another function")
        return self._reply(said, request)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[ReplyPart]:
        """Reply as `generate` does, word by word.

        Text in the reply's `extra` under ``"reasoning_content"`` comes before, as what the model has thought.
        """
        reply = await self.generate(request)
        for word in _words(reply.extra.get(REASONING_KEY)):
            yield ReasoningDelta(word)
            await anyio.lowlevel.checkpoint()
        for word in _words(reply.text):
            yield TextDelta(word)
            await anyio.lowlevel.checkpoint()
        yield reply

    async def count_tokens(self, request: EngineRequest) -> int:
        """A token for each word of texts, of calls (name, and arguments as JSON) and of results; one for each tool."""
        await anyio.lowlevel.checkpoint()
        return len(request.tools) + sum(len(text.split()) for each in request.messages for text in _texts(each))

    def _next(self, request: EngineRequest) -> Scripted | None:
        with contextlib.suppress(
            IndexError
        ):  # not asked for beforehand: another thread may take the last one meanwhile
            return self._replies.popleft()
        answers = (rule.answer(request) for rule in self._rules)
        return next((answer for answer in answers if answer is not None), self._default)

    def _reply(self, said: Reply, request: EngineRequest) -> EngineReply:
        if isinstance(said, BaseException | type):
            raise said
        if isinstance(said, str):
            return EngineReply(text=said, finish_reason="stop")
        if isinstance(said, EngineReply):
            return attrs.evolve(said, tool_calls=self._with_ids(said.tool_calls, request))
        calls = (said,) if isinstance(said, ToolCall) else said
        return EngineReply(tool_calls=self._with_ids(calls, request), finish_reason="tool_calls")

    def _with_ids(self, calls: Iterable[ToolCall], request: EngineRequest) -> tuple[ToolCall, ...]:
        # An earlier process may have given its own: numbers begin anew with each engine.
        given = {call.id for message in request.messages for call in message.tool_calls}
        free = (id_ for id_ in map("call_{}".format, self._numbers) if id_ not in given)
        return tuple(call if call.id else attrs.evolve(call, id=next(free)) for call in calls)


def user_text(request: EngineRequest) -> str:
    """The text of the last user message; empty where there is none."""
    return next((message.text for message in reversed(request.messages) if message.role is Role.USER), "")


def last_result(request: EngineRequest) -> Any:
    """What the tool gave whose result stands last in the request; a tuple where it is made of parts.

    Raises:
        LookupError: The request holds no tool result.
    """
    for message in reversed(request.messages):
        if message.role is Role.TOOL:
            return message.tool_results[-1].content
    raise LookupError("the request holds no tool result")


def _words(text: object) -> list[str]:
    """The text in pieces, none of which is lost; of what is no text, none."""
    return re.findall(r"\s*\S+|\s+", text) if isinstance(text, str) else []


def _texts(message: Message) -> Iterator[str]:
    yield message.text
    for call in message.tool_calls:
        yield f"{call.name} {as_json(call.args)}"
    yield from map(result_text, message.tool_results)


def _results_at_the_end(request: EngineRequest) -> frozenset[str]:
    last = itertools.takewhile(lambda message: message.role is Role.TOOL, reversed(request.messages))
    return frozenset(result.name for message in last for result in message.tool_results)


def _is_answered_by_a_tool(request: EngineRequest) -> bool:
    def is_after_the_question(message: Message) -> bool:
        return message.role is not Role.USER

    since = itertools.takewhile(is_after_the_question, reversed(request.messages))
    return any(message.role is Role.TOOL for message in since)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_calls(value: Any) -> bool:
    return isinstance(value, list | tuple) and {type(item) for item in cast("list[object]", value)} == {ToolCall}


def _is_error(value: Any) -> bool:
    return isinstance(value, BaseException) or (isinstance(value, type) and issubclass(value, BaseException))


def _checked(reply: Any, where: str) -> Any:
    is_plain = isinstance(reply, str | EngineReply | ToolCall)
    if is_plain or _is_calls(reply) or _is_error(reply) or _is_function(reply):
        return reply
    raise TypeError(
        f"{where} must be text, a ToolCall or several, an EngineReply, an exception, or a function, not"
        f" {type(reply).__name__}"
    )
