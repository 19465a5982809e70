from __future__ import annotations

from typing import Any, Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.codec import entry_from_json, entry_to_json
from chatflow.core.journal import Deed, Entry, Journal, recording
from chatflow.core.messages import Message, Role, ToolResult, freeze_result
from chatflow.core.pruning import Window
from chatflow.core.records import Snapshot
from chatflow.core.values import FrozenDict, freeze
from chatflow.core.working import REMOVED, Change, Kind, Working
from chatflow.exceptions import SessionFormatError, UnmatchedToolResultError
from tests import strategies as drawn
from tests.strategies import calls, exactly, results, says

# --- the codec ---------------------------------------------------------------------------------------------------


def _kept(result: ToolResult) -> ToolResult:
    return attrs.evolve(result, content=freeze_result(result.content, "content"))


deeds: Final = st.one_of(
    st.builds(
        Deed,
        what=st.just("set"),
        kind=st.sampled_from(["metadata", "state"]),
        key=drawn.text,
        value=drawn.values.map(lambda value: freeze(value, "value")),
    ),
    st.builds(Deed, what=st.just("remove"), kind=st.sampled_from(["metadata", "state"]), key=drawn.text),
    st.builds(
        Deed,
        what=st.just("set"),
        kind=st.just("state"),
        key=drawn.text,
        inner=drawn.text,
        value=drawn.values.map(lambda value: freeze(value, "value")),
    ),
    st.builds(Deed, what=st.just("remove"), kind=st.just("state"), key=drawn.text, inner=drawn.text),
    st.builds(Deed, what=st.just("agent"), value=drawn.text),
    st.builds(Deed, what=st.just("add"), message=drawn.messages()),
    st.builds(Deed, what=st.just("clear")),
    st.builds(Deed, what=st.sampled_from(["drop", "mark", "restore"]), value=st.integers(0, 2**62)),
)
entries: Final = st.one_of(
    st.builds(Entry, iteration=st.integers(0, 100), message=drawn.messages()),
    st.builds(
        Entry,
        iteration=st.integers(0, 100),
        index=st.integers(0, 100),
        result=drawn.tool_results.map(_kept),
        deeds=st.lists(deeds, max_size=3).map(tuple),
    ),
    st.builds(
        Entry,
        iteration=st.integers(0, 100),
        index=st.integers(0, 100),
        handoff=drawn.handoffs,
        deeds=st.lists(deeds, max_size=3).map(tuple),
    ),
)


@given(entries)
def test_entries_come_back(entry: Entry) -> None:
    """Every line of a journal comes back as it was written."""
    found = entry_from_json(entry_to_json(entry))
    if found.result is not None:
        found = attrs.evolve(found, result=_kept(found.result))  # as it will be in its message
    assert exactly(found) == exactly(entry)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"iteration": "1"}', '{"iteration": 1, "deeds": [{"what": "steal"}]}']
)
def test_what_is_no_entry(text: str) -> None:
    """What is no line of a journal is refused, and nothing is made up."""
    with pytest.raises(SessionFormatError):
        entry_from_json(text)


# --- reading a journal -------------------------------------------------------------------------------------------


def _returned(iteration: int, index: int) -> Entry:
    result = ToolResult(tool_call_id=str(index), name="look", content=None)
    return Entry(iteration=iteration, index=index, result=result)


def test_journal_by_iteration() -> None:
    """A journal tells, for each iteration, the model's message and what had ended, in the order of the ends."""
    first, second = calls("a", "b"), calls("c")
    journal = Journal(
        [
            Entry(iteration=0, message=first),
            _returned(0, 1),
            _returned(0, 0),
            Entry(iteration=1, message=second),
        ]
    )
    called = [journal.called(iteration) for iteration in range(3)]
    assert [None if each is None else each.message for each in called] == [first, second, None]
    assert list(journal.returned(0)) == [1, 0]
    assert journal.returned(1) == journal.returned(2) == {}


def test_line_that_says_nothing() -> None:
    """A line with neither a message nor a call's outcome is passed over."""
    journal = Journal([Entry(iteration=0)])
    assert (journal.called(0), journal.returned(0)) == (None, {})


# --- recording ---------------------------------------------------------------------------------------------------


def _snapshot(messages: list[Message], metadata: dict[str, Any], state: dict[str, Any], agent_name: str) -> Snapshot:
    window = Window()
    for message in messages:
        window.add(message)
    return Snapshot(
        session_key=1,
        version=1,
        agent_name=agent_name,
        metadata=FrozenDict(metadata),
        state=FrozenDict(state),
        max_turns=None,
        history=window.history(),
        start=0,
        system_start=0,
    )


