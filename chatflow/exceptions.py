"""Every error chatflow raises, in one tree.

::

    ChatflowError
    ├── UnstorableValueError        a value that would not come back equal (also a TypeError)
    ├── SessionError
    │   ├── SessionNotFoundError        (also a LookupError)
    │   ├── SessionDeletedError
    │   ├── SessionConflictError
    │   ├── SessionFormatError
    │   ├── SessionStateError
    │   ├── SessionKeyError             (also a KeyError)
    │   ├── CorruptSessionError
    │   ├── UnmatchedToolResultError
    │   ├── ApprovalNotFoundError       (also a LookupError)
    │   ├── ApprovalDecidedError
    │   └── TurnInsideTurnError
    ├── MessageError
    │   ├── MessageInProgressError
    │   ├── MessageMismatchError
    │   └── MessageDeadError
    ├── StoreError
    │   ├── StoreClosedError
    │   ├── StoreBusyError
    │   ├── StoreFormatError
    │   ├── StoreOwnerRequiredError
    │   └── StoreScopeError
    ├── EngineError
    │   ├── EngineRateLimitError
    │   ├── EngineTimeoutError
    │   ├── EngineAuthenticationError
    │   ├── EngineBadRequestError
    │   │   ├── ContextWindowError
    │   │   └── ServiceSessionLostError
    │   ├── EngineUnavailableError
    │   └── EngineOutputError
    ├── ToolError
    │   └── ToolArgumentError
    └── HandoffError

An error takes facts, says what happened, to which session and what to do, and keeps the facts as attributes.
One module for all of them, which is why it is long: a reader looks an error up in one place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final


class ChatflowError(Exception):
    """The root of all errors that chatflow raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are built from keyword facts; rebuilding one from `args`, as pickle does, would call __init__ wrongly.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(kind: type[ChatflowError], args: tuple[Any, ...], facts: dict[str, Any]) -> ChatflowError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


def shorten(value: object, limit: int = 80) -> str:
    """`repr(value)`, cut in the middle where an id of 10,000 characters would drown the message around it."""
    text = repr(value)
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def cut(text: str, limit: int) -> str:
    """*text*, or as much of its beginning as *limit* characters hold, with dots."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Collection[str], limit: int = 300) -> str:
    """*names* with commas between them, as many as *limit* characters hold, and how many more there are."""
    shown: list[str] = []
    for name in names:
        limit -= len(name) + 2
        if limit < 0:
            break
        shown.append(name)
    left = len(names) - len(shown)
    if not shown:
        return f"{left} with long names" if left else "none"
    return ", ".join(shown) + (f" and {left} more" if left else "")


def counted(number: int, what: str) -> str:
    """*number* of *what*, such as "1 turn" and "2 turns"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


class UnstorableValueError(ChatflowError, TypeError):
    """A value can't be kept so that it comes back equal; nothing was changed.

    Attributes:
        path: Where the value stands, such as ``tool_results[0].content.items[3]``.
        reason: Why it can't be kept.
    """

    def __init__(self, *, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path or 'value'} can't be stored: {reason}")


class SessionError(ChatflowError):
    """Something went wrong with one conversation.

    Attributes:
        session_id: The conversation it happened to, or None where no conversation is known yet.
    """

    def __init__(self, message: str, *, session_id: str | None = None) -> None:
        self.session_id = session_id
        super().__init__(message)


class SessionNotFoundError(SessionError, LookupError):
    """No conversation has this id."""

    def __init__(self, *, session_id: str) -> None:
        super().__init__(
            f"session {shorten(session_id)} does not exist; get_or_create() makes it", session_id=session_id
        )


class SessionDeletedError(SessionError):
    """The conversation was deleted while this object was still in use; nothing was written."""

    def __init__(self, *, session_id: str) -> None:
        super().__init__(
            f"session {shorten(session_id)} was deleted; ask the store for it again to start a new conversation",
            session_id=session_id,
        )


