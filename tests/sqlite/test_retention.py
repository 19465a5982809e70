"""What is stored of services' ids and of retention: damage of it, and clocks that other programs have set."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from chatflow.core.records import LONGEST_SPAN, NewSession
from chatflow.core.service import ServiceSession
from chatflow.core.values import EMPTY
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite.operations import expiry
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.conftest import OpenStore
from tests.sqlite.damage import NO_UTF8, Damaging, column, loose, sql
from tests.sqlite.files import SUPPORT, query, say

SERVICE: Final = ServiceSession("resp_1", "Support", "openai")
KEPT: Final = "service_json, service_key, expires_after"


async def fill(path: Path, **details: Any) -> None:
    """A conversation "s" at a service, which expires, and one without either."""
    new = NewSession(agent_name="Support", metadata=EMPTY, max_turns=None, service=SERVICE, expires_after=60.0)
    async with SQLiteSessionStore(path) as store:
        await store.create_session(store.key_of("s"), attrs.evolve(new, **details))
        await say(await store.get_or_create("s", SUPPORT), "hello")
        await store.get_or_create("other", SUPPORT)


@attrs.frozen
class Damage:
    """What is done to the row, the columns that are found, and what stands in the row then, None for what stood."""

    damage: Damaging
    faults: tuple[str, ...]
    service: str | None = SERVICE.key
    expires_after: float | None = 60.0
    refuses: bool = False
    """Whether the conversation can't be loaded meanwhile."""


DAMAGE: Final = {
    "service": Damage(sql(column("service_json", "'x'")), ("service_json",), service=None, refuses=True),
    "service that is no UTF-8": Damage(
        sql(column("service_json", NO_UTF8)), ("service_json",), service=None, refuses=True
    ),
    "service of another form": Damage(sql(column("service_json", "'{}'")), ("service_json",), None, refuses=True),
    "service without a key": Damage(sql(column("service_key", "NULL")), ("service_key",)),
    "another key": Damage(sql(column("service_key", "'x'")), ("service_key",)),
    "key that is no UTF-8": Damage(sql(column("service_key", NO_UTF8)), ("service_key",)),
    "key without a service": Damage(sql(column("service_json", "NULL")), ("service_key",), service=None),
    "span": Damage(sql(column("expires_after", "-1")), ("expires_after",), expires_after=None, refuses=True),
    "span without end": Damage(sql(column("expires_after", "9e999")), ("expires_after",), SERVICE.key, None, True),
    "long span": Damage(sql(column("expires_after", "1e15")), ("expires_after",), SERVICE.key, None, refuses=True),
    "moment without a span": Damage(sql(column("expires_after", "NULL")), ("expires_at",), expires_after=None),
    "span without a moment": Damage(sql(column("expires_at", "NULL")), ("expires_at",)),
    "cost": Damage(sql(column("spent_json", "'[]'")), ("spent_json",), refuses=True),
    "cost of another form": Damage(sql(column("spent_json", "'{\"total\": 5}'")), ("spent_json",), refuses=True),
    "moment": Damage(sql(column("expires_at", "'x'")), ("expires_at",)),
    "moment that is over": Damage(sql(column("expires_at", "'2000-01-01T00:00:00+00:00'")), ("expires_at",)),
    "moment that is no UTF-8": Damage(sql(column("expires_at", NO_UTF8)), ("expires_at",)),
    "moment that sorts first": Damage(sql(column("expires_at", "CAST(x'31ff' AS TEXT)")), ("expires_at",)),
    "all of it": Damage(
        sql(column("service_json", "'x'"), column("expires_after", "-1"), column("metadata_json", "'x'")),
        ("expires_after", "metadata_json", "service_json"),
        service=None,
        expires_after=None,
        refuses=True,
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_mends(kind: str, path: Path, open_store: OpenStore) -> None:
    """Check names the column, repair mends it by its rule, and sets aside what stood there."""
    await fill(path)
    damage = DAMAGE[kind]
    before = query(path, f"SELECT {KEPT}, expires_at FROM chatflow_sessions WHERE session_id = 's'")
    damage.damage(path)
    store = open_store()
    if damage.refuses:
        with pytest.raises(CorruptSessionError):
            await store.get("s")
    faults = await store.check()
    assert sorted(fault.row.rpartition(", ")[2] for fault in faults) == sorted(damage.faults)
    repairs = await store.repair()
    assert {each.action for each in repairs} == {"replaced"}
    assert await store.check() == ()
    json_, key, seconds, moment = query(
        path, f"SELECT {KEPT}, expires_at FROM chatflow_sessions WHERE session_id = 's'"
    )[0]
    assert (key, seconds) == (damage.service, damage.expires_after)
    assert json_ == (None if damage.service is None else before[0][0])
    assert (moment is None) is (damage.expires_after is None)
    assert moment is None or moment > before[0][3]
    assert query(path, "SELECT count(*) FROM chatflow_set_aside") == [len(faults)]
    session = await store.get("s")
    assert session is not None
    await say(session, "again")


async def test_key_of_another_type(path: Path, open_store: OpenStore) -> None:
    """Columns that hold a value of a wrong type are mended too."""
    await fill(path)
    loose(column("service_key", "x'00'"), column("expires_after", "'long'"), column("expires_at", "x'00'"))(path)
    store = open_store()
    found = {fault.row.rpartition(", ")[2] for fault in await store.check() if fault.kind == "session"}
    assert found == {"service_key", "expires_after"}
    await store.repair()
    assert await store.check() == ()


@pytest.mark.parametrize("service", [None, "'x'"], ids=["none", "unreadable"])
async def test_not_found_by_a_damaged_service(path: Path, open_store: OpenStore, service: str | None) -> None:
    """A conversation whose service can't be read, or is another than its key says, is found by nobody's id."""
    await fill(path)
    sql(column("service_json", service or "NULL"))(path)
    store = open_store()
    assert await store.get_by_service_id(SUPPORT, "resp_1") is None


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind.startswith("moment")])
async def test_damage_purges_nothing(kind: str, path: Path, open_store: OpenStore) -> None:
    """A moment that can't be read purges no conversation, in no slice; one that can be read is believed."""
    await fill(path)
    DAMAGE[kind].damage(path)
    store = open_store()
    assert await store.purge() == ("over" in kind)
    progress = (await store.purge_sessions("", None, None, 1)).next
    if progress is not None:
        assert (await store.purge_sessions("", None, progress, 1)).sessions == ()


