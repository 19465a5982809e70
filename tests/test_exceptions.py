from __future__ import annotations

import copy
import pickle
import re

import pytest

import chatflow
from chatflow import exceptions
from chatflow.exceptions import (
    ApprovalDecidedError,
    ApprovalNotFoundError,
    ChatflowError,
    ContextWindowError,
    CorruptSessionError,
    EngineAuthenticationError,
    EngineBadRequestError,
    EngineError,
    EngineOutputError,
    EngineRateLimitError,
    EngineTimeoutError,
    EngineUnavailableError,
    HandoffError,
    MessageDeadError,
    MessageError,
    MessageInProgressError,
    MessageMismatchError,
    ServiceSessionLostError,
    SessionConflictError,
    SessionDeletedError,
    SessionError,
    SessionFormatError,
    SessionKeyError,
    SessionNotFoundError,
    SessionStateError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreFormatError,
    StoreOwnerRequiredError,
    StoreScopeError,
    ToolArgumentError,
    ToolError,
    TurnInsideTurnError,
    UnmatchedToolResultError,
    UnstorableValueError,
    listed,
    shorten,
)

SESSION = "conversation-7"
MESSAGE = "wamid.HBgLMjAy"
STORE = "chat_sessions.db"

ERRORS: list[ChatflowError] = [
    ChatflowError("something"),
    UnstorableValueError(path="content.items[3]", reason="builtins.object is no value chatflow keeps"),
    SessionError("something", session_id=SESSION),
    SessionNotFoundError(session_id=SESSION),
    SessionDeletedError(session_id=SESSION),
    SessionConflictError(session_id=SESSION, reason="another turn has committed"),
    SessionFormatError(path="tool_calls[0].id", reason="it is missing", session_id=SESSION),
    SessionStateError(session_id=SESSION, path="state.cart", reason="no value chatflow keeps"),
    SessionKeyError(session_id=SESSION, key="cart"),
    CorruptSessionError(session_id=SESSION, row="chatflow_messages 5", reason="it is not JSON"),
    UnmatchedToolResultError(session_id=SESSION, tool_call_id="call_9"),
    ApprovalNotFoundError(session_id=SESSION, call_id="call_9"),
    ApprovalDecidedError(session_id=SESSION, call_id="call_9", approved=False),
    TurnInsideTurnError(session_id=SESSION, reason="a turn of it is open here"),
    MessageError("something", session_id=SESSION, message_id=MESSAGE),
    MessageInProgressError(session_id=SESSION, message_id=MESSAGE),
    MessageMismatchError(session_id=SESSION, message_id=MESSAGE),
    MessageDeadError(session_id=SESSION, message_id=MESSAGE, attempts=5),
    StoreError("something", store=STORE),
    StoreClosedError(store=STORE),
    StoreBusyError(store=STORE, waited_seconds=10.0),
    StoreFormatError(store=STORE, reason="it is a directory"),
    StoreOwnerRequiredError(store=STORE),
    StoreScopeError(store=STORE, what="check()"),
    EngineError("something", model="gpt-4o", status=500, retry_after=2.5),
    EngineRateLimitError("something", model="gpt-4o", status=429, retry_after=2.5),
    EngineTimeoutError("something", model="gpt-4o"),
    EngineAuthenticationError("something", model="gpt-4o", status=401),
    EngineBadRequestError("something", model="gpt-4o", status=400),
    ContextWindowError(f"{SESSION} is long", model="gpt-4o", session_id=SESSION, tokens=9, max_prompt_tokens=8),
    ServiceSessionLostError("something", model="gpt-4o", status=400),
    EngineUnavailableError("something", model="gpt-4o"),
    EngineOutputError(model="gpt-4o", agent="Support", problems={"answer.id": "Field required"}),
    ToolError("something", tool="check_order_status"),
    ToolArgumentError(tool="check_order_status", problems={"order_id": "it is missing"}),
    HandoffError("something"),
]
"""One of each error, as the code that raises it makes it."""

BASES = (SessionError, MessageError, StoreError, EngineError, ToolError, ChatflowError, HandoffError)


