"""What Hypothesis draws from: values that can be kept, messages, histories. And `exactly`, stricter than equality."""

from __future__ import annotations

import datetime as dt
import decimal
import zoneinfo
from collections.abc import Iterable
from typing import Any, Final

import attrs
from hypothesis import strategies as st

from chatflow.core.history import History
from chatflow.core.messages import (
    PART_KINDS,
    AgentResponse,
    AudioPart,
    FilePart,
    Handoff,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.pruning import Window, prune
from chatflow.core.records import NOTHING_SEEN, Key
from chatflow.core.service import ServiceSession
from chatflow.core.session import AgentSession, SessionContext
from chatflow.core.usage import spent_on
from chatflow.core.values import MARK, freeze_mapping

LONG_AGO: Final = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
"""When the messages of drawn histories were said: the same for all, as it is for messages of one burst."""


def exactly(value: Any) -> object:
    """A form of *value* in which types, zones, order of keys and the sign of a zero count, and NaN is NaN."""
    kind: Any = type(value)
    form: object
    if attrs.has(kind):
        form = [exactly(getattr(value, field.name)) for field in attrs.fields(kind)]
    elif isinstance(value, dict):
        form = [(exactly(key), exactly(item)) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        form = [exactly(item) for item in value]
    elif isinstance(value, frozenset):
        form = sorted((exactly(item) for item in value), key=repr)
    elif isinstance(value, dt.datetime):
        form = (value.isoformat(), value.fold, repr(value.tzinfo))
    else:
        form = hex(value) if isinstance(value, int) else repr(value)  # Python refuses the repr of a very large int
    return kind.__qualname__, form


# --- ids and text ------------------------------------------------------------------------------------------------

ids: Final = st.sampled_from(["", "a", "b"])
"""Call ids of so tiny an alphabet that they collide, and one that a provider left empty."""

text: Final = st.text(st.characters(), max_size=8)
"""Any text that Python has: NUL and lone surrogates too."""

keys: Final = st.one_of(text, st.sampled_from([MARK, "v", "type", "a", "role"]))
"""Keys of dicts, often such as the codec might take for its own."""


# --- values that can be kept -------------------------------------------------------------------------------------

offsets: Final = st.timedeltas(
    min_value=dt.timedelta(hours=-24, microseconds=1), max_value=dt.timedelta(hours=24, microseconds=-1)
).map(dt.timezone)
zones: Final = st.sampled_from(["Europe/Berlin", "America/New_York", "Asia/Kathmandu", "UTC"]).map(zoneinfo.ZoneInfo)

integers: Final = st.one_of(
    st.integers(),
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 2**200]),
)
datetimes: Final = st.datetimes(timezones=st.one_of(st.none(), zones, offsets), allow_imaginary=True).flatmap(
    lambda value: st.sampled_from([value, value.replace(fold=0 if isinstance(value.tzinfo, dt.timezone) else 1)])
)
decimals: Final = st.one_of(st.decimals(allow_nan=False), st.just(decimal.Decimal("-0E+9")))

scalars: Final = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    text,
    st.binary(max_size=8),
    datetimes,
    st.dates(),
    st.timedeltas(),
    st.uuids(),
    decimals,
)
"""Values that hold no others. No Decimal NaN: it does not equal itself, and its signalling kind refuses to be asked."""

hashable_values: Final = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=3,
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(hashable_values, max_size=3),
        st.frozensets(hashable_values, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(hashable_values, inner, max_size=3),
    )


values: Final = st.recursive(scalars, _containers, max_leaves=5)
"""Everything that can be kept and comes back as what it was, but for set and frozenset, which are one kind."""

mappings: Final = st.dictionaries(keys, values, max_size=3)
"""What a call's arguments, *extra*, *usage*, state and metadata may be."""


