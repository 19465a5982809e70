"""A conversation's session at a service that keeps its history itself: which one it is, and what the service has seen.

What a service has seen can be told from the messages alone: the model's message that came with an id carries it. So
what stands after the last one that carries the session's id is new to the service, also after a rollback, a restart, or
a turn that is tried again from its journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import attrs
import orjson

from chatflow.core.envelopes import encode
from chatflow.core.messages import Message, Role
from chatflow.core.values import FrozenDict, freeze, freeze_mapping
from chatflow.exceptions import UnstorableValueError

SERVICE_KEY: Final = "chatflow_service_session"
"""In a message's `extra`: the service's session as it was once the service had made this message."""

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
    engine calls it; None until an engine has used it.
    """

    id: str | FrozenDict = attrs.field(converter=_frozen_id)
    agent_name: str | None = None
    service: str | None = None

    @property
    def key(self) -> str:
        """The id as text to look it up by: the same for equal ids."""
        return id_key(self.id)

    def is_for(self, agent_names: frozenset[str]) -> bool:
        """Whether it was given to one of these agents, or to any."""
        return self.agent_name is None or self.agent_name in agent_names

    def to_data(self) -> FrozenDict:
        """The form that is kept."""
        return FrozenDict(id=self.id, agent_name=self.agent_name, service=self.service)

    @classmethod
    def from_data(cls, data: object) -> ServiceSession:
        """What `to_data` gave.

        Raises:
            TypeError: It is no such form.
            ValueError: The id in it is empty.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"a service's session is a mapping, not {type(data).__name__}")
        fields = cast("Mapping[str, Any]", data)
        if fields.keys() != {"id", "agent_name", "service"}:
            raise TypeError("a service's session has an id, an agent's name and a service's name")
        for name in ("agent_name", "service"):
            if not isinstance(fields[name], str | None):
                raise TypeError(f"{name} must be a string or nothing, not {type(fields[name]).__name__}")
        return cls(fields["id"], fields["agent_name"], fields["service"])


def id_key(id_: ServiceSessionId) -> str:
    """*id_* as text that is the same for equal ids, whatever the order of a mapping's keys."""
    return orjson.dumps(encode(_frozen_id(id_)), option=orjson.OPT_SORT_KEYS).decode()


def service_session_of(message: Message) -> ServiceSession | None:
    """What the message says of the service's session that it came from, if it came from one."""
    if message.role is not Role.MODEL or SERVICE_KEY not in message.extra:
        return None
    try:
        return ServiceSession.from_data(message.extra[SERVICE_KEY])
    except (TypeError, ValueError, UnstorableValueError):
        return None  # somebody else's word under our key


def unseen(history: Sequence[Message], session: ServiceSession) -> tuple[Message, ...] | None:
    """The messages that the service has not seen, or None if none in *history* came from that session of it.

    System messages stand in front of all others, whenever they came, and are none of these.
    """
    for position in range(len(history) - 1, -1, -1):
        found = service_session_of(history[position])
        if found is not None and found.id == session.id:
            return tuple(history[position + 1 :])
    return None
