from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core import pruning
from chatflow.core.agent import Agent
from chatflow.core.history import EMPTY_HISTORY, History
from chatflow.core.messages import Message, Role
from chatflow.core.session import SessionContext
from tests.strategies import says

U, M, S = Role.USER, Role.MODEL, Role.SYSTEM


def said(*words: str) -> list[Message]:
    """User messages of these words."""
    return [says(Role.USER, word) for word in words]


def history_in(systems: Sequence[Message], body: Sequence[Message], low: int = 0, more: int = 0) -> History:
    """A history of these messages, within lists that hold *low* messages before them and *more* after them."""
    around = says(Role.MODEL, "not in the history")
    return History(
        [*systems, *[around] * more],
        len(systems),
        [*[around] * low, *body, *[around] * more],
        low,
        low + len(body),
    )


few_messages = st.lists(st.sampled_from("ab"), max_size=6).map(lambda words: said(*words))


@st.composite
def views(draw: st.DrawFn) -> tuple[History, list[Message]]:
    """A history within longer lists, and the list of the same messages."""
    systems, body = draw(few_messages), draw(few_messages)
    low, more = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return history_in(systems, body, low, more), [*systems, *body]


def outcome(action: Callable[[], object]) -> object:
    """What *action* returns, or the type of what it raises."""
    try:
        return action()
    except (IndexError, ValueError, TypeError) as error:
        return type(error)


# --- a list that can't be changed --------------------------------------------------------------------------------


@given(views(), st.integers(-15, 15))
def test_index_is_a_lists(view: tuple[History, list[Message]], index: int) -> None:
    """An index, negative or past the end too, finds what it finds in a list."""
    history, messages = view
    assert outcome(lambda: history[index]) is outcome(lambda: messages[index])


@given(views(), st.data())
def test_slice_is_a_lists(view: tuple[History, list[Message]], data: st.DataObject) -> None:
    """A slice with any bounds and any step is a tuple of what it is in a list."""
    history, messages = view
    part = data.draw(st.one_of(st.slices(len(messages)), st.builds(slice, *[st.none() | st.integers(-15, 15)] * 3)))
    found = outcome(lambda: history[part])
    expected = outcome(lambda: tuple(messages[part]))
    assert found == expected
    assert type(found) is type(expected)


@given(views())
def test_sequence_is_a_lists(view: tuple[History, list[Message]]) -> None:
    """Length, truth and iterating, both ways, are a list's, and the messages the very same."""
    history, messages = view
    assert len(history) == len(messages)
    assert bool(history) == bool(messages)
    assert [*map(id, history)] == [*map(id, messages)]
    assert [*map(id, reversed(history))] == [*map(id, reversed(messages))]


@given(views(), few_messages)
def test_search_is_a_lists(view: tuple[History, list[Message]], others: list[Message]) -> None:
    """Membership, index and count are a list's."""
    history, messages = view
    for message in [*messages[:3], *others[:3]]:
        assert (message in history) == (message in messages)
        assert history.count(message) == messages.count(message)
        assert outcome(lambda: history.index(message)) == outcome(lambda: messages.index(message))  # noqa: B023  # at once


@pytest.mark.parametrize("index", ["0", 1.0, None], ids=repr)
def test_index_of_another_type(index: Any) -> None:
    """What is no index is a TypeError, as for a list."""
    with pytest.raises(TypeError):
        history_in([], said("a"))[index]


def test_index_like_a_number() -> None:
    """Whatever a list takes for an index is taken."""

    class Second:
        def __index__(self) -> int:
            return 1

    index: Any = Second()
    assert history_in([], said("a", "b"))[index] == said("b")[0]


def test_index_out_of_range_says_so() -> None:
    """The error of an index out of range tells how many messages there are."""
    with pytest.raises(IndexError, match="history index -3 out of range, 2 messages"):
        history_in([], said("a", "b"))[-3]


# --- equality ----------------------------------------------------------------------------------------------------


@given(views())
def test_equal_both_ways(view: tuple[History, list[Message]]) -> None:
    """A history equals a list, a tuple and a history of equal messages, whichever stands first."""
    history, messages = view
    equals: list[Any] = [messages, tuple(messages), history_in([], messages), copy.copy(history)]
    assert all(history == other for other in equals)
    assert all(other == history for other in equals)
    assert not any(history != other for other in equals)


@given(views(), few_messages)
def test_unequal_both_ways(view: tuple[History, list[Message]], others: list[Message]) -> None:
    """A history equals a list only if it would, were it a list itself."""
    history, messages = view
    assert (history == others) is (others == history) is (messages == others)
    assert history != [*messages, says(Role.USER)]
    assert [*messages, says(Role.USER)] != history


@pytest.mark.parametrize("other", [None, "", {}, set(), 0], ids=repr)
def test_equals_nothing_else(other: Any) -> None:
    """An empty history equals no empty thing that is not a list or a tuple."""
    assert not EMPTY_HISTORY == other  # noqa: SIM201, SIM300  # == and != are asked, from both sides
    assert other != EMPTY_HISTORY
    assert EMPTY_HISTORY == []


def test_no_hash() -> None:
    """A history can't be hashed, like the list it stands for."""
    with pytest.raises(TypeError, match="unhashable"):
        hash(EMPTY_HISTORY)


def test_shown_as_its_messages() -> None:
    """The repr shows the messages."""
    messages = said("a")
    assert repr(history_in([], messages)) == f"History({messages!r})"


@given(views())
def test_travels(view: tuple[History, list[Message]]) -> None:
    """A history can be pickled and deep-copied."""
    history, messages = view
    assert pickle.loads(pickle.dumps(history)) == messages
    assert copy.deepcopy(history) == messages