def envelopes(body: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that say they are envelopes."""
    kinds = ["str", "int", "float", "dict", "tuple", "set", "bytes", "datetime", "date", "timedelta", "uuid", "decimal"]
    return st.fixed_dictionaries({MARK: st.sampled_from([*kinds, "parts", "none", 1]), "v": body})


json_values: Final = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=4), keys), inner, max_size=3),
        envelopes(inner),
    ),
    max_leaves=6,
)
"""What stands in JSON: sound, and otherwise. Envelopes among it are of kinds that exist, with any body."""


# --- messages ----------------------------------------------------------------------------------------------------


def _unknown_part(name: str, fields: dict[str, Any]) -> UnknownPart:
    # A part that is all a known one is would be that, so one field is nobody's.
    return UnknownPart(name, {**{key: value for key, value in fields.items() if key != "type"}, "unheard-of": None})


def _in_a_list(drawn: tuple[Part, list[Part | str]]) -> list[Part | str]:
    part, others = drawn
    return [*others[:1], part, *others[1:]]


media_sources: Final = st.one_of(
    st.fixed_dictionaries({"url": text}, optional={"media_type": text}),
    st.fixed_dictionaries({"data": st.binary(max_size=8)}, optional={"media_type": text}),
)
parts: Final = st.one_of(
    st.builds(TextPart, text),
    media_sources.map(lambda fields: ImagePart(**fields)),
    media_sources.map(lambda fields: AudioPart(**fields)),
    st.builds(lambda fields, name: FilePart(**fields, filename=name), media_sources, st.none() | text),
    st.builds(_unknown_part, st.one_of(text, st.sampled_from([*PART_KINDS])), mappings),
)
contents: Final = st.one_of(st.none(), text, st.lists(parts, max_size=3))
tool_calls: Final = st.builds(ToolCall, id=st.one_of(ids, text), name=text, args=mappings)
result_contents: Final = st.one_of(values, parts, st.tuples(parts, st.lists(parts | text, max_size=2)).map(_in_a_list))
"""Values, and parts in every form that is taken for them."""
tool_results: Final = st.builds(
    ToolResult, tool_call_id=st.one_of(ids, text), name=text, content=result_contents, is_error=st.booleans()
)
handoffs: Final = st.builds(Handoff, target_agent_name=text, reason=st.none() | text, context_updates=mappings)
responses: Final = st.builds(
    AgentResponse,
    content=text,
    active_agent_name=text,
    tool_calls_executed=st.lists(text, max_size=3),
    handoff=st.none() | handoffs,
    usage=st.none() | mappings,
    duplicate=st.booleans(),
    stop_reason=st.sampled_from(["answer", "tool_limit", "approval", "not_stored"]),
    awaiting_approval=st.lists(tool_calls, max_size=2),
)
timestamps: Final = st.datetimes(
    LONG_AGO.replace(year=2, tzinfo=None), LONG_AGO.replace(year=9998, tzinfo=None), timezones=st.one_of(zones, offsets)
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """A message with anything in it."""
    role = draw(st.sampled_from(Role))
    return Message(
        role,
        draw(contents),
        tool_calls=draw(st.lists(tool_calls, max_size=3)) if role is Role.MODEL else (),
        tool_results=draw(st.lists(tool_results, min_size=1, max_size=3)) if role is Role.TOOL else (),
        agent_name=draw(st.none() | text),
        usage=draw(st.none() | mappings),
        extra=draw(mappings),
        timestamp=draw(timestamps),
    )


# --- histories ---------------------------------------------------------------------------------------------------


def says(role: Role, text: str = "") -> Message:
    """A message of words only."""
    return Message(role, text, timestamp=LONG_AGO)


def calls(*call_ids: str) -> Message:
    """A model's message with calls of these ids."""
    return Message(Role.MODEL, tool_calls=[ToolCall(id=each, name="look") for each in call_ids], timestamp=LONG_AGO)


def results(*call_ids: str) -> Message:
    """A tool's message with results for these ids."""
    return Message(
        Role.TOOL,
        tool_results=[ToolResult(tool_call_id=each, name="look", content=None) for each in call_ids],
        timestamp=LONG_AGO,
    )


some_ids: Final = st.lists(ids, min_size=1, max_size=3)

bare_messages: Final = st.one_of(
    st.just(Role.USER).map(says),
    st.sampled_from([Role.SYSTEM, Role.MODEL]).map(says),
    some_ids.map(lambda each: calls(*each)),
    some_ids.map(lambda each: results(*each)),
)
"""Messages with nothing in them but what pruning looks at."""

message_lists: Final = st.lists(bare_messages, max_size=16).map(
    # Each another object: tests tell messages apart by identity.
    lambda drawn: [attrs.evolve(message) for message in drawn]
)
"""Messages in any order: results before their calls, without them, twice."""


@st.composite
def histories(draw: st.DrawFn, *, max_size: int = 16) -> list[Message]:
    """A conversation as a session gets it: from a user message on, and each result names a call that came before it.

    Calls may go unanswered, be answered turns later, in another order, or twice, and share an id.
    """
    history: list[Message] = []
    called: list[str] = []
    for step in draw(st.lists(st.sampled_from("usmcrrxx"), max_size=max_size)):
        if step == "s":
            history.append(says(Role.SYSTEM))
        elif step == "u" or all(message.role is Role.SYSTEM for message in history):
            history.append(says(Role.USER))
        elif step in "cx":
            made = draw(some_ids)
            called += made
            history.append(calls(*made))
            if step == "x":
                history.append(results(*made))
        elif step == "r" and called:
            history.append(results(*draw(st.lists(st.sampled_from(called), min_size=1, max_size=3))))
        else:
            history.append(says(Role.MODEL))
    return history


any_history: Final = st.one_of(histories(), message_lists)
"""Valid and arbitrary histories, half and half."""

whole_histories: Final = st.one_of(
    histories(), st.lists(messages(), max_size=8).map(lambda drawn: [*prune([says(Role.USER), *drawn], len(drawn) + 1)])
)
"""Valid histories, half of them of messages with anything in them."""

turn_limits: Final = st.integers(1, 5)


# --- sessions ----------------------------------------------------------------------------------------------------

names: Final = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.sampled_from(["a", "a:b", "a\0b", MARK]),
)
"""What UTF-8 can encode and is not empty: ids, owners and agents' names."""

