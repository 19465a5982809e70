"""PgBouncer before a PostgreSQL server, in transaction mode: each transaction gets another of a few connections."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import conninfo

PROGRAM: Final = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
"""Where it is; Debian's package puts it where only root looks."""

CONNECTIONS: Final = 4
"""So many lead to the server, for all clients together."""


@contextmanager
def bouncer_to(dsn: str, folder: Path) -> Iterator[str]:
    """A bouncer before the database at *dsn*; its own address. *folder* gets its settings and its log."""
    assert PROGRAM is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts: dict[str, Any] = {"user": "postgres", **conninfo.conninfo_to_dict(dsn)}
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"""
        [databases]
        behind = {conninfo.make_conninfo(**parts)}
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = any
        pool_mode = transaction
        max_db_connections = {CONNECTIONS}
        default_pool_size = {CONNECTIONS}
        {"user = nobody" if os.geteuid() == 0 else ""}
        """.replace("        ", "")
    )
    with (folder / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, settings], stdout=log, stderr=log)
    address = f"postgresql://postgres@127.0.0.1:{port}/behind"
    try:
        while not _accepts(address):
            assert process.poll() is None, (folder / "pgbouncer.log").read_text()
        yield address
    finally:
        process.kill()
        process.wait()


def _accepts(address: str) -> bool:
    try:
        psycopg.connect(address).close()
    except psycopg.OperationalError:
        return False
    return True
