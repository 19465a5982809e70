"""Connection: one connection to a PostgreSQL server, in the words of this folder. Of the driver, psycopg, all is here.

Several statements go to the server together and are answered together, in one round trip; that is a *flight*. Nothing
is kept in a session of the server beside an open transaction, so that PgBouncer may stand between in transaction mode:
no settings but for one transaction, and no locks that outlive it. Where nobody stands between, statements are prepared,
locks are waited for for a limited time, and a level of isolation that is not PostgreSQL's own is set right.
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, LiteralString, TypeVar, cast

import attrs
import psycopg
from psycopg import conninfo
from psycopg.abc import PQGen
from psycopg.adapt import Buffer, Loader
from psycopg.types.numeric import Int8Dumper
from psycopg.types.string import StrDumperUnknown, TextBinaryLoader
from psycopg.waiting import Wait

from chatflow.exceptions import StoreError

_T = TypeVar("_T")

Row = tuple[Any, ...]
Error = psycopg.Error
OperationalError = psycopg.OperationalError

CONNECT_SECONDS: Final = 10
"""How long a server may take to accept a connection, unless the address says so."""

_ISOLATION: Final = "read committed"
"""A statement sees what was committed before it, not only what was before its transaction, which may have waited."""

LOCK_SECONDS: Final = 10.0
"""How long a statement waits for a lock, unless the server's settings, the user's or the address say so."""

_FIND_OUT: Final[LiteralString] = """
    SELECT pg_backend_pid() = %(pid)s, current_setting('default_transaction_isolation'), CASE
        WHEN pg_backend_pid() = %(pid)s AND current_setting('lock_timeout') = '0'
        THEN set_config('lock_timeout', %(wait)s, false)
    END
"""
"""Whether the connection leads to one process of the server, which then waits no longer than that for a lock, and how
transactions are kept apart where nothing else is said."""

_WAITING: Final[LiteralString] = """
    SELECT set_config('lock_timeout', %(wait)s, true) WHERE current_setting('lock_timeout') = '0'