state_keys: Final = st.one_of(keys, keys.map("_{}".format))
"""Keys of state, half of them hidden."""

states: Final = st.dictionaries(state_keys, values, max_size=4)

changes: Final = st.one_of(st.just(dict[str, Any]()), states)
"""What waits for a turn: often nothing."""

service_sessions: Final = st.builds(
    ServiceSession,
    st.one_of(text.filter(bool), mappings.filter(bool)),
    st.none() | text,
    st.none() | text,
)


owners: Final = st.just("") | names.filter(lambda name: not name.startswith("\0"))
"""Nobody, or anybody: names that begin with a NUL are reserved."""


def history_of(messages: Iterable[Message]) -> History:
    """The history that holds these."""
    window = Window()
    for message in messages:
        window.add(message)
    return window.history()


@st.composite
def sessions(draw: st.DrawFn) -> AgentSession:
    """A session with anything in it, of any owner, some with changes that wait for a turn."""
    kind: type[AgentSession] = draw(st.sampled_from([AgentSession, SessionContext]))
    begun = attrs.evolve(
        NOTHING_SEEN,
        agent_name=draw(st.just("") | names),
        metadata=freeze_mapping(draw(mappings), ""),
        state=freeze_mapping(draw(states), ""),
        max_turns=draw(st.none() | st.integers(1, 2**62)),
        history=history_of(draw(whole_histories)),
        service=draw(st.none() | service_sessions),
        expires_after=draw(st.none() | st.floats(1e-6, 1e9) | st.integers(1, 10**9).map(float)),
        spent=spent_on(draw(whole_histories)),
    )
    if begun.service is not None:
        seen = draw(st.integers(0, begun.history.body_length))
        begun = attrs.evolve(begun, service=attrs.evolve(begun.service, seen=seen))
    session = kind.__new__(kind)
    session.keep_alone(Key(draw(owners), draw(names)), begun, None)
    session.metadata.update(draw(changes))
    session.state.update(draw(changes))
    return session


def observed(session: AgentSession) -> object:
    """All that can be seen of a session, in the form that `exactly` gives."""
    return [
        type(session).__name__,
        session.key.owner,
        session.session_id,
        session.active_agent_name,
        session.max_turns,
        session.expires_after,
        exactly(dict(session.metadata)),
        exactly(dict(session.state)),
        exactly(list(session.history)),
        exactly(session.committed.service),
        exactly(session.committed.spent),
    ]


def same_session(one: AgentSession, other: AgentSession) -> bool:
    """Whether two sessions are the same in all that can be seen of them."""
    return observed(one) == observed(other)