class SessionConflictError(SessionError):
    """Somebody else's turn has committed in the meantime; nothing was written.

    Attributes:
        reason: What stood in the way.
    """

    def __init__(self, *, session_id: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"session {shorten(session_id)}: {reason}; take a new turn and decide again", session_id=session_id
        )


class SessionFormatError(SessionError):
    """Serialised data is not a conversation that chatflow can read.

    Attributes:
        path: Where it goes wrong, such as ``tool_calls[0].id``.
        reason: What is wrong there.
    """

    def __init__(self, *, path: str, reason: str, session_id: str | None = None) -> None:
        self.path = path
        self.reason = reason
        where = f"session {shorten(session_id)}: " if session_id is not None else ""
        super().__init__(f"{where}{path or 'data'}: {reason}", session_id=session_id)


class SessionStateError(SessionError):
    """A value of a session's state or metadata can't be kept, or is not of the asked type.

    Attributes:
        path: The key, and where in its value.
        reason: What is wrong there.
    """

    def __init__(self, *, session_id: str | None, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"session {shorten(session_id)}: {path}: {reason}", session_id=session_id)


class SessionKeyError(SessionError, KeyError):
    """A session's state has no such key.

    Attributes:
        key: The key.
    """

    def __init__(self, *, session_id: str, key: str) -> None:
        self.key = key
        super().__init__(
            f"session {shorten(session_id)}: its state has no key {shorten(key)}; set it, or give get() a default",
            session_id=session_id,
        )

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError would show the message's repr


class CorruptSessionError(SessionError):
    """A stored row of the conversation can't be read; nothing was changed.

    Attributes:
        row: Which row, as the table and key a person can look up.
        reason: Why it can't be read.
    """

    def __init__(self, *, session_id: str, row: str, reason: str) -> None:
        self.row = row
        self.reason = reason
        super().__init__(
            f"session {shorten(session_id)} can't be loaded: {row}: {reason}; other sessions are unaffected",
            session_id=session_id,
        )


class UnmatchedToolResultError(SessionError):
    """A tool result names a call that the history does not hold; the message was not added.

    Attributes:
        tool_call_id: The id no call in the history has.
    """

    def __init__(self, *, session_id: str, tool_call_id: str) -> None:
        self.tool_call_id = tool_call_id
        super().__init__(
            f"session {shorten(session_id)}: a tool result names the call {shorten(tool_call_id)}, and the history"
            " holds no such call; add the model's message with the call first",
            session_id=session_id,
        )


class ApprovalNotFoundError(SessionError, LookupError):
    """No call of this id waits for a person's approval; nothing was run.

    Attributes:
        call_id: The id that was asked for.
    """

    def __init__(self, *, session_id: str, call_id: str) -> None:
        self.call_id = call_id
        super().__init__(
            f"session {shorten(session_id)}: no call {shorten(call_id)} waits for approval: nobody was asked about it,"
            " it was answered, or it has left the history; look at session.pending_approvals",
            session_id=session_id,
        )


class ApprovalDecidedError(SessionError):
    """The call was decided the other way before, or is being so; that decision stands, and nothing was run.

    Attributes:
        call_id: The call's id.
        approved: Whether it had been approved.
    """

    def __init__(self, *, session_id: str, call_id: str, approved: bool) -> None:
        self.call_id = call_id
        self.approved = approved
        done, again = ("approved", "approve()") if approved else ("rejected", "reject()")
        super().__init__(
            f"session {shorten(session_id)}: the call {shorten(call_id)} was {done} before, and that stands;"
            f" {again} gives its answer, or goes on where it was broken off",
            session_id=session_id,
        )


class TurnInsideTurnError(SessionError):
    """A turn was asked for that could only start once the asking turn itself has ended.

    Attributes:
        reason: Which turn waits for which.
    """

    def __init__(self, *, session_id: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"session {shorten(session_id)}: {reason}", session_id=session_id)


class MessageError(ChatflowError):
    """What `MessageInProgressError`, `MessageMismatchError` and `MessageDeadError` share.

    Attributes:
        session_id: The conversation the message was sent to.
        message_id: The message's id.
    """

    def __init__(self, message: str, *, session_id: str, message_id: str) -> None:
        self.session_id = session_id
        self.message_id = message_id
        super().__init__(message)


