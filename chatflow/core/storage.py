"""Storage: the primitives that a backend writes, below what users call."""

from __future__ import annotations

from abc import ABC, abstractmethod

from chatflow.core.journal import Entry
from chatflow.core.line import Line
from chatflow.core.messages import Message
from chatflow.core.owners import Hidden, Purged, RememberedId, Stored, TakenOut
from chatflow.core.records import (
    Accepted,
    Answered,
    Beat,
    Beaten,
    Commit,
    Committed,
    Cycle,
    Dead,
    InProgress,
    Key,
    Leaving,
    Left,
    Lost,
    NewSession,
    Page,
    PendingTurn,
    Place,
    Seen,
    SessionInfo,
    Snapshot,
    Ticket,
    Work,
)
from chatflow.core.repairs import Fault, Part, Repair


class Storage(ABC):
    """Conversations, turns and message ids. Each method is atomic, and decides nothing that it does not say."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The storage's name in errors and logs."""

    @property
    @abstractmethod
    def line(self) -> Line:
        """The waiters of this process: one line for all stores of it that share a storage."""

    @abstractmethod
    async def load_session(self, key: Key, known: Snapshot | None) -> Snapshot | Seen:
        """The conversation as it is now: UNCHANGED if that is what *known* says, ABSENT if there is none."""

    @abstractmethod
    async def create_session(self, key: Key, new: NewSession) -> Snapshot:
        """Create the conversation, or merge *new*'s metadata into the one that exists; durably, in one operation."""

    @abstractmethod
    async def delete_session(self, key: Key) -> tuple[int, ...] | None:
        """Delete the conversation with its messages, turns and stored answers; the deleted turns, or None."""

    @abstractmethod
    async def delete_sessions(self, owner: str, after: int | None, limit: int) -> tuple[int | None, tuple[int, ...]]:
        """Delete up to *limit* of the owner's conversations, from the session key *after* on.

        Returns the key to go on after, None when all are deleted, and the deleted turns.
        """

    @abstractmethod
    async def page_of_sessions(self, owner: str | None, limit: int, after: int | None) -> Page[SessionInfo]:
        """Up to *limit* conversations whose version is below *after*, highest first; None means those of all owners."""

    @abstractmethod
    async def find_service_session(self, owner: str, service_key: str, agent_names: frozenset[str]) -> Key | None:
        """The owner's conversation that holds that id of a service's, given to one of these agents or to any.

        Of several the one with the highest version.
        """

    @abstractmethod
    async def page_of_messages(self, key: Key, limit: int, before: int | None) -> Page[Message] | None:
        """The last *limit* messages that stand before *before* in the history, or None for no conversation."""

    @abstractmethod
    async def queue_turn(self, ticket: Ticket) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        """Give a turn its place, and start what `rows.next_to_run` says, in one operation.

        A claim is looked up first: a message that was answered, or is under way, or dead, takes no row. Waiting work
        with the claim's id is taken in its place; a turn that was told of its end takes a new place, with its journal.
        *known* names the incarnation the row belongs to: if that is gone, `Lost.SESSION`. Without *known* the
        conversation is created if need be. A row that would have to wait for one that waits for *ancestors* is `Cycle`,
        and not inserted.
        """

    @abstractmethod
    async def start_turn(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        """Start what `rows.next_to_run` says about that row, if its fence holds: itself, or work before it.

        What is spent is dead instead; the row itself: `Dead`, work before it: the one after that.
        """

    @abstractmethod
    async def accept_turn(self, ticket: Ticket) -> Accepted | Answered | Dead:
        """Store the ticket's claim as work to be done, durably, and create the conversation if need be.

        A message that is under way already is only noted as accepted; one that was told of its end gets a new place.
        Nothing is changed for another digest.
        """

    @abstractmethod
    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Write what the turn changed and delete its row, durably, in one operation; nothing if the fence has changed.

        With a claim, the id is marked and the response stored in the same operation, and an accepted row stays,
        answered.
        """

    @abstractmethod
    async def leave_turn(self, leaving: Leaving) -> Left:
        """Make of the row what `rows.ended` says, if its fence holds."""

    @abstractmethod
    async def look_at_turn(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        """What is gone, if the row does not run any more under that fence."""

    @abstractmethod
    async def is_held(self, turn_id: int) -> bool:
        """Whether somebody has the row in hand."""

    @abstractmethod
    async def write_journal(
        self, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None, *, durable: bool
    ) -> Lost | None:
        """Add a line to the journal of a running row, if its fence holds; else what is gone."""

    @abstractmethod
    async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        """Raise the beat of those rows of this holder, and read those of the other held rows to be watched.

        They are all in the lines of *held*, those *watched*, and with *everything* all that are held. It always waits
        for the right to write: whoever could not write must not take others for silent.
        """

    @abstractmethod
    async def interrupt_turn(self, beat: Beat) -> bool:
        """Make of the row what `rows.interrupted` says, if its beat is still the same; True if so."""

    @abstractmethod
    async def take_work(self, agent_name: str, lease_seconds: float, limit: int, *, answers: bool) -> tuple[Work, ...]:
        """Take up to *limit* rows that nobody has in hand: with *answers* answered ones, then the first of each line.

        Only those of that application, and of a line only what no other row stands before, passed ones excepted. From
        now on each may be silent for *lease_seconds*, whatever was true for who had it before.
        """

    @abstractmethod
    async def is_next_to_tell(self, turn_id: int, attempt: int) -> bool | None:
        """Whether no answered row of its conversation stands before that one; None if it is not this holder's."""

    @abstractmethod
    async def end_answered(self, turn_id: int, attempt: int) -> None:
        """Delete an answered row: its answer has been handed on."""

    @abstractmethod
    async def page_of_turns(self, owner: str | None, after: int, limit: int) -> tuple[PendingTurn, ...]:
        """Up to *limit* of the owner's turns, or of all owners', above the id *after*."""

    @abstractmethod
    async def is_processed(self, scope: Key, message_id: str) -> bool:
        """Whether the id is marked and not expired."""

    @abstractmethod
    async def mark_processed(self, scope: Key, message_id: str) -> bool:
        """Mark the id durably unless it is marked; True if this call did."""

    @abstractmethod
    async def purge_processed(self, limit: int) -> int:
        """Delete up to *limit* expired ids of every owner, and return how many they were."""

    @abstractmethod
    async def purge_sessions(
        self, owner: str | None, idle_for: float | None, after: object | None, limit: int
    ) -> Purged:
        """Look at up to *limit* conversations that may have been left alone for too long, and delete those that were.

        First those whose own time is over, then, with *idle_for*, those that had no commit for so many seconds, from
        the lowest version on, up to the first that had. One with a turn stays, unless that is told or dead. *after* is
        the `next` of the slice before; None for *owner* means all owners.
        """

    @abstractmethod
    async def hide_owner(self, owner: str) -> Hidden:
        """Delete the owner's turns, and take all else that is the owner's out of everybody's sight, in one operation.

        Every operation on these conversations finds from then on what it would find had they been deleted.
        """

    @abstractmethod
    async def drop_hidden(self, limit: int) -> bool:
        """Delete a slice of what was hidden, whoever hid it, of up to *limit* conversations. True if more may be left.

        What is deleted is overwritten.
        """

    @abstractmethod
    async def flush_hidden(self, *, rewrite: bool) -> bool:
        """Leave nothing of what was hidden and dropped in a log beside the storage; True if nothing is left there.

        With *rewrite* the whole storage is written anew first, so that nothing is left of what it ever deleted. Without
        it there is nothing to do where nothing was hidden since the last time.
        """

    @abstractmethod
    async def page_of_session_ids(self, owner: str, after: str, limit: int) -> tuple[str, ...]:
        """Up to *limit* ids of the owner's conversations above *after*, in the order of code points.

        An order that no commit changes. Ids that can't be read are among them as lone surrogates.
        """

    @abstractmethod
    async def read_session(self, key: Key) -> Stored | None:
        """The conversation and its times."""

    @abstractmethod
    async def read_journal(self, turn_id: int) -> tuple[Entry, ...]:
        """What a turn has noted so far."""

    @abstractmethod
    async def page_of_processed(self, owner: str, after: tuple[str, str], limit: int) -> tuple[RememberedId, ...]:
        """Up to *limit* of the owner's message ids above *after*, by session id and message id."""

    @abstractmethod
    async def page_of_set_aside(self, owner: str, after: int, limit: int) -> tuple[TakenOut, ...]:
        """Up to *limit* of what was taken out of the owner's conversations, above the number *after*."""

    @abstractmethod
    async def examine(self, after: object | None) -> Part[Fault]:
        """The next slice of what is wrong, as `check` says; *after* is the `next` of the slice before."""

    @abstractmethod
    async def mend(self, after: object | None) -> Part[Repair]:
        """Mend the next slice of what is wrong, as `repair` says; *after* is the `next` of the slice before.

        Each conversation in one operation, in which nobody's turn is under way, and which gives it a new version.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the storage, and wake all who wait in its line. The second time there is nothing to do."""

    @abstractmethod
    def abandon(self) -> bool:
        """Release the storage without waiting, since nobody holds the store any more. True if it was open."""
