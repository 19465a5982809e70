"""Any damage to any valid file: what repair promises of it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from chatflow.core.codec import message_to_json
from chatflow.core.messages import Message, Role
from chatflow.core.pruning import prune
from chatflow.core.records import system_place
from chatflow.sqlite.store import SQLiteSessionStore
from tests import strategies
from tests.sqlite.damage import holds, messages_in, messages_set_aside, unguarded
from tests.sqlite.files import SUPPORT

UNCUT: Final = 10_000
"""More turns than any history here has."""

Rows = dict[tuple[int, int], bytes]
"""Messages by conversation and place."""

OF_ROWS: Final[dict[str, Callable[[Rows, tuple[int, int], tuple[int, int]], None]]] = {
    "lose": lambda rows, one, _: rows.__delitem__(one),
    "no JSON": lambda rows, one, _: rows.update({one: b"x" + rows[one]}),
    "cut off": lambda rows, one, _: rows.update({one: rows[one][:40]}),
    "no UTF-8": lambda rows, one, _: rows.update({one: b"\xff" + rows[one]}),
    "swap": lambda rows, one, two: rows.update({one: rows[two], two: rows[one]}),
    "copy": lambda rows, one, two: rows.update({one: rows[two]}),
    "far": lambda rows, one, _: rows.update({(one[0], min(one[1] + 1000, 2**63 - 1)): rows.pop(one)}),
    "last": lambda rows, one, _: rows.update({(one[0], 2**63 - 1): rows.pop(one)}),
    "other kind": lambda rows, one, _: rows.update(
        {(one[0], one[1] + 2**62 if one[1] < 0 else one[1] - 2**62): rows.pop(one)}
    ),
    "other conversation": lambda rows, one, _: rows.update({(3 - one[0], one[1]): rows.pop(one)}),
    "no conversation": lambda rows, one, _: rows.update({(one[0] + 70, one[1]): rows.pop(one)}),
}
"""What is done to one of the messages, or to two."""

OF_THE_REST: Final = {
    "metadata": "UPDATE chatflow_sessions SET metadata_json = '[' WHERE session_key = ?",
    "state": "UPDATE chatflow_sessions SET state_json = CAST(x'7bff7d' AS TEXT) WHERE session_key = ?",
    "agent": "UPDATE chatflow_sessions SET active_agent_name = '' WHERE session_key = ?",
    "turns": "UPDATE chatflow_sessions SET max_turns = -1 WHERE session_key = ?",
    "moment": "UPDATE chatflow_sessions SET created_at = 'x', updated_at = '' WHERE session_key = ?",
    "id": "UPDATE chatflow_sessions SET session_id = CAST(x'ff' || session_id AS TEXT) WHERE session_key = ?",
    "owner": "UPDATE chatflow_sessions SET owner = CAST(x'ff' AS TEXT) WHERE session_key = ?",
    "conversation": "DELETE FROM chatflow_sessions WHERE session_key = ?",
    "answer": "UPDATE chatflow_processed_messages SET response_json = 'x' WHERE message_id = 'm' || ?",
    "moment of id": "UPDATE chatflow_processed_messages SET processed_at = 'x' WHERE message_id = 'm' || ?",
    "message id": """
        UPDATE OR IGNORE chatflow_processed_messages SET message_id = CAST(x'ff' AS TEXT)
        WHERE message_id = 'm' || ?
    """,
    "turn": """
        INSERT INTO chatflow_turns (
            session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, queued_at
        )
        VALUES (70 + ?, 'queued', 'somebody', 0, 0, 10, 0, 'Support', 'x')
    """,
}
"""What is done to one of the two conversations besides."""

steps: Final = st.lists(
    st.tuples(st.sampled_from([*OF_ROWS, *OF_THE_REST]), st.integers(0, 40), st.integers(0, 40)), max_size=6
)


def rows_of(session_key: int, messages: Sequence[Message]) -> Rows:
    """A history that the rules allow, of which no two messages are equal, as rows."""
    rows: Rows = {}
    systems = bodies = 0
    numbered = [attrs.evolve(each, extra={"n": number, "of": session_key}) for number, each in enumerate(messages)]
    for message in prune(numbered, UNCUT):
        is_system = message.role is Role.SYSTEM
        place = system_place(systems) if is_system else bodies
        systems, bodies = systems + is_system, bodies + (not is_system)
        rows[session_key, place] = message_to_json(message).encode()
    return rows


def write(path: Path, rows: Rows, rest: Sequence[tuple[str, int]]) -> None:
    """Let the file hold those messages, and do what is to be done to the rest."""
    with unguarded(path) as connection:
        connection.executemany(
            "INSERT INTO chatflow_messages VALUES (?, ?, CAST(? AS TEXT))",
            [(session_key, place, text) for (session_key, place), text in rows.items()],
        )
        for name, which in rest:
            connection.execute(OF_THE_REST[name], (1 + which % 2,))


async def check_promises(rows: Rows, rest: Sequence[tuple[str, int]], *, is_damaged: bool) -> None:
    """Make the file, repair it, and see."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.db"
        async with SQLiteSessionStore(path) as store:
            for number in (1, 2):
                await store.get_or_create(f"s{number}", SUPPORT)
                await store.mark_message_processed(f"m{number}", session_id=f"s{number}")
        write(path, rows, rest)
        before, was = messages_in(path), holds(path)
        async with SQLiteSessionStore(path) as store:
            faults, repairs = await store.check(), await store.repair()
            assert Counter(repair.fault for repair in repairs) == Counter(faults)
            if not is_damaged:
                assert (repairs, holds(path)) == ((), was)
            assert await store.check() == ()
            mended = holds(path)
            assert await store.repair() == ()
            assert holds(path) == mended
            for info in (await store.list_sessions()).items:
                session = await store.get(info.session_id)
                assert session is not None
                assert prune(session.history, UNCUT) == tuple(session.history)
        kept, aside = messages_in(path), messages_set_aside(path)
        shortened = kept - before
        assert before == kept - shortened + aside
        partly = [row for row in mended["chatflow_set_aside"] if row[5].startswith(b"a result of it")]
        assert shortened.total() <= len(partly)


@settings(max_examples=60)
@given(strategies.histories(), strategies.histories(), steps)
def test_any_damage(one: list[Message], two: list[Message], drawn: list[tuple[str, int, int]]) -> None:
    """All that check finds is mended: it finds nothing then, every conversation loads by the rules, nothing is lost."""
    rows = rows_of(1, one) | rows_of(2, two)
    rest: list[tuple[str, int]] = []
    for name, first, second in drawn:
        if name in OF_THE_REST:
            rest.append((name, first))
        elif rows:
            keys = sorted(rows)
            OF_ROWS[name](rows, keys[first % len(keys)], keys[second % len(keys)])
    anyio.run(partial(check_promises, rows, rest, is_damaged=bool(drawn)))
