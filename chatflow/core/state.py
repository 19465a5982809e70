"""A session's metadata and state, as mappings that can be changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final, cast

from chatflow.core.values import EMPTY
from chatflow.core.working import REMOVED, Kind
from chatflow.exceptions import SessionStateError, shorten

if TYPE_CHECKING:
    from chatflow.core.session import AgentSession


class _Changeable(MutableMapping[str, Any]):
    """What reads the same in all mappings of a session: a mapping that is looked up anew each time."""

    __slots__ = ()

    def _values(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def __getitem__(self, key: str) -> Any:
        return self._values()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._values()))

    def __len__(self) -> int:
        return len(self._values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self) == dict(cast("Mapping[object, object]", other))

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return repr(dict(self))


class Values(_Changeable):
    """A session's metadata or state: a mapping that can be changed, whose values are frozen copies.

    In a turn, its members see and change the turn's copy. Everyone else sees the last commit; a change of theirs waits
    beside it, joins the next turn key by key, and stays waiting if that turn fails.

    Raises:
        SessionStateError: On setting a value that can't be kept; the error names its path, and nothing has changed.
    """

    __slots__ = ("_kind", "_session")

    def __init__(self, session: AgentSession, kind: Kind) -> None:
        self._session = session
        self._kind: Kind = kind

    def _values(self) -> Mapping[str, Any]:
        return self._session.values(self._kind)

    def __setitem__(self, key: str, value: Any) -> None:
        frozen = self._session.freeze_values(self._kind, {key: value})
        self._session.set_value(self._kind, key, frozen[key])

    def update(self, *others: Any, **values: Any) -> None:
        """Set several keys, or none if one of the values can't be kept."""
        frozen = self._session.freeze_values(self._kind, dict(*others, **values))
        for key, value in frozen.items():
            self._session.set_value(self._kind, key, value)

    def __delitem__(self, key: str) -> None:
        self[key]
        self._session.set_value(self._kind, key, REMOVED)


_CHANGING: Final = threading.Lock()
"""Held for one change of a namespace, which reads what it changes: tools in threads may make two at the same time."""


class Namespace(_Changeable):
    """A mapping inside a session's state, under one key of it, that can be changed like the state itself.

    Its values are frozen copies. Without any values there is no such key.

    Raises:
        SessionStateError: On setting a value that can't be kept; the error names its path, and nothing has changed.
            Also where something else than a mapping stands under the key.
    """

    __slots__ = ("_key", "_session")

    def __init__(self, session: AgentSession, key: str) -> None:
        self._session = session
        self._key = key

    def _values(self) -> Mapping[str, Any]:
        found = self._session.values("state").get(self._key, EMPTY)
        if not isinstance(found, Mapping):
            raise self._refusal("", f"a mapping is kept here, not {type(found).__name__}")
        return cast("Mapping[str, Any]", found)

    def _refusal(self, path: str, reason: str) -> SessionStateError:
        return SessionStateError(session_id=self._session.session_id, path=f"state.{self._key}{path}", reason=reason)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *others: Any, **values: Any) -> None:
        """Set several keys, or none if one of the values can't be kept."""
        frozen = self._session.freeze_values("state", {self._key: dict(*others, **values)})[self._key]
        for key in frozen:
            if not isinstance(key, str):
                raise self._refusal(f"[{shorten(key)}]", "keys must be strings here")
        self._values()
        with _CHANGING:
            for key, value in frozen.items():
                self._session.set_inside(self._key, key, value)

    def __delitem__(self, key: str) -> None:
        with _CHANGING:
            self[key]
            self._session.set_inside(self._key, key, REMOVED)