EMPTY: Final = _snapshot([], {}, {}, "Support")


def _working(base: Snapshot, pending: dict[str, Any] | None = None) -> Working:
    changes: dict[Kind, dict[str, Change]] = {
        "metadata": {},
        "state": {key: Change(value) for key, value in (pending or {}).items()},
    }
    return Working(base, Window.of(base.history, base.start), 1000, changes)


def test_nobody_records() -> None:
    """What happens outside of every tool is recorded nowhere."""
    working = _working(EMPTY)
    with recording(working) as recorded:
        pass
    working.clear()
    assert recorded == []


def test_recorded_in_order() -> None:
    """What a tool does is recorded in the order it was done."""
    working, message = _working(EMPTY), says(Role.USER, "hi")
    with recording(working) as recorded:
        working.set("state", "a", 1)
        working.add(message, "s")
        working.hand_to("Billing")
        working.set("state", "a", REMOVED)
        working.restore_length(0)
        working.restore(working.mark())
        working.clear()
    assert recorded == [
        Deed(what="set", kind="state", key="a", value=1),
        Deed(what="add", message=message),
        Deed(what="agent", value="Billing"),
        Deed(what="remove", kind="state", key="a"),
        Deed(what="drop", value=1),
        Deed(what="mark", value=1),
        Deed(what="restore", value=1),
        Deed(what="clear"),
    ]


def test_refused_changes_are_not_recorded() -> None:
    """What was refused has not been done."""
    working = _working(EMPTY)
    with recording(working) as recorded:
        with pytest.raises(UnmatchedToolResultError):
            working.add(results("a"), "s")
        with pytest.raises(KeyError):
            working.set("state", "a", REMOVED)
    assert recorded == []


def test_another_conversation_inside_a_tool() -> None:
    """Of what happens inside a tool, each conversation's recording takes what was done to its own."""
    outer, inner = _working(EMPTY), _working(EMPTY)
    with recording(outer) as of_outer:
        inner.clear()
        with recording(inner) as of_inner:
            inner.hand_to("Billing")
            outer.set("state", "a", 1)
        outer.clear()
    assert of_inner == [Deed(what="agent", value="Billing")]
    assert of_outer == [Deed(what="set", kind="state", key="a", value=1), Deed(what="clear")]


# --- doing it again ----------------------------------------------------------------------------------------------

