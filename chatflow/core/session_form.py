"""What a conversation is as plain JSON, for whoever keeps it or passes it on, and back: pure functions.

Form 1 is an object of these fields:

- ``chatflow_session``: 1;
- ``session_id``, and ``owner`` where it has one;
- ``active_agent_name``: null where no agent has run yet;
- ``max_turns``: how many turns a commit keeps;
- ``expires_after``: seconds without a commit, where there is a limit;
- ``metadata`` and ``state``: values as `envelopes` writes them;
- ``messages``: each as `codec` writes it;
- ``service``, where a service keeps the history: its ``id``, the names of the agent and the service, and how many
  messages it has ``seen``, system messages aside;
- ``for_client``: true in a form without what is no client's business, and only there.

A field that is not known is refused, in a message too: a later form has another number.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final, cast

import attrs

from chatflow.core.codec import message_from_data, message_to_data
from chatflow.core.envelopes import decode, encode
from chatflow.core.history import History
from chatflow.core.messages import ADDED_BY_KEY, Message, Role
from chatflow.core.plain import plain_copy
from chatflow.core.pruning import Window, check_max_turns
from chatflow.core.records import NOTHING_SEEN, Key, Snapshot, check_id, check_seconds
from chatflow.core.service import ServiceSession
from chatflow.core.usage import checked_spent
from chatflow.core.values import EMPTY, FrozenDict, freeze_mapping, join, step
from chatflow.exceptions import SessionFormatError, UnstorableValueError, shorten

FORM: Final = 1
"""The number of the form that is written, and the only one that is read."""

DEFAULT_MAX_CHARACTERS: Final = 2**25
"""33 million: more than models are sent, pictures included, and read within seconds."""

_ALWAYS: Final = ("chatflow_session", "session_id", "active_agent_name", "max_turns", "state", "messages")
_NOT_FOR_CLIENTS: Final = ("owner", "metadata", "service", "spent")
_FIELDS: Final = frozenset({*_ALWAYS, *_NOT_FOR_CLIENTS, "expires_after", "for_client"})
_NOT_FROM_CLIENTS: Final = "a client may not bring it"
_LONGEST: Final = 500
"""Characters of a path or a reason: both may quote what was refused for its size."""


def _is_hidden(key: str) -> bool:
    return key.startswith("_")


def to_data(key: Key, snapshot: Snapshot, *, for_client: bool) -> dict[str, Any]:
    """The conversation of that *key*, which is like *snapshot*, in form 1; its maximum of turns is set."""
    service = snapshot.service
    state = {name: value for name, value in snapshot.state.items() if not (for_client and _is_hidden(name))}
    data: dict[str, Any] = {
        "chatflow_session": FORM,
        "session_id": encode(key.session_id),
        "owner": encode(key.owner),
        "active_agent_name": encode(snapshot.agent_name) or None,
        "max_turns": snapshot.max_turns,
        "expires_after": snapshot.expires_after,
        "metadata": encode(snapshot.metadata),
        "state": encode(state),
        "messages": [
            _message_to_data(message, for_client=for_client)
            for message in snapshot.history
            if not (for_client and _is_inner(message))
        ],
        "service": None if service is None else _service_to_data(service, snapshot.start),
        "spent": encode(snapshot.spent),
        "for_client": for_client,
    }
    left_out = {name for name in ("owner", "expires_after", "service", "spent", "for_client") if not data[name]}
    left_out.update(_NOT_FOR_CLIENTS if for_client else ())
    return {name: value for name, value in data.items() if name not in left_out}


def _is_inner(message: Message) -> bool:
    """Whether it was said to the model alone. A call or a result of it stays: the other half may be in the history."""
    is_added = ADDED_BY_KEY in message.extra and not message.tool_calls and not message.tool_results
    return message.role is Role.SYSTEM or is_added


def _service_to_data(service: ServiceSession, start: int) -> dict[str, Any]:
    seen = attrs.evolve(service, seen=max(0, service.seen - start))
    return {name: encode(value) for name, value in seen.to_data().items()}


def _message_to_data(message: Message, *, for_client: bool) -> dict[str, Any]:
    data = message_to_data(message)
    if for_client:
        data.pop("extra", None)
        data.pop("usage", None)
    return data


def from_data(data: object, *, owner: str, from_client: bool, max_characters: int) -> tuple[Key, Snapshot]:
    """What `to_data` was given, for *owner*. A client may bring nothing that it would not have been given.

    Raises:
        SessionFormatError: The data is no such form, or another owner's; the error names the path.
    """
    known = _id_in_plain_sight(data)
    try:
        fields = _read_fields(plain_copy(data, max_characters))
        session_id = known = _read_text(fields, "session_id")
        is_client = from_client or "for_client" in fields
        _refuse_others(fields, owner, is_client=is_client)
        return Key(owner, session_id), _read_snapshot(fields, is_client=is_client)
    except SessionFormatError as error:
        raise SessionFormatError(path=_cut(error.path), reason=_cut(error.reason), session_id=known) from error
    except (RecursionError, MemoryError) as error:
        reason = "too large, or nested too deeply, for what this process has left"
        raise SessionFormatError(path="", reason=reason, session_id=known) from error


def _id_in_plain_sight(data: object) -> str | None:
    """The session's id if nothing has to be trusted to see it: an error then says which session it is about."""
    if type(data) is not dict and type(data) is not FrozenDict:
        return None
    for key, value in tuple(cast("dict[object, object]", data).items()):
        if type(key) is str and key == "session_id" and type(value) is str:
            try:
                return check_id(value, key)
            except ValueError:
                return None
    return None


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


