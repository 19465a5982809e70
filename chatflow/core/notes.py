"""What a look at a storage notes down: the faults, what mending them will do, and what it will set aside."""

from __future__ import annotations

from typing import Any

import attrs

from chatflow.core import reading
from chatflow.core.records import Key
from chatflow.core.repairs import Action, Fault, FaultKind, Repair


@attrs.frozen(kw_only=True)
class SetAside:
    """What is taken out, from where, and why. Without a *session_id* it belonged to no conversation."""

    owner: str = ""
    session_id: str | None
    source: str
    content: object = attrs.field(converter=reading.as_stood)
    reason: str


@attrs.define
class Notes:
    """What has been found so far."""

    now: Key
    """How it is named in the file, as far as that can be read."""
    later: Key
    """How it will be named."""
    repairs: list[Repair] = attrs.field(factory=list[Repair])
    set_aside: list[SetAside] = attrs.field(factory=list[SetAside])

    def note(self, kind: FaultKind, row: str, reason: str, action: Action) -> None:
        """Note a fault that takes nothing out."""
        fault = Fault(kind=kind, session_id=self.now.session_id, owner=self.now.owner, row=row, reason=reason)
        self.repairs.append(Repair(fault, action))

    def take(self, kind: FaultKind, row: str, reason: str, content: Any, action: Action = "set aside") -> None:
        """Note a fault for which *content*, which stands in *row*, is set aside."""
        self.note(kind, row, reason, action)
        self.keep(row, reason, content)

    def keep(self, row: str, reason: str, content: Any) -> None:
        """Note what is set aside because of a fault that is noted elsewhere."""
        self.set_aside.append(
            SetAside(
                owner=self.later.owner,
                session_id=self.later.session_id or None,
                source=row,
                content=content,
                reason=reason,
            )
        )
