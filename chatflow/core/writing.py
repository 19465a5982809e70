"""What is written into rows, of whatever storage: the counterpart of `reading`."""

from __future__ import annotations

import datetime as dt

from chatflow.core.codec import values_to_json
from chatflow.core.records import Claim
from chatflow.core.service import ServiceSession
from chatflow.core.values import FrozenDict


def work_to_json(claim: Claim | None) -> str | None:
    """What somebody else would need to answer the message, as `reading.work` reads it."""
    if claim is None:
        return None
    asked = claim.input
    work = {"user_message": asked} if isinstance(asked, str) else {"decision": asked.to_data()}
    return values_to_json(FrozenDict(**work, metadata=claim.metadata))


def service_to_json(service: ServiceSession | None) -> str | None:
    """A service's session, as `reading.service` reads it."""
    return None if service is None else values_to_json(service.to_data())


def expiry(now: dt.datetime, expires_after: float | None) -> dt.datetime | None:
    """When a conversation that is committed now has been left alone for long enough to be deleted."""
    if expires_after is None:
        return None
    try:
        return now + dt.timedelta(seconds=expires_after)
    except OverflowError:
        return None  # dates end before
