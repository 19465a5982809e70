"""Who holds a row: this process and database object, told so that another process can see whether it is gone."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path


def new_holder() -> str:
    """A name for one database object of this process, unlike any other."""
    return f"{_this_process}/{uuid.uuid4().hex}"


def is_gone(holder: str, living: set[str]) -> bool:
    """Whether nobody acts under *holder* any more. *living* are this process's own holders.

    A process on another host counts as alive: nothing here can tell.
    """
    host, _, rest = holder.partition("/")
    pid_text, _, rest = rest.partition("/")
    started, _, _ = rest.partition("/")
    if holder in living:
        return False
    if host != socket.gethostname() or not pid_text.isdigit():
        return False
    pid = int(pid_text)
    if pid == os.getpid():
        return True
    return not _runs(pid) or _started(pid) != started


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _started(pid: int) -> str:
    """When the process started, in the kernel's ticks, so that a number given out again is no longer the same process.

    Where there is no /proc it is empty, and the number alone decides.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The second field is the command's name in parentheses, which may hold spaces; starttime is field 22.
    return stat.rpartition(")")[2].split()[19]


def _look_at_this_process() -> None:
    global _this_process  # noqa: PLW0603  # a child of fork() is another process
    _this_process = f"{socket.gethostname()}/{os.getpid()}/{_started(os.getpid())}"


# At import and not with the first store: it reads a file, and a store may be made on an event loop.
_this_process = ""
_look_at_this_process()
os.register_at_fork(after_in_child=_look_at_this_process)