class MessageInProgressError(MessageError):
    """The message is being answered right now, and the caller asked not to wait; or only others can answer it.

    Attributes:
        held: Whether somebody is answering it. If not, it waits for a runner whose starting agent has the name of the
            one that it was sent to.
    """

    def __init__(self, *, session_id: str, message_id: str, held: bool = True) -> None:
        self.held = held
        super().__init__(
            f"message {shorten(message_id)} of session {shorten(session_id)} "
            + (
                "is being answered; on_duplicate='response' waits for the answer"
                if held
                else "waits for a runner of another starting agent; run it with that one"
            ),
            session_id=session_id,
            message_id=message_id,
        )


class MessageMismatchError(MessageError):
    """The id was used before with another text; nothing was run."""

    def __init__(self, *, session_id: str, message_id: str) -> None:
        super().__init__(
            f"message id {shorten(message_id)} of session {shorten(session_id)} was used before with another user"
            " message; give each message its own id",
            session_id=session_id,
            message_id=message_id,
        )


class MessageDeadError(MessageError):
    """The message was tried as often as it may be and is given up.

    Attributes:
        attempts: How often it was tried.
    """

    def __init__(self, *, session_id: str, message_id: str, attempts: int) -> None:
        self.attempts = attempts
        super().__init__(
            f"message {shorten(message_id)} of session {shorten(session_id)} was given up after {attempts} attempts;"
            " look at store.pending_turns()",
            session_id=session_id,
            message_id=message_id,
        )


class StoreError(ChatflowError):
    """The storage below a store failed; the driver's error is the cause.

    Attributes:
        store: The store, as its path or name.
    """

    def __init__(self, message: str, *, store: str) -> None:
        self.store = store
        super().__init__(message)


class StoreClosedError(StoreError):
    """The store was closed, or belongs to the process this one was forked from."""

    def __init__(self, *, store: str, reason: str = "it was closed") -> None:
        super().__init__(f"store {shorten(store)} can't be used: {reason}; open a new one", store=store)


class StoreBusyError(StoreError):
    """The storage had no place or no time for the store, for longer than it waits; nothing was written.

    Attributes:
        waited_seconds: How long the store waited.
        reason: What stood in the way, and what to do.
    """

    def __init__(
        self,
        *,
        store: str,
        waited_seconds: float,
        reason: str = "another writer held it; find what holds it, then try again",
    ) -> None:
        self.waited_seconds = waited_seconds
        self.reason = reason
        super().__init__(f"store {shorten(store)} was busy for {waited_seconds:g} s: {reason}", store=store)


