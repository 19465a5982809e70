"""Asking again: after which failures, how often and when, and which model next. There are no other retries."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar, cast

import anyio
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from chatflow.exceptions import (
    EngineError,
    EngineRateLimitError,
    EngineTimeoutError,
    EngineUnavailableError,
    shorten,
)

logger = logging.getLogger("chatflow.engines")

_T = TypeVar("_T")

LONGEST_WAIT: Final = 30.0
"""Seconds. Who asks to wait longer is not asked again: a user waits for the answer, and a turn has its own timeout."""

_PASSING: Final = (EngineRateLimitError, EngineTimeoutError, EngineUnavailableError)

_back_off: Final = wait_exponential(multiplier=1, max=8)  # 1, 2, 4, 8, 8 ... s

_jitter: Final = wait_random(0, 1)  # so that those who were refused together don't come back together


class Trying:
    """Asks a model up to *attempts* times, and then the next one, as long as what fails may pass."""

    def __init__(self, attempts: int, sleep: Callable[[float], Awaitable[None]] = anyio.sleep) -> None:
        self._attempts: Final = attempts
        self._sleep: Final = sleep

    async def first_answer(
        self, models: Sequence[str], ask: Callable[[str], Awaitable[_T]], *, only_if_refused: bool
    ) -> _T:
        """What *ask* gives for the first of *models* that gives anything.

        With *only_if_refused* nothing is asked again that the provider may have taken: see `may_pass`.

        Raises:
            EngineError: What the last one asked has failed with.
        """

        def may_be_asked_again(error: BaseException) -> bool:
            return may_pass(error, only_if_refused=only_if_refused)

        def may_be_asked_soon(error: BaseException) -> bool:
            return may_be_asked_again(error) and (getattr(error, "retry_after", None) or 0) <= LONGEST_WAIT

        *others, last = models
        for model, following in zip(others, models[1:], strict=True):
            try:
                return await self._ask(model, ask, may_be_asked_soon)
            except EngineError as error:
                if not may_be_asked_again(error):
                    raise
                logger.warning("%s; model %s is asked instead", error, shorten(following))
        return await self._ask(last, ask, may_be_asked_soon)

    async def _ask(
        self, model: str, ask: Callable[[str], Awaitable[_T]], may_be_asked_soon: Callable[[BaseException], bool]
    ) -> _T:
        async def asked() -> Any:
            return await ask(model)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=_wait,
            retry=retry_if_exception(may_be_asked_soon),
            sleep=self._sleep,
            before_sleep=_log,
            reraise=True,
        )
        return cast("_T", await retrying(asked))


def may_pass(error: BaseException, *, only_if_refused: bool = False) -> bool:
    """Whether asking again may help.

    With *only_if_refused* the provider must also have said, with a status, that it did not take the request: after a
    timeout, or where the line was cut, nobody knows.
    """
    if not isinstance(error, _PASSING):
        return False
    return not only_if_refused or (error.status is not None and error.status < 500 and error.status != 408)


def _wait(state: RetryCallState) -> float:
    asked_for = _error(state).retry_after or 0.0
    return max(_back_off(state), asked_for) + _jitter(state)


def _log(state: RetryCallState) -> None:
    logger.warning(
        "%s; asked again in %.1f s, attempt %d",
        _error(state),
        state.upcoming_sleep,
        state.attempt_number + 1,
    )


def _error(state: RetryCallState) -> EngineError:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, EngineError)
    return error
