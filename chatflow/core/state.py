"""A session's metadata and state, as mappings that can be changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, cast

from chatflow.core.working import REMOVED, Kind

if TYPE_CHECKING:
    from chatflow.core.session import AgentSession


class Values(MutableMapping[str, Any]):
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

    def __getitem__(self, key: str) -> Any:
        return self._session.values(self._kind)[key]

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

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._session.values(self._kind)))

    def __len__(self) -> int:
        return len(self._session.values(self._kind))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self) == dict(cast("Mapping[object, object]", other))

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return repr(dict(self))
