"""Faults: what befalls a store in a test, at the steps that the test names."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NoReturn, TypeAlias

from chatflow.core.memory import SessionStore
from chatflow.core.storage import Storage
from chatflow.core.store import BaseSessionStore

STEPS: Final = frozenset(
    name for name, each in vars(Storage).items() if inspect.iscoroutinefunction(each) and name != "close"
)
"""The names of the steps: the methods of `Storage` that a store awaits while it works."""

Fault: TypeAlias = "BaseException | Callable[[], object] | None"
"""What happens at a step: an error that is raised, or a function that is called, and awaited where it is async, and may
make an error to raise, as the class of one does; or nothing."""


class Killed(BaseException):  # no error that anything would answer, as nothing answers a killed process
    """The process has ended here, as far as a store can tell. `Faults.kill` raises it."""


class Faults:
    """Lets a store fail, wait or die before or after chosen steps of its work.

    A step is a method of `Storage`, by its name: ``commit_turn``, ``queue_turn``, ``accept_turn``, ``write_journal``,
    ``load_session`` and so on. The stores of all owners take part, whichever of them is given::

        faults = Faults(store)
        faults.before("commit_turn", StoreError("the disk is full", store="chat.db"))
        faults.after("commit_turn", None, faults.kill)

    Attributes:
        steps: The steps that were begun so far, in order: how a test finds out which there are.
    """

    def __init__(self, store: BaseSessionStore) -> None:
        if not isinstance(store, BaseSessionStore):
            raise TypeError(f"store must be a session store, not {type(store).__name__}")
        self.steps: Final[list[str]] = []
        self._store: Final = store.backend
        self._planned: Final[defaultdict[tuple[str, str], deque[Fault]]] = defaultdict(deque)
        for step in STEPS:
            setattr(self._store, step, self._around(step, getattr(self._store, step)))

    def before(self, step: str, *faults: Fault) -> None:
        """Let these happen before *step*, one each time it is begun; None lets it pass. After them it works again.

        Raises:
            TypeError: A fault is none of an error, a function and None; nothing is planned.
            ValueError: There is no such step.
        """
        self._plan("before", step, faults)

    def after(self, step: str, *faults: Fault) -> None:
        """Let these happen after *step*, as `before` does: it is done, and an error hides that from who asked for it.

        Raises:
            TypeError: A fault is none of an error, a function and None; nothing is planned.
            ValueError: There is no such step.
        """
        self._plan("after", step, faults)

    def kill(self) -> NoReturn:
        """End the store as the death of its process would, and raise `Killed`.

        Nothing is written any more, not even that a turn has ended: whoever uses the store later gets
        `StoreClosedError`. Another store on the same file finds what a killed process leaves.

        Raises:
            Killed: Always, unless
            TypeError: the store is a `SessionStore`, of which nothing would be left.
        """
        if isinstance(self._store, SessionStore):
            raise TypeError(f"nothing of {self._store!r} outlives its process; use a store on a file")
        self._store.abandon()  # also where it was not opened yet, or killed before: a process dies all the same
        raise Killed

    def _plan(self, moment: Literal["before", "after"], step: str, faults: tuple[Fault, ...]) -> None:
        if step not in STEPS:
            raise ValueError(f"there is no step {step!r}; the steps are {', '.join(sorted(STEPS))}")
        for fault in faults:
            if not (fault is None or isinstance(fault, BaseException) or callable(fault)):
                raise TypeError(f"a fault must be an error, a function or None, not {fault!r}")
        self._planned[moment, step] += faults

    def _around(self, step: str, primitive: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(primitive)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.steps.append(step)
            await self._happen("before", step)
            result = await primitive(*args, **kwargs)
            await self._happen("after", step)
            return result

        return wrapped

    async def _happen(self, moment: str, step: str) -> None:
        planned = self._planned[moment, step]
        fault = planned.popleft() if planned else None
        found: Any = fault() if callable(fault) else fault
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, BaseException):
            raise found
