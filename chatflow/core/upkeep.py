"""Upkeep: what whoever runs a store does with it now and then. Its docstrings are the specification."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.export import lines_of_owner
from chatflow.core.finish import finish
from chatflow.core.owners import AllOwners, Erased
from chatflow.core.records import PendingTurn, check_span
from chatflow.core.repairs import Fault, Part, Repair
from chatflow.core.scope import Scope

_T = TypeVar("_T")

SLICE: Final = 1000
"""Rows that one transaction deletes at most, so that turns can commit in between."""


class Upkeep(Scope):
    """Retention, owners as a whole, turns that wait, damage."""

    async def pending_turns(self, *, owner: AllOwners | None = None) -> tuple[PendingTurn, ...]:
        """All turns that have a row in the store, in the order they came; with ``owner=ALL`` those of all owners.

        They are those that run or wait, the accepted and interrupted ones that nobody does at the moment, those that
        failed and go on when their message is sent again, the dead ones, and answered ones of which `on_response` has
        not heard yet.
        """
        asked = self._asked(owner, "pending_turns")
        found: list[PendingTurn] = []
        while True:
            page = await self.backend.page_of_turns(asked, found[-1].turn_id if found else 0, SLICE)
            found += page
            if len(page) < SLICE:
                return tuple(found)

    async def purge_processed_messages(self) -> int:
        """Forget all expired message ids, at most 1,000 a transaction, and return how many they were.

        Marks, and turns with a message id, forget some by themselves, more than they add; this clears a backlog at
        once, of all owners.
        """
        self.refuse_owners("purge_processed_messages()")
        purged = 0
        while True:
            count = await finish(self.backend.purge_processed(SLICE))
            purged += count
            if count < SLICE:
                return purged
            await yield_once()  # as in clear()

    async def purge(self, idle_for: dt.timedelta | float | None = None, *, owner: AllOwners | None = None) -> int:
        """Delete conversations that were left alone for too long, as `delete` does; how many they were.

        They are those whose own *expires_after* is over and, with *idle_for* (a timedelta or seconds), those without a
        commit for that long; a merge of metadata is a commit. None goes with a turn that is in line, runs, was accepted
        or interrupted, or whose answer is still to be told; told and dead ones hold nothing. With ``owner=ALL`` those
        of all owners. At most 1,000 are looked at in a transaction, so that turns commit in between.

        Time is counted by the clock of whoever committed. A commit that lies in the future says nothing, and its
        conversation stays until that moment has come and *idle_for* passed. Commits are looked at in their order, up to
        the first that is fresh: where a clock was set back, a conversation may stay for as much longer.

        It also finishes what an `erase_owner` that was killed has left.

        Raises:
            ValueError: *idle_for* is not above 0.
        """
        asked = self._asked(owner, "purge")
        seconds = None if idle_for is None else check_span("idle_for", idle_for)
        return await self.backend.purge_all(asked, seconds)

    async def erase_owner(self, owner: str, *, rewrite_file: bool = False) -> Erased:
        """Erase all that is kept of an owner, and say how much it was; the empty name means what has no owner.

        One commit hides all of it: conversations, turns, message ids, what an upgrade or a repair has set aside.
        Whoever uses one of the conversations, in whatever process, gets `SessionDeletedError`, and turns under way
        can't commit. The rows then go a slice at a time, are overwritten where they stood, and the log beside a file is
        written into it and emptied. Killed in between, nothing is seen again, and the next `erase_owner` or `purge`
        of whatever owner does the rest. What the owner begins meanwhile, or afterwards, is new and stays.

        Fragments may be left in a file that no query finds: SQLite leaves copies where it has moved rows between pages.
        *rewrite_file* writes the whole file anew (``VACUUM``), and leaves none. It needs as much room again, and holds
        up all writes meanwhile: about a second for each 100 MB.

        Raises:
            StoreScopeError: This is another owner's store.
            StoreError: The storage failed. Where it was hidden before, it stays hidden.
        """
        return await self.backend.erase(self._administered(owner, "erase_owner"), rewrite=rewrite_file)

    async def export_owner(self, owner: str) -> AsyncGenerator[str, None]:
        """All that is kept of an owner, as lines of JSON, each an object with a ``"kind"``.

        ``async for line in store.export_owner(owner):`` reads them as they are asked for, a conversation at a time. The
        first has the kind ``"export"`` and names the format and the owner. Then come

        - ``"conversation"``: as one commit left it; its ``"session"`` is what `AgentSession.to_dict` gives;
        - ``"turn"``: one that has not committed, its message's text, and what its tools have done so far;
        - ``"message_id"``: one that is remembered, and the answer that is kept with it;
        - ``"set_aside"``: what an upgrade or a repair has taken out;
        - ``"unreadable"``: which conversation is damaged, and where; `repair` mends it.

        Values that JSON has no form for stand in envelopes, as in the store itself. A conversation that is begun or
        deleted meanwhile may be in it or not; each other one is, once.

        Raises:
            StoreScopeError: This is another owner's store.
        """
        name = self._administered(owner, "export_owner")
        async for line in lines_of_owner(self.backend, name):
            yield line

    async def check(self) -> tuple[Fault, ...]:
        """All that is wrong with what the store holds, of every owner; empty if nothing is. Changes nothing.

        It finds rows that can't be read (messages, metadata, state, names, turns, stored answers), histories that break
        the rules of `prune` (its *max_turns* aside) or have gaps, rows whose conversation does not exist, and what the
        storage's own integrity check finds. A fault that only the storage can see, such as an index that lacks a row,
        may be reported beside the row it hides.

        Conversations are looked at a few at a time, so that other operations run in between, and each as one commit
        left it. It reads everything once, on a file's reading thread: about a second for 25,000 messages beside other
        work. The integrity check is one step, and holds up other reads as long as reading the whole file takes; turns
        go on meanwhile, but for those that have to wait for a read. In memory it runs on the event loop.

        Raises:
            StoreError: The storage can't be opened or read at all.
        """
        self.refuse_owners("check()")
        return await _gathered(self.backend.examine)

    async def repair(self) -> tuple[Repair, ...]:
        """Mend all that can be mended by rule, and return what was done about each fault; empty if there was none.

        Nothing is thrown away: what is taken out is set aside as it stood (in a file, in the table
        ``chatflow_set_aside``), with its owner, session id, source and the reason. It goes when the conversation is
        deleted. The rules:

        - A message that can't be read is set aside. Those after a gap, or after what was taken out, follow on.
        - Then the rules of `prune` decide, with no limit of turns: system messages stand first; what comes before the
          first user message is set aside, and so is a result without its call. Of a tool message with several results
          the others stay; the whole message is set aside as it was.
        - Metadata or state that can't be read is set aside, and empty from then on; a number of turns becomes the
          store's; a moment, another known one or now. A service's session that can't be read is gone, and a key that
          does not fit it follows it; a time to expire that can't be read is none.
        - A name that can't be read (of an owner, a session or an agent) is written with replacement characters; an
          owner's and a session's get ``(session_key 7)`` appended, so that they are nobody else's.
        - A turn is not run again where nobody can know what it was to do or has done: its message, or a line of its
          journal, can't be read or is missing. What can't be read, and the whole journal, is set aside, and the turn is
          dead; without a message id, or where that can't be read, its row is set aside.
        - A turn that names nobody who has it in hand, though somebody must, is interrupted.
        - A stored answer that can't be read is set aside, and its message id stays known. An id that can't be read is
          set aside with all that is kept of it.
        - Rows whose conversation, or whose turn, does not exist are set aside.
        - Indexes are built anew where the integrity check finds fault with one. What else it finds can't be mended.

        Each conversation is mended in one durable transaction of its own, as a commit: whoever has it open sees it with
        the next turn or `get`, and a session of this store and event loop at once. A conversation with a turn under way
        is left alone, and so is a turn that somebody has in hand: it ends by itself, or is interrupted and then mended.
        Two programs may repair at once; run twice, it finds nothing the second time but what can't be mended. It costs
        what `check` does, two more integrity checks where one finds something, and the writing thread for as long as
        one conversation's messages, or an index, take to be written.

        Raises:
            StoreError: The storage can't be opened, read or written; what was mended before that stays mended.
        """
        self.refuse_owners("repair()")
        return await _gathered(self.backend.repair_slice)


async def _gathered(slice_after: Callable[[object | None], Awaitable[Part[_T]]]) -> tuple[_T, ...]:
    items: list[_T] = []
    part = await slice_after(None)
    while True:
        items += part.items
        if part.next is None:
            return tuple(items)
        await yield_once()  # where a cancellation can end it, which a repair's slices hold off
        part = await slice_after(part.next)