async def test_damaged_commit_purges_nothing(path: Path, open_store: OpenStore) -> None:
    """The moment of a commit that can't be read says nothing of what comes after it."""
    await fill(path, expires_after=None)
    sql(
        "UPDATE chatflow_sessions SET updated_at = '2000-01-01T00:00:00+00:00'",
        column("updated_at", "'2000-99-99T'"),
    )(path)
    store = open_store()
    assert await store.purge(60) == 1
    assert query(path, "SELECT session_id FROM chatflow_sessions") == ["s"]


def test_end_of_dates() -> None:
    """What would expire past the last date never does."""
    assert expiry("9999-01-01T00:00:00.000000+00:00", LONGEST_SPAN) is None
    moment = dt.datetime(2030, 1, 1, tzinfo=dt.UTC).isoformat(timespec="microseconds")
    assert expiry(moment, 1.5) == "2030-01-01T00:00:01.500000+00:00"


async def test_set_aside_goes_too(path: Path, open_store: OpenStore) -> None:
    """What was set aside of a conversation is purged with it, and no other's."""
    await fill(path)
    sql(column("metadata_json", "'x'"))(path)
    sql("UPDATE chatflow_sessions SET metadata_json = 'x' WHERE session_id = 'other'")(path)
    store = open_store()
    await store.repair()
    store.clock = lambda: dt.datetime.now(dt.UTC) + dt.timedelta(minutes=2)
    assert await store.purge() == 1
    assert query(path, "SELECT session_id FROM chatflow_set_aside") == ["other"]
