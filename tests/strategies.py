"""What Hypothesis draws from: values that can be kept, messages, histories. And `same`, stricter than equality."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
import zoneinfo
from typing import Any, Final

import attrs
from hypothesis import strategies as st

from chatflow.core.messages import (
    PART_KINDS,
    AgentResponse,
    AudioPart,
    FilePart,
    Handoff,
    ImagePart,
    Message,
    Role,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.values import MARK

LONG_AGO: Final = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
"""When the messages of drawn histories were said: the same for all, as it is for messages of one burst."""


def same(one: object, other: object) -> bool:
    """Whether two values, or messages, are equal down to their types, their zones and the sign of their zeros."""
    if type(one) is not type(other):
        return False
    if attrs.has(type(one)):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in attrs.fields(type(one)))
    match one, other:
        case dict(), dict():
            # In order, since a dict's order comes back too.
            return same(tuple(one.items()), tuple(other.items()))
        case (list(), list()) | (tuple(), tuple()):
            return len(one) == len(other) and all(map(same, one, other))
        case frozenset(), frozenset():
            return len(one) == len(other) and all(any(same(mine, theirs) for theirs in other) for mine in one)
        case float(), float():
            return (math.isnan(one) and math.isnan(other)) or (one, math.copysign(1, one)) == (
                other,
                math.copysign(1, other),
            )
        case decimal.Decimal(), decimal.Decimal():
            return one.as_tuple() == other.as_tuple()
        case dt.datetime(), dt.datetime():
            return (one.isoformat(), one.fold, one.tzinfo) == (other.isoformat(), other.fold, other.tzinfo)
    return one == other


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
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 2**70000]),
)
datetimes: Final = st.datetimes(timezones=st.one_of(st.none(), zones, offsets), allow_imaginary=True).flatmap(
    lambda value: st.sampled_from([value, value.replace(fold=0 if isinstance(value.tzinfo, dt.timezone) else 1)])
)
decimals: Final = st.one_of(st.decimals(allow_nan=False), st.sampled_from([decimal.Decimal("-0E+9"), decimal.Decimal(10) ** 99]))

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
    max_leaves=5,
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


values: Final = st.recursive(scalars, _containers, max_leaves=8)
"""Everything that can be kept and comes back as what it was, but for set and frozenset, which are one kind."""

mappings: Final = st.dictionaries(keys, values, max_size=3)
"""What a call's arguments, *extra*, *usage*, state and metadata may be."""

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


def envelopes(body: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that say they are envelopes."""
    kinds = ["str", "int", "float", "dict", "tuple", "set", "bytes", "datetime", "date", "timedelta", "uuid", "decimal"]
    return st.fixed_dictionaries({MARK: st.sampled_from([*kinds, "none", 1]), "v": body})


# --- messages ----------------------------------------------------------------------------------------------------


def _unknown_part(name: str, fields: dict[str, Any]) -> UnknownPart:
    # A part that is all a known one is would be that, so one field is nobody's.
    return UnknownPart(name, {**{key: value for key, value in fields.items() if key != "type"}, "unheard-of": None})


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
tool_results: Final = st.builds(
    ToolResult, tool_call_id=st.one_of(ids, text), name=text, content=values, is_error=st.booleans()
)
handoffs: Final = st.builds(
    Handoff, target_agent_name=text, reason=st.none() | text, context_updates=mappings
)
responses: Final = st.builds(
    AgentResponse,
    content=text,
    active_agent_name=text,
    tool_calls_executed=st.lists(text, max_size=3),
    handoff=st.none() | handoffs,
    usage=st.none() | mappings,
    duplicate=st.booleans(),
    stop_reason=st.sampled_from(["answer", "tool_limit", "not_stored"]),
)
timestamps: Final = st.datetimes(
    dt.datetime(2, 1, 1), dt.datetime(9998, 1, 1), timezones=st.one_of(zones, offsets)  # noqa: DTZ001  # zones follow
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

message_lists: Final = st.lists(bare_messages, max_size=24).map(
    # Each another object: tests tell messages apart by identity.
    lambda drawn: [attrs.evolve(message) for message in drawn]
)
"""Messages in any order: results before their calls, without them, twice."""


@st.composite
def histories(draw: st.DrawFn, *, max_size: int = 24) -> list[Message]:
    """A conversation as a session gets it: from a user message on, and each result names a call that came before it.

    Calls may go unanswered, be answered turns later, in another order, or twice, and share an id.
    """
    history: list[Message] = []
    called: list[str] = []
    for step in draw(st.lists(st.sampled_from("usmccrrr"), max_size=max_size)):
        if step == "s":
            history.append(says(Role.SYSTEM))
        elif step == "u" or all(message.role is Role.SYSTEM for message in history):
            history.append(says(Role.USER))
        elif step == "c":
            made = draw(some_ids)
            called += made
            history.append(calls(*made))
        elif step == "r" and called:
            history.append(results(*draw(st.lists(st.sampled_from(called), min_size=1, max_size=3))))
        else:
            history.append(says(Role.MODEL))
    return history


any_history: Final = st.one_of(histories(), message_lists)
"""Valid and arbitrary histories, half and half."""

turn_limits: Final = st.integers(1, 5)
