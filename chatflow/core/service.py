"""A conversation's session at a service that keeps its history itself: which one it is, and what the service has seen.

What a service has seen is told by a position, as messages have one for life: those before it went through the service,
those from it on are new. Whoever goes back to before that position begins a new session, since a service forgets
nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from typing import Any, Literal, cast

import attrs
import msgspec

from chatflow.core.envelopes import encode
from chatflow.core.messages import Message
from chatflow.core.values import FrozenDict, freeze, freeze_mapping

OnLostServiceSession = Literal["raise", "replay"]

ServiceSessionId = str | Mapping[str, Any]
"""What a service calls a conversation: an id, or several, such as an A2A agent's context and task."""


def _frozen_id(value: ServiceSessionId) -> str | FrozenDict:
    if isinstance(value, str):
        if not value:
            raise ValueError("service_session_id must not be empty")
        found: str | FrozenDict = freeze(value, "service_session_id")
        return found
    if not isinstance(value, Mapping):
        raise TypeError(f"service_session_id must be a string or a mapping, not {type(value).__name__}")
    if not value:
        raise ValueError("service_session_id must not be empty")
    return freeze_mapping(value, "service_session_id")


@attrs.frozen
class ServiceSession:
    """A service's own id for the conversation, and whom it was given to.

    *agent_name* is the agent it was given to, None for any. *service* is the name of the service that gave it, as the
    engine calls it; None until an engine has used it. *seen* is the position of the first message that the service has
    not seen.
    """

    id: str | FrozenDict = attrs.field(converter=_frozen_id)
    agent_name: str | None = None
    service: str | None = None
    seen: int = 0

    @property
    def key(self) -> str | None:
        """The id as text to look it up by, the same for equal ids; None until an engine has used it."""
        return None if self.service is None else id_key(self.id)

    def is_for(self, agent_names: Container[str]) -> bool:
        """Whether one of these agents may go on with it."""
        return self.agent_name is None or self.agent_name in agent_names

    def to_data(self) -> FrozenDict:
        """The form that is kept."""
        return FrozenDict(id=self.id, agent_name=self.agent_name, service=self.service, seen=self.seen)

    @classmethod
    def from_data(cls, data: object) -> ServiceSession:
        """What `to_data` gave.

        Raises:
            TypeError: It is no such form.
            ValueError: The id in it is empty.
        """
        fields = _fields(data, {"id", "agent_name", "service", "seen"})
        for name in ("agent_name", "service"):
            if not isinstance(fields[name], str | None):
                raise TypeError(f"{name} must be a string or nothing, not {type(fields[name]).__name__}")
        return cls(fields["id"], fields["agent_name"], fields["service"], _count(fields["seen"], "seen"))


@attrs.frozen
class ServiceStep:
    """What one reply has made of the service's session: *session* now, after the one whose `id_key` is *after*.

    *digest* is that of the messages which were new to the service then. A turn that is tried again from its journal
    goes on with *session* only where it finds the same: others may have gone on with the service meanwhile, or have
    changed what it was told.
    """

    session: ServiceSession
    after: str | None
    digest: str

    def to_data(self) -> FrozenDict:
        """The form that is kept."""
        return FrozenDict(session=self.session.to_data(), after=self.after, digest=self.digest)

    @classmethod
    def from_data(cls, data: object) -> ServiceStep:
        """What `to_data` gave; `TypeError` or `ValueError` for anything else."""
        fields = _fields(data, {"session", "after", "digest"})
        if not isinstance(fields["after"], str | None) or not isinstance(fields["digest"], str):
            raise TypeError("a step names what it came after, if anything, and a digest")
        return cls(ServiceSession.from_data(fields["session"]), fields["after"], fields["digest"])


def _fields(data: object, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise TypeError(f"a mapping is needed here, not {type(data).__name__}")
    fields = cast("Mapping[str, Any]", data)
    if fields.keys() != names:
        raise TypeError(f"the fields must be {', '.join(sorted(names))}")
    return fields


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} must be a whole number of messages, not {value!r}")
    return value


def digest_of(messages: Iterable[Message]) -> str:
    """The same for messages that say the same, whenever they were said."""
    said = [[encode(value) for value in _said(message)] for message in messages]
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()


def _said(message: Message) -> tuple[Any, ...]:
    calls = [[call.id, call.name, call.args] for call in message.tool_calls]
    results = [
        [each.tool_call_id, each.name, repr(each.parts) if each.parts else each.content, each.is_error]
        for each in message.tool_results
    ]
    content = message.content if isinstance(message.content, str | None) else repr(message.content)
    return message.role.value, content, calls, results


def id_key(id_: ServiceSessionId) -> str:
    """*id_* as text that is the same for equal ids, whatever the order of a mapping's keys."""
    return msgspec.json.encode(encode(_frozen_id(id_)), order="sorted").decode()