names: Final = st.sampled_from("ab")
kinds: Final = st.sampled_from(["metadata", "state"])
small_values: Final = st.one_of(st.integers(0, 3), st.booleans())
steps: Final = st.one_of(
    st.tuples(st.just("set"), kinds, names, small_values),
    st.tuples(st.just("remove"), kinds, names),
    st.tuples(st.just("agent"), st.sampled_from(["Support", "Billing"])),
    st.tuples(st.just("add"), drawn.bare_messages.map(attrs.evolve)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("mark")),
    st.tuples(st.just("restore"), st.integers(0, 2)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
)
bases: Final = st.builds(
    _snapshot,
    drawn.message_lists,
    st.dictionaries(names, small_values),
    st.dictionaries(names, small_values),
    st.sampled_from(["Support", "Billing"]),
)
waiting: Final = st.dictionaries(names, small_values)


class Tool:
    """Does things to a conversation as a tool would, and remembers what took effect."""

    def __init__(self, working: Working, before: Snapshot) -> None:
        self.working = working
        self.checkpoints = [before]
        self.done: list[tuple[Any, ...]] = []

    def do(self, step: tuple[Any, ...]) -> None:
        """One thing, as far as it is possible."""
        try:
            getattr(self, f"_{step[0]}")(*step[1:])
        except (KeyError, UnmatchedToolResultError, IndexError):
            return
        self.done.append(("restore", step[1] % len(self.checkpoints)) if step[0] == "restore" else step)

    def _set(self, kind: Kind, key: str, value: Any) -> None:
        self.working.set(kind, key, value)

    def _remove(self, kind: Kind, key: str) -> None:
        self.working.set(kind, key, REMOVED)

    def _agent(self, name: str) -> None:
        self.working.hand_to(name)

    def _add(self, message: Message) -> None:
        self.working.add(message, "s")

    def _clear(self) -> None:
        self.working.clear()

    def _mark(self) -> None:
        self.checkpoints.append(self.working.mark())

    def _restore(self, number: int) -> None:
        self.working.restore(self.checkpoints[number % len(self.checkpoints)])

    def _drop(self, count: int) -> None:
        length = len(self.working.history)
        if count > length:
            raise IndexError
        self.working.restore_length(length - count)


class There(Tool):
    """Does the same on another conversation, which may have less to drop."""

    def _drop(self, count: int) -> None:
        super()._drop(min(count, len(self.working.history)))


def _before(base: Snapshot, pending: dict[str, Any]) -> Snapshot:
    """A checkpoint that was taken just before the turn began."""
    return attrs.evolve(base, state=FrozenDict({**base.state, **pending}))


def _shown(working: Working) -> object:
    commit = working.commit(1, 1, None, None, hands_on=False)
    return (
        working.agent_name,
        exactly(working.values),
        [id(message) for message in working.history],
        [id(message) for message in commit.snapshot.history],
        exactly((dict(commit.metadata_set), commit.metadata_removed, commit.replace)),
        exactly(commit.state),
    )


@given(st.data(), bases, bases, waiting, st.lists(st.lists(steps, max_size=6), max_size=3))
def test_done_again(
    data: st.DataObject,
    here: Snapshot,
    there: Snapshot,
    pending: dict[str, Any],
    tools: list[list[tuple[Any, ...]]],
) -> None:
    """Doing a journal's deeds over, in whatever the conversation is now, is doing there what the tools did."""
    if data.draw(st.booleans(), "nothing has been committed meanwhile"):
        there = here
    said = [says(Role.USER, "hi"), calls("1")]
    original, again, wanted = _working(here, pending), _working(there, pending), _working(there, pending)
    for message in said:
        for working in (original, again, wanted):
            working.add(message, "s")
    tool, other = Tool(original, _before(here, pending)), There(wanted, _before(there, pending))
    for each in tools:
        with recording(original) as recorded:
            for step in each:
                tool.do(step)
        entry = Entry(iteration=0, index=0, deeds=tuple(recorded))
        again.redo(entry.deeds, "s")
    for step in tool.done:
        other.do(step)
    assert _shown(again) == _shown(wanted)


@given(bases, bases, st.lists(st.tuples(st.just("set"), kinds, st.just("a"), small_values)))
def test_what_others_have_done_stays(here: Snapshot, there: Snapshot, sets: list[tuple[Any, ...]]) -> None:
    """Keys that no tool has touched, and messages, stay as others have committed them in the meantime."""
    original, again = _working(here), _working(there)
    tool = Tool(original, here)
    with recording(original) as recorded:
        for step in sets:
            tool.do(step)
    again.redo(recorded, "s")
    for kind in ("metadata", "state"):
        before: dict[str, Any] = dict(getattr(there, kind))
        touched = {"a"} if any(step[1] == kind for step in sets) else set[str]()
        now = again.values[kind]
        assert {key: value for key, value in now.items() if key not in touched} == {
            key: value for key, value in before.items() if key not in touched
        }
    assert again.history == list(there.history)
    assert again.agent_name == there.agent_name


def test_result_whose_call_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    """A result that a tool added is left out, with a warning, where its call has gone since."""
    here, there = _snapshot([says(Role.USER), calls("a")], {}, {}, "Support"), EMPTY
    original, again = _working(here), _working(there)
    with recording(original) as recorded:
        original.add(results("a"), "s")
        original.set("state", "a", 1)
    again.redo(recorded, "s")
    assert (list(again.history), again.values["state"]) == ([], {"a": 1})
    assert "left out" in caplog.text


def test_checkpoint_that_nobody_noted(caplog: pytest.LogCaptureFixture) -> None:
    """A rollback to a checkpoint that no tool has taken is left out, with a warning."""
    original, again = _working(EMPTY), _working(EMPTY)
    checkpoint = original.mark()
    with recording(original) as recorded:
        original.set("state", "a", 1)
        original.restore(checkpoint)
    again.redo(recorded, "s")
    assert again.values["state"] == {"a": 1}
    assert "left out" in caplog.text


def test_checkpoints_of_the_resumed_attempt() -> None:
    """A checkpoint taken after a journal was done over does not take the place of one in it."""
    original, again = _working(EMPTY), _working(EMPTY)
    with recording(original) as recorded:
        first = original.mark()
        original.set("state", "a", 1)
    again.redo(recorded, "s")
    second = again.mark()
    with recording(again) as recorded_again:
        again.restore(second)
    with recording(original) as recorded:
        original.restore(first)
    assert recorded_again == [Deed(what="restore", value=2)]
    assert recorded == [Deed(what="restore", value=1)]
