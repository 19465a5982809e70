"""Who holds a row: this process and database object, told so that another process can see whether it is gone."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")


def new_holder() -> str:
    """A name for one database object of this process, unlike any other."""
    return f"{_this_process}/{uuid.uuid4().hex}"


def is_gone(holder: str, living: set[str]) -> bool:
    """Whether nobody acts under *holder* any more. *living* are this process's own holders.

    A process on another host, or in another container of this one, counts as alive: nothing here can tell. So does one
    of before the last boot. Their turns are free once their lease is over.
    """
    machine, _, rest = holder.partition("/")
    pid_text, _, rest = rest.partition("/")
    started, _, _ = rest.partition("/")
    if holder in living:
        return False
    if machine != _this_machine or not pid_text.isdigit():
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


def _machine() -> str:
    """Where a process's number means this process: the host's name, which boot, and which namespace of processes.

    Containers may share a file, a host's name and a boot, and have numbers of their own each. Where there is no /proc
    the host's name alone decides.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""
    try:
        namespace = str(_PID_NAMESPACE.readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()},{boot},{namespace}".replace("/", "_")


def _look_at_this_process() -> None:
    global _this_machine, _this_process  # noqa: PLW0603  # a child of fork() is another process
    _this_machine = _machine()
    _this_process = f"{_this_machine}/{os.getpid()}/{_started(os.getpid())}"


# At import and not with the first store: it reads files, and a store may be made on an event loop.
_this_machine = _this_process = ""
_look_at_this_process()
os.register_at_fork(after_in_child=_look_at_this_process)