def _missing(path: str) -> SessionFormatError:
    return SessionFormatError(path=path, reason="it is missing")


def _inside(path: str, error: SessionFormatError) -> SessionFormatError:
    return SessionFormatError(path=join(path, error.path), reason=error.reason)


def _read_fields(data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise SessionFormatError(path="", reason=f"a session must be an object, not {type(data).__name__}")
    fields = cast("dict[str, Any]", data)
    if "chatflow_session" not in fields:
        raise _missing("chatflow_session")
    form = fields["chatflow_session"]
    if type(form) is not int or form != FORM:
        reason = f"this version of chatflow reads form {FORM}, not {shorten(form)}"
        raise SessionFormatError(path="chatflow_session", reason=reason)
    unknown = next((name for name in fields if name not in _FIELDS), None)
    if unknown is not None:
        raise SessionFormatError(path=step("", unknown), reason="a session has no such field")
    for name in _ALWAYS:
        if name not in fields:
            raise _missing(name)
    if fields.get("for_client", True) is not True:
        raise SessionFormatError(path="for_client", reason="it must be true where it is")
    return fields


def _refuse_others(fields: dict[str, Any], owner: str, *, is_client: bool) -> None:
    """Refuse what is another owner's, or a client's word about what is no client's business."""
    if is_client:
        brought = next((name for name in _NOT_FOR_CLIENTS if name in fields), None)
        if brought is not None:
            raise SessionFormatError(path=brought, reason=_NOT_FROM_CLIENTS)
        return
    if "metadata" not in fields:
        raise _missing("metadata")
    if owner != (_read_text(fields, "owner") if "owner" in fields else ""):
        # Whose it is, is nobody else's business.
        raise SessionFormatError(path="owner", reason="it is not of the owner that was given")


def _read_snapshot(fields: dict[str, Any], *, is_client: bool) -> Snapshot:
    history = _read_messages(fields["messages"], is_client=is_client)
    return attrs.evolve(
        NOTHING_SEEN,
        agent_name="" if fields["active_agent_name"] is None else _read_text(fields, "active_agent_name"),
        max_turns=_read_max_turns(fields["max_turns"]),
        expires_after=_read_expires_after(fields["expires_after"]) if "expires_after" in fields else None,
        metadata=FrozenDict() if is_client else _read_values(fields, "metadata"),
        state=_read_state(fields, is_client=is_client),
        service=_read_service(fields["service"], history.body_length) if "service" in fields else None,
        spent=_read_spent(fields) if "spent" in fields else EMPTY,
        history=history,
    )


def _read_value(fields: dict[str, Any], name: str, path: str) -> Any:
    try:
        return decode(fields[name])
    except SessionFormatError as error:
        raise _inside(path, error) from error.__cause__


def _read_text(fields: dict[str, Any], name: str) -> str:
    try:
        return check_id(_read_value(fields, name, name), name)
    except (TypeError, ValueError) as error:
        raise SessionFormatError(path=name, reason=str(error)) from error


def _read_max_turns(value: Any) -> int:
    try:
        return check_max_turns(value)
    except (TypeError, ValueError) as error:
        raise SessionFormatError(path="max_turns", reason=str(error)) from error


def _read_expires_after(value: Any) -> float:
    try:
        seconds = check_seconds("expires_after", value)
        if not dt.timedelta(seconds=seconds):
            raise ValueError(f"expires_after must be a microsecond at least, not {seconds}")  # noqa: TRY301  # as above
    except (TypeError, ValueError, OverflowError) as error:
        raise SessionFormatError(path="expires_after", reason=str(error)) from error
    return seconds


def _read_values(fields: dict[str, Any], name: str) -> FrozenDict:
    try:
        return freeze_mapping(_read_value(fields, name, name), name)
    except UnstorableValueError as error:
        raise SessionFormatError(path=error.path, reason=error.reason) from error


def _read_spent(fields: dict[str, Any]) -> FrozenDict:
    spent = _read_values(fields, "spent")
    if not spent:
        raise SessionFormatError(path="spent", reason="it must hold something where it is")
    try:
        return checked_spent(spent)
    except TypeError as error:
        raise SessionFormatError(path="spent", reason=str(error)) from error


def _read_state(fields: dict[str, Any], *, is_client: bool) -> FrozenDict:
    state = _read_values(fields, "state")
    hidden = next(filter(_is_hidden, state), None) if is_client else None
    if hidden is not None:
        raise SessionFormatError(path=step("state", hidden), reason=_NOT_FROM_CLIENTS)
    return state


def _read_service(value: Any, most: int) -> ServiceSession:
    if not isinstance(value, dict):
        raise SessionFormatError(path="service", reason=f"an object is needed here, not {type(value).__name__}")
    fields = cast("dict[str, Any]", value)
    known = ("id", "agent_name", "service", "seen")
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        raise SessionFormatError(path=step("service", unknown), reason="a service's session has no such field")
    for name in known:
        if name not in fields:
            raise _missing(f"service.{name}")
    read = {name: _read_value(fields, name, f"service.{name}") for name in known}
    for name in ("agent_name", "service"):
        if not isinstance(read[name], str | None):
            reason = f"text or null is needed here, not {type(read[name]).__name__}"
            raise SessionFormatError(path=f"service.{name}", reason=reason)
    if type(read["seen"]) is not int or not 0 <= read["seen"] <= most:
        reason = f"it must be a number of messages from 0 to {most}, not {shorten(read['seen'])}"
        raise SessionFormatError(path="service.seen", reason=reason)
    try:
        return ServiceSession(**read)
    except UnstorableValueError as error:
        path = f"service.id{error.path.removeprefix('service_session_id')}"
        raise SessionFormatError(path=path, reason=error.reason) from error
    except (TypeError, ValueError) as error:
        raise SessionFormatError(path="service.id", reason=str(error)) from error


def _read_messages(value: Any, *, is_client: bool) -> History:
    if not isinstance(value, list):
        raise SessionFormatError(path="messages", reason=f"a list is needed here, not {type(value).__name__}")
    window = Window()
    for index, item in enumerate(cast("list[object]", value)):
        try:
            message = message_from_data(item)
            if is_client:
                _refuse_from_client(message)
            _add(window, message)
        except SessionFormatError as error:
            raise _inside(f"messages[{index}]", error) from error
    return window.history()


def _refuse_from_client(message: Message) -> None:
    brought: Mapping[str, object] = {
        "role": message.role is Role.SYSTEM,
        "extra": message.extra,
        "usage": message.usage is not None,
    }
    path = next((name for name, value in brought.items() if value), None)
    if path is not None:
        raise SessionFormatError(path=path, reason=_NOT_FROM_CLIENTS)


def _add(window: Window, message: Message) -> None:
    """Add what pruning by the same window would leave where it is, and as it is."""
    if message.role is Role.SYSTEM and window.end:
        raise SessionFormatError(path="role", reason="a system message stands among the others")
    orphan = window.unmatched(message) if window.turns else None
    if orphan is not None:
        index = next(index for index, result in enumerate(message.tool_results) if result.tool_call_id == orphan)
        reason = f"no call of the id {shorten(orphan)} stands before it"
        raise SessionFormatError(path=f"tool_results[{index}]", reason=reason)
    if not window.add(message):
        raise SessionFormatError(path="", reason="it stands before the first user message")