def drawn_tree() -> dict[str, str]:
    """Each error in the tree that the module's docstring draws, and the one it hangs from."""
    lines = re.findall(r"^    ([│├└─ ]*)(\w+Error)\b", exceptions.__doc__ or "", re.MULTILINE)
    path: list[str] = []
    parents = {}
    for indent, name in lines:
        path[len(indent) // 4 :] = [name]
        parents[name] = path[-2] if len(path) > 1 else "Exception"
    return parents


def test_tree_is_as_drawn() -> None:
    """The tree at the top of the module shows every error of the module, and what it derives from."""
    errors = {
        name: kind for name, kind in vars(exceptions).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert drawn_tree() == {name: kind.__bases__[0].__name__ for name, kind in errors.items()}


def test_every_error_can_be_imported_from_chatflow() -> None:
    """Each error of the tree is a public name of the package."""
    assert drawn_tree().keys() <= set(chatflow.__all__)


def test_one_of_each_is_tested() -> None:
    """The errors that these tests look at are all there are."""
    assert {type(error).__name__ for error in ERRORS} == drawn_tree().keys()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickled(error: ChatflowError) -> None:
    """An error that travels between processes arrives with its type, its message and its facts."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_copied(error: ChatflowError) -> None:
    """A copy of an error has its type, its message, its facts, and its notes."""
    error.add_note("while testing")
    again = copy.deepcopy(error)
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    "error",
    [error for error in ERRORS if type(error) not in BASES],
    ids=lambda error: type(error).__name__,
)
def test_message_names_its_facts(error: ChatflowError) -> None:
    """What happened to whom can be read from the message: session, message, store, tool, path, reason."""
    shown = {"session_id", "message_id", "store", "tool", "path", "reason", "row", "tool_call_id", "attempts"}
    for name in shown & vars(error).keys():
        assert str(getattr(error, name)) in str(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_has_a_docstring(error: ChatflowError) -> None:
    """Each error says what it means, and names each fact that it keeps."""
    documented = "\n".join(kind.__doc__ or "" for kind in type(error).__mro__ if kind.__module__ == exceptions.__name__)
    assert type(error).__doc__
    assert all(f"{fact}:" in documented for fact in vars(error) if not fact.startswith("_"))


@pytest.mark.parametrize(("error", "kind"), [(ERRORS[1], TypeError), (ERRORS[3], LookupError)])
def test_derives_from_the_built_in_too(error: ChatflowError, kind: type[Exception]) -> None:
    """A value that can't be kept is a TypeError too, and a session that isn't there a LookupError."""
    assert isinstance(error, kind)


LONG = "x" * 10_000


@pytest.mark.parametrize(
    "error",
    [
        SessionNotFoundError(session_id=LONG),
        SessionDeletedError(session_id=LONG),
        SessionConflictError(session_id=LONG, reason="because"),
        SessionFormatError(path="", reason="because", session_id=LONG),
        SessionStateError(session_id=LONG, path="state", reason="because"),
        CorruptSessionError(session_id=LONG, row="row", reason="because"),
        UnmatchedToolResultError(session_id=LONG, tool_call_id=LONG),
        TurnInsideTurnError(session_id=LONG, reason="because"),
        MessageInProgressError(session_id=LONG, message_id=LONG),
        MessageMismatchError(session_id=LONG, message_id=LONG),
        MessageDeadError(session_id=LONG, message_id=LONG, attempts=5),
        StoreClosedError(store=LONG),
        StoreBusyError(store=LONG, waited_seconds=10),
        StoreFormatError(store=LONG, reason="because"),
        StoreOwnerRequiredError(store=LONG),
        StoreScopeError(store=LONG, what="check()"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_long_ids_are_shortened(error: ChatflowError) -> None:
    """An id of 10,000 characters doesn't drown the message; the fact keeps it whole."""
    assert len(str(error)) < 500
    assert "xxx...xxx" in str(error)
    assert LONG in vars(error).values()


@pytest.mark.parametrize("size", [0, 1, 77, 78, 79, 80, 1000])
def test_shortened(size: int) -> None:
    """A shortened id is its repr, of at most 80 characters, with both of its ends."""
    text = "a" * size + "z" * (size > 0)
    short = shorten(text)
    assert len(short) <= 80
    assert (short[:2], short[-2:]) == (repr(text)[:2], repr(text)[-2:])
    assert (short == repr(text)) == (len(repr(text)) <= 80)


def test_format_error_without_a_session() -> None:
    """Data that belongs to no session yet is named by its path, or as data."""
    assert str(SessionFormatError(path="role", reason="it is missing")) == "role: it is missing"
    assert str(SessionFormatError(path="", reason="it is missing")) == "data: it is missing"


def test_value_without_a_path() -> None:
    """A value that stands nowhere yet is called the value."""
    assert str(UnstorableValueError(path="", reason="because")) == "value can't be stored: because"


def test_only_the_first_problems_are_listed() -> None:
    """A call with many wrong arguments lists some problems and says how many more there are; the fact has them all."""
    error = ToolArgumentError(tool="look", problems={f"a{number}": "wrong" * 20 for number in range(12)})
    assert str(error).endswith("a3: " + "wrong" * 20 + "; and 8 more")
    assert len(error.problems) == 12


@pytest.mark.parametrize(("number", "expected"), [(1, "1 problem,"), (2, "2 problems,")])
def test_number_of_problems(number: int, expected: str) -> None:
    """How many problems an answer has is said in the singular or plural."""
    problems = {f"answer[{index}]": "wrong" for index in range(number)}
    assert expected in str(EngineOutputError(model="gpt-4o", agent="Support", problems=problems))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "none"),
        (["a", "b"], "a, b"),
        (["abc"] * 10, "abc, abc, abc, abc and 6 more"),
        (["abc" * 10] * 2, "2 with long names"),
    ],
)
def test_listed_names(names: list[str], expected: str) -> None:
    """Names are listed as far as there is room, and the others are counted."""
    assert listed(names, 20) == expected