# --- what it refuses ---------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], object]] = {
    "set": lambda history: history.__setitem__(0, said("b")[0]),
    "delete": lambda history: history.__delitem__(0),
    "delete slice": lambda history: history.__delitem__(slice(0, 1)),
    "+=": lambda history: history.__iadd__(said("b")),
    "*=": lambda history: history.__imul__(2),
    "append": lambda history: history.append(said("b")[0]),
    "clear": lambda history: history.clear(),
    "extend": lambda history: history.extend(said("b")),
    "insert": lambda history: history.insert(0, said("b")[0]),
    "pop": lambda history: history.pop(),
    "remove": lambda history: history.remove(said("a")[0]),
    "reverse": lambda history: history.reverse(),
    "sort": lambda history: history.sort(key=str),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_refused(name: str) -> None:
    """Whatever changes a list is refused with the methods to use instead, and nothing has changed."""
    history = history_in([], said("a"))
    with pytest.raises(TypeError, match=r"read-only.*add_message.*rollback_to.*clear_history"):
        CHANGES[name](history)
    assert history == said("a")


def test_no_changing_method_is_forgotten() -> None:
    """Every method of a list is there or refused, but for copying, which a slice does."""
    public = {name for name in vars(list) if not name.startswith("__")} - {"copy"}
    assert all(hasattr(History, name) for name in public)


def test_attributes_cannot_be_added() -> None:
    """A history takes no attributes, so that a misspelt one is noticed."""
    history: Any = EMPTY_HISTORY
    with pytest.raises(AttributeError):
        history.lenght = 1


# --- what stores ask of it ---------------------------------------------------------------------------------------


def test_systems_and_body() -> None:
    """A history tells its system messages and the others apart, and gives either from an index on."""
    systems, body = [says(Role.SYSTEM, "s"), says(Role.SYSTEM, "t")], said("a", "b", "c")
    history = history_in(systems, body, low=2, more=2)
    assert (history.system_count, history.body_length) == (2, 3)
    assert history.systems_from(1) == (systems[1],)
    assert history.body_from(1) == (body[1], body[2])


SYSTEM = says(Role.SYSTEM)
A, B, C = said("a", "b", "c")


@pytest.mark.parametrize(
    ("later", "cut", "grows"),
    [
        (([SYSTEM], [A, B]), 0, True),
        (([SYSTEM], [A, B, C]), 0, True),
        (([SYSTEM, SYSTEM], [A, B]), 0, True),
        (([SYSTEM], [B, C]), 1, True),
        (([SYSTEM], [C]), 2, True),
        (([], [A, B]), 0, False),
        (([SYSTEM], [A]), 0, False),
        (([SYSTEM], [A, C]), 0, False),
        (([says(Role.SYSTEM)], [A, B]), 0, False),
        (([SYSTEM], [A, B]), -1, False),
    ],
)
def test_grows_from(later: tuple[list[Message], list[Message]], cut: int, *, grows: bool) -> None:
    """A history has grown from another if only messages at its front have gone and others were added at its end."""
    assert history_in(*later).grows_from(history_in([SYSTEM], [A, B], low=1, more=1), cut) is grows


# --- views of a conversation -------------------------------------------------------------------------------------


def new_session(max_turns: int = 40) -> SessionContext:
    """A session on its own."""
    return SessionContext("s", Agent("Support"), max_turns)


async def fill(session: SessionContext, *words: str) -> None:
    """Add user messages of these words."""
    for message in said(*words):
        await session.add_message(message)


async def test_view_stays_when_the_conversation_grows() -> None:
    """A history shows what it showed when it was taken, whatever is added, system messages too."""
    session = new_session()
    await fill(session, "a", "b")
    view = session.history
    await fill(session, "c")
    await session.add_message(says(Role.SYSTEM))
    assert view == said("a", "b")


async def test_view_stays_when_turns_are_pruned() -> None:
    """A history still shows turns that were pruned since."""
    session = new_session(max_turns=2)
    await fill(session, "a", "b")
    view = session.history
    await fill(session, "c", "d", "e")
    assert view == said("a", "b")
    assert session.history == said("d", "e")


async def test_view_stays_when_the_conversation_goes_back() -> None:
    """A history still shows messages that were rolled back since, also when others took their place."""
    session = new_session()
    await fill(session, "a")
    token = session.checkpoint()
    await fill(session, "b")
    view = session.history
    await session.rollback_to(token)
    await fill(session, "c")
    assert view == said("a", "b")
    assert session.history == said("a", "c")


async def test_view_stays_when_the_conversation_is_cleared() -> None:
    """A history still shows what was cleared since."""
    session = new_session()
    await fill(session, "a")
    view = session.history
    await session.clear_history()
    await fill(session, "b")
    assert view == said("a")


async def test_view_of_a_turn_that_fails_stays() -> None:
    """A history taken within a turn that failed still shows what the turn had added."""
    session = new_session()
    await fill(session, "a")
    views = []
    with pytest.raises(InterruptedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await fill(session, "b")
            views.append(session.history)
            raise InterruptedError
    await fill(session, "c")
    assert views == [said("a", "b")]
    assert session.history == said("a", "c")


async def test_view_stays_when_the_list_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history stays when the conversation drops the messages it has cut."""
    monkeypatch.setattr(pruning, "_COMPACT_AFTER", 1)
    session = new_session(max_turns=1)
    taken = []
    for number in range(10):
        await fill(session, str(number))
        taken.append(session.history)
    assert taken == [said(str(number)) for number in range(10)]