class StoreFormatError(StoreError):
    """What is there is no chatflow store that this version can use, or a copy that is not whole; it was left untouched.

    Attributes:
        reason: What is wrong with it.
    """

    def __init__(self, *, store: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{shorten(store)} can't be used: {reason}; it was left untouched", store=store)


class StoreOwnerRequiredError(StoreError):
    """The store demands an owner, and the call named none."""

    def __init__(self, *, store: str) -> None:
        super().__init__(f"store {shorten(store)} requires an owner; use store.for_owner(...)", store=store)


class StoreScopeError(StoreError):
    """A store or runner of one owner was asked for what is only for the whole; nothing was done.

    Attributes:
        what: What was asked for.
    """

    def __init__(self, *, store: str, what: str) -> None:
        self.what = what
        super().__init__(
            f"store {shorten(store)} is one owner's, and can't be asked for {what}; ask the store, or the runner, that"
            " for_owner() was called on",
            store=store,
        )


class EngineError(ChatflowError):
    """A model could not be asked, or its answer not be used.

    Neither the key nor the prompt is part of it, printed or logged, with its traceback too: what the provider said may
    quote both, and is to be found at `__context__` alone, which is printed by no one.

    Attributes:
        model: The model's name as the agent gives it.
        status: The HTTP status of the provider's answer, where there was one.
        code: The provider's word for what is wrong, such as ``"overloaded_error"``, where it gave one.
        retry_after: Seconds the provider asked to wait, where it did.
    """

    def __init__(
        self,
        message: str,
        *,
        model: str,
        status: int | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.model = model
        self.status = status
        self.code = code
        self.retry_after = retry_after
        super().__init__(message)


class EngineRateLimitError(EngineError):
    """The provider refuses more requests for now."""


class EngineTimeoutError(EngineError):
    """The provider did not answer in time."""


class EngineAuthenticationError(EngineError):
    """The key is missing, wrong or lacks the right."""


class EngineBadRequestError(EngineError):
    """The provider refuses the request as it is; sending it again can't help."""


class ContextWindowError(EngineBadRequestError):
    """The conversation is longer than the model can take, or than *max_prompt_tokens* lets it be.

    Attributes:
        session_id: The conversation, where it was found too long before anything was sent.
        tokens: How many tokens the least that could be sent has, where that was counted.
        max_prompt_tokens: How many it may have, where there is a limit.
    """

    def __init__(
        self,
        message: str,
        *,
        model: str,
        status: int | None = None,
        retry_after: float | None = None,
        code: str | None = None,
        session_id: str | None = None,
        tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.session_id = session_id
        self.tokens = tokens
        self.max_prompt_tokens = max_prompt_tokens
        super().__init__(message, model=model, status=status, retry_after=retry_after, code=code)


class ServiceSessionLostError(EngineBadRequestError):
    """The service that keeps the conversation's history does not know it any more."""


class EngineUnavailableError(EngineError):
    """The provider can't be reached or answers with an error of its own."""


class EngineOutputError(EngineError):
    """An answer was not of the agent's output type, twice: the first one, and the one that it was asked for then.

    Attributes:
        agent: The name of the agent that was to answer.
        problems: What is wrong with the second one, by place, such as ``answer.items[3].amount``. Of more than 1000
            only the number. Unlike the message, they may quote it.
    """

    def __init__(self, *, model: str, agent: str, problems: Mapping[str, str]) -> None:
        self.agent = agent
        self.problems = dict(problems)
        super().__init__(
            f"model {shorten(model)}: the answer of agent {shorten(agent)} is not of its output_type, also after it was"
            f" asked for again ({counted(len(self.problems), 'problem')}, which `problems` names)",
            model=model,
        )


class ToolError(ChatflowError):
    """A tool can't be built, or its call can't be made.

    A tool raises one to say that it has failed, and why: ``raise ToolError("There is no order of this number.")``. The
    model is told the message.

    Attributes:
        tool: The tool's name, where it is not clear from the call.
    """

    def __init__(self, message: str, *, tool: str | None = None) -> None:
        self.tool = tool
        super().__init__(message)


_LONGEST_PROBLEMS: Final = 500
"""Characters that the problems with a call's arguments have together."""


class ToolArgumentError(ToolError):
    """A model called a tool with arguments that the tool does not take; the tool was not run.

    The message is written for the model: it names each argument and what is wrong with it, and nothing of the tool's
    insides.

    Attributes:
        problems: What is wrong, by argument; a place inside an argument as in ``items[3].amount``. Of more than 1000 in
            one argument only the number.
    """

    def __init__(self, *, tool: str, problems: Mapping[str, str]) -> None:
        self.problems = dict(problems)
        shown: list[str] = []
        for argument, problem in self.problems.items():
            # A model may have made up both, and pays for every character.
            text = f"{cut(argument, 60)}: {cut(problem, 150)}"
            if sum(map(len, shown)) + len(text) > _LONGEST_PROBLEMS:
                shown.append(f"and {len(self.problems) - len(shown)} more")
                break
            shown.append(text)
        super().__init__(f"tool {tool} can't be called with these arguments: {'; '.join(shown)}", tool=tool)


class HandoffError(ChatflowError):
    """Handoffs are defined in a way that leaves it open which agent is meant."""
