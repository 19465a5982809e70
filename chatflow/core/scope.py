"""Scope: whose conversations a store shows, and who may ask about all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from chatflow.core.owners import AllOwners, check_owner
from chatflow.core.records import Key, check_id
from chatflow.exceptions import StoreOwnerRequiredError, StoreScopeError

if TYPE_CHECKING:
    from chatflow.core.backend import StoreBackend


class Scope(ABC):
    """A store's name and owner, and what stands below it."""

    @property
    @abstractmethod
    def backend(self) -> StoreBackend:
        """What it stands on, and shares with the stores of other owners."""

    @property
    @abstractmethod
    def owner(self) -> str:
        """Whose conversations these are; empty for those without an owner."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What errors and logs call it."""

    @property
    @abstractmethod
    def default_max_turns(self) -> int:
        """How many turns a conversation without a number of its own keeps."""

    @property
    @abstractmethod
    def dedup_ttl_hours(self) -> float:
        """How long message ids are remembered."""

    @property
    @abstractmethod
    def is_closing(self) -> bool:
        """Whether `aclose` was called."""

    def key_of(self, session_id: str) -> Key:
        """What names that conversation in the storage.

        Raises:
            StoreOwnerRequiredError: The store requires an owner.
        """
        return Key(self._own(), check_id(session_id, "session_id"))

    def _scope(self, session_id: str | None) -> Key:
        """What message ids belong to: a conversation, or none."""
        # No conversation has the empty id, so a mark without one can't meet a conversation's own.
        return Key(self._own(), "") if session_id is None else self.key_of(session_id)

    @property
    def is_of_owner(self) -> bool:
        """Whether `for_owner` gave it."""
        return self.backend is not self

    def _own(self) -> str:
        """Whom a call is about that names nobody."""
        if not self.is_of_owner and self.backend.requires_owner:
            raise StoreOwnerRequiredError(store=self.name)
        return self.owner

    def _asked(self, owner: AllOwners | None, what: str) -> str | None:
        """Whom a question is about; None for all owners."""
        if owner is None:
            return self._own()
        if not isinstance(owner, AllOwners):
            raise TypeError(f"owner must be ALL or left out, not {owner!r}; for one owner's use for_owner()")
        self.refuse_owners(f"{what}(owner=ALL)")
        return None

    def _administered(self, owner: str, what: str) -> str:
        """Whom *what* is about: any owner, or this store's own."""
        name = check_owner(owner, may_be_empty=True)
        if name != self.owner:
            self.refuse_owners(f"{what}() of another owner")
        return name

    def refuse_owners(self, what: str) -> None:
        """Raise `StoreScopeError` where this is one owner's store, which *what* is not for."""
        if self.is_of_owner:
            raise StoreScopeError(store=self.name, what=what)