"""
"""The same for one transaction."""

_PREPARED_AFTER: Final = 2
"""After how many uses of a statement the server keeps its plan, which takes longer to make than to use."""

_PLACED: Final = re.compile(
    r"\bchatflow_(?:meta|sessions|messages|processed_messages|turns|journal|set_aside|marks|versions|turn_ids"
    r"|turns_holder_idx|turns_agent_name_state_idx|marks_marked_at_idx)\b"
)


@attrs.frozen
class Step:
    """A statement with its parameters."""

    statement: LiteralString
    values: Mapping[str, Any] = attrs.field(factory=dict[str, Any])


@attrs.frozen
class Address:
    """Where a database is, and in which of its schemas the tables stand."""

    conninfo: str
    schema: str
    name: str
    """As errors show it: without the password."""


def locate(dsn: object, schema: object) -> Address:
    """Tell what *dsn* means.

    Raises:
        TypeError: Neither is text.
        ValueError: It is no address of a PostgreSQL server, or *schema* can't be a name.
    """
    if not isinstance(dsn, str):
        raise TypeError(f"dsn must be a string, not {type(dsn).__name__}")
    if not isinstance(schema, str):
        raise TypeError(f"schema must be a string, not {type(schema).__name__}")
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema):
        raise ValueError(f"schema must be of small letters, digits and underscores, at most 63, not {schema!r}")
    try:
        parts = conninfo.conninfo_to_dict(dsn)
    except psycopg.Error as error:
        # Neither the text nor the driver's word for what is wrong with it: both may hold the password.
        unknown = _unknown_part(dsn, str(error))
        wrong = "what was given can't be read" if unknown is None else f"it has no parameter {unknown!r}"
        raise ValueError(f"dsn must be like 'postgresql://user@host/database'; {wrong}") from None
    user = f"{parts['user']}@" if parts.get("user") else ""
    name = f"postgresql://{user}{_places(parts)}/{parts.get('dbname') or ''}"
    # A host that is switched off does not even refuse: of several, each one before the right one costs so long.
    patient = conninfo.make_conninfo(dsn, connect_timeout=parts.get("connect_timeout", CONNECT_SECONDS))
    return Address(patient, schema, name if schema == "chatflow" else f"{name}#{schema}")


def _unknown_part(dsn: str, said: str) -> str | None:
    """The name of a parameter that there is not, unless it might be of a password that was not quoted."""
    found = re.search(r'invalid (?:URI query parameter|connection option)\W+"([a-z_]+)"', said)
    query = dsn.partition("?")[2] if "://" in dsn else dsn
    return None if found is None or "@" in query or "password" in query else found[1]


def _places(parts: Mapping[str, Any]) -> str:
    hosts = str(parts.get("host") or "localhost").split(",")
    ports = str(parts.get("port") or "").split(",")
    if len(ports) == 1:
        # It is that of all hosts.
        ports *= len(hosts)
    return ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))


# --- text ---

# PostgreSQL keeps no NUL. This form of it keeps the order of code points, and is read back as what it was.
_WRITTEN: Final = str.maketrans({"\0": "\1\1", "\1": "\1\2"})
_READ: Final = {"\1\1": "\0", "\1\2": "\1"}
_ESCAPED: Final = re.compile("\1[\1\2]")


def stored_size(text: str) -> int:
    """How many bytes the server keeps of it, uncompressed."""
    return len(text.translate(_WRITTEN).encode(errors="surrogatepass"))


class _TextDumper(StrDumperUnknown):
    def dump(self, obj: str) -> Buffer | None:
        if "\0" in obj or "\1" in obj:
            obj = obj.translate(_WRITTEN)
        return super().dump(obj)


class _TextLoader(TextBinaryLoader):
    def load(self, data: Buffer) -> bytes | str:
        text = cast("str", super().load(data))
        return _ESCAPED.sub(lambda found: _READ[found[0]], text) if "\1" in text else text


class _MomentLoader(Loader):
    """A moment in UTC. The driver's own would ask the disk for the server's time zone.

    One that Python has no date for is shown as text, for whoever reads the row to refuse by its name.
    """

    format = psycopg.pq.Format.BINARY

    def load(self, data: Buffer) -> dt.datetime | str:
        microseconds = int.from_bytes(data, "big", signed=True)
        try:
            return _2000 + dt.timedelta(microseconds=microseconds)
        except OverflowError:
            return f"{microseconds} microseconds after 2000"


_2000: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


@lru_cache(maxsize=1024)
def _placed(statement: LiteralString, schema: str) -> bytes:
    """*statement* with the schema before each name of what stands in it."""
    return _PLACED.sub(lambda found: f'"{schema}".{found[0]}', statement).encode()


# --- connections ---


class Connection:
    """One connection. *mark_id* and *marks* name its last transaction: what it leaves behind tells whether it holds."""

    def __init__(self, connection: psycopg.AsyncConnection[Row], schema: str, *, is_shared: bool) -> None:
        self._connection = connection
        self._schema = schema
        self._is_shared = is_shared
        self.mark_id = uuid.uuid4().hex
        self.marks = 0
        self.is_spoilt = False

    @classmethod
    async def open(cls, address: Address) -> Connection:
        """Connect."""
        connection = await psycopg.AsyncConnection[Row].connect(
            address.conninfo,
            autocommit=True,
            prepare_threshold=None,
            client_encoding="utf8",
            fallback_application_name="chatflow",
        )
        connection.adapters.register_dumper(str, _TextDumper)
        # Always of one type, and not of the smallest that holds it: for other types a statement is prepared anew.
        connection.adapters.register_dumper(int, Int8Dumper)
        for kind in ("text", "json"):
            connection.adapters.register_loader(kind, _TextLoader)
        connection.adapters.register_loader("timestamptz", _MomentLoader)
        # A bouncer makes up a number: its clients are not told which server process they get.
        asked = {"pid": connection.info.backend_pid, "wait": _waiting_time()}
        ((is_direct, isolation, _),) = await (await connection.execute(_FIND_OUT, asked)).fetchall()
        if is_direct:
            connection.prepare_threshold = _PREPARED_AFTER
        if isolation != _ISOLATION and is_direct:
            await connection.execute(f"SET default_transaction_isolation = '{_ISOLATION}'")
        elif isolation != _ISOLATION:
            connection.pgconn.finish()
            raise StoreError(
                f"store {address.name!r}: default_transaction_isolation is {isolation} for this user or database, with"
                f" which one turn would not see what another has done while it waited; through a bouncer it can't be"
                f" changed from here: ALTER ROLE ... SET default_transaction_isolation = '{_ISOLATION}'",
                store=address.name,
            )
        return cls(connection, address.schema, is_shared=not is_direct)

    @property
    def is_usable(self) -> bool:
        """Whether it can be used again."""
        return not (self.is_spoilt or self._connection.closed)

    @property
    def server_version(self) -> int:
        """As 150004 for 15.4."""
        return self._connection.info.server_version

    @property
    def server_encoding(self) -> str:
        """How the database stores text."""
        return self._connection.info.parameter_status("server_encoding") or ""

    def close(self) -> None:
        """Let go of it at once; whatever is under way on the server ends by itself."""
        self.is_spoilt = True
        # The driver's own close() does no more, and has to be awaited.
        self._connection.pgconn.finish()

    async def fly(self, *steps: Step) -> list[list[Row]]:
        """Send *steps* together, as one transaction, and return what each answers."""
        if len(steps) == 1:
            # Not in a pipeline, in which the server does not vacuum.
            with self._closed_if_left():
                return [await _rows_of(await self._execute(steps[0]))]

        async def put(_: psycopg.AsyncPipeline) -> list[psycopg.AsyncCursor[Row]]:
            await self._limit_waiting()
            cursors = [await self._execute(step) for step in steps]
            await self.send()
            return cursors

        return [await _rows_of(cursor) for cursor in await self._together(put)]

    async def transact(self, begin: LiteralString, body: Callable[[Transaction], Awaitable[_T]]) -> _T:
        """Run *body* in a transaction: what it sends flies together, up to where it looks at an answer."""

        async def put(pipeline: psycopg.AsyncPipeline) -> _T:
            await self._execute(Step(begin))
            await self._limit_waiting()
            result = await body(Transaction(self, self._execute, pipeline))
            await self._execute(Step("COMMIT"))
            await self.send()
            return result

        return await self._together(put)

    async def _together(self, put: Callable[[psycopg.AsyncPipeline], Awaitable[_T]]) -> _T:
        failure: BaseException | None = None
        try:
            async with self._connection.pipeline() as pipeline:
                try:
                    return await put(pipeline)
                except BaseException as error:  # noqa: BLE001  # it is raised below
                    # Cut off in the middle of something, which the server undoes: what comes next would be taken for
                    # the answer, and what it was to prepare the server may not have got to. Nor is the driver to know
                    # of it, which would log what it can't do any more, without a word on which store that is.
                    self.close()
                    failure = error
        except BaseException as error:  # noqa: BLE001  # this one too
            self.close()
            failure = failure or error
        assert failure is not None
        hidden = failure.__context__
        if isinstance(failure, psycopg.Error) and failure.sqlstate is None and isinstance(hidden, psycopg.Error):
            # The driver could not leave its pipeline either, and says that instead of what the server has said.
            raise hidden
        raise failure

    async def send(self) -> None:
        """Send what is waiting to be sent. The driver waits for answers while some of a large value is left."""
        pgconn = self._connection.pgconn
        if pgconn.flush():
            await self._connection.wait(_sending(pgconn))

    async def _limit_waiting(self) -> None:
        if self._is_shared:
            await self._execute(Step(_WAITING, {"wait": _waiting_time()}))

    @contextmanager
    def _closed_if_left(self) -> Generator[None]:
        """Let go of it where its coroutine is thrown away, as that of a closed event loop is."""
        try:
            yield
        except GeneratorExit:
            self.close()
            raise

    async def _execute(self, step: Step) -> psycopg.AsyncCursor[Row]:
        return await self._connection.execute(_placed(step.statement, self._schema), step.values, binary=True)

    async def create_schema(self) -> None:
        """Create the schema that the tables are to stand in."""
        await self._connection.execute(f'CREATE SCHEMA "{self._schema}"'.encode())


class Transaction:
    """An open transaction."""

    def __init__(
        self,
        connection: Connection,
        execute: Callable[[Step], Awaitable[psycopg.AsyncCursor[Row]]],
        pipeline: psycopg.AsyncPipeline,
    ) -> None:
        self._connection = connection
        self._execute = execute
        self._pipeline = pipeline
        self.changed = False

    async def ask(self, statement: LiteralString, **values: Any) -> list[Row]:
        """What a statement answers that changes nothing."""
        return (await self.ask_all(Step(statement, values)))[0]

    async def ask_all(self, *steps: Step) -> list[list[Row]]:
        """What several statements answer, in one round trip."""
        cursors = [await self._execute(step) for step in steps]
        await self._connection.send()
        # The server knows now that it waits for the client, and does not for long where that is gone unnoticed.
        await self._pipeline.sync()
        return [await _rows_of(cursor) for cursor in cursors]

    async def set(self, statement: LiteralString) -> None:
        """Send a statement that sets something for this transaction."""
        await self._execute(Step(statement))

    async def change(self, statement: LiteralString, **values: Any) -> None:
        """Send a statement that changes something; nobody waits for it before the next answer, or the end."""
        self.changed = True
        await self._execute(Step(statement, values))

    async def create_schema(self) -> None:
        """Create the schema that the tables are to stand in."""
        await self._connection.create_schema()

    async def changed_rows(self, statement: LiteralString, **values: Any) -> list[Row]:
        """What a statement answers that changes something."""
        self.changed = True
        return await self.ask(statement, **values)


def _sending(pgconn: psycopg.pq.abc.PGconn) -> PQGen[None]:
    while pgconn.flush():
        # Also for something to read, which flush() takes: a server whose answers nobody takes would take no more.
        yield Wait.RW


def _waiting_time() -> str:
    return f"{LOCK_SECONDS * 1000:.0f}ms"


async def _rows_of(cursor: psycopg.AsyncCursor[Row]) -> list[Row]:
    return await cursor.fetchall() if cursor.description is not None else []
