"""Which schedules are drawn: each setting makes more of something."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen(kw_only=True)
class Setting:
    """How much of what a schedule has; counts are the most, shares are of all."""

    applications: int = 2
    conversations: int = 2
    processes: int = 2
    messages: int = 5
    accepted: float = 0.4
    bare: int = 3
    anonymous: int = 1
    streams: int = 0
    working: float = 0.5
    nested: float = 0.15
    shared_nested: bool = False
    failing: float = 0.25
    poison: float = 0.08
    impatient: float = 0.5
    cancelled: float = 0.3
    impostors: float = 0.15
    kills: int = 2
    seen: float = 0.5
    pauses: int = 1
    slow: int = 1
    stalls: float = 0.3
    deletes: float = 0.25
    stops: float = 0.25
    slots: int = 2
    latency: float = 0.01
    thinking: float = 0.8
    seconds: float = 8.0
    leases: tuple[float, ...] = (1.0, 2.0)


MIXED: Final = Setting(leases=(1.0, 2.0, 6.0))
"""Something of everything."""

HARSH: Final = Setting(leases=(1.0,), seen=0.2, kills=3, pauses=3, slow=3)
"""Processes that die unseen, stop for longer than their lease, or are slow."""

NESTED: Final = Setting(leases=(1.0,), nested=0.7, conversations=3, messages=6, working=0.8, slots=1)
"""Tools that ask for turns of other conversations, which wait for one another."""

STREAMS: Final = Setting(leases=(1.0,), streams=2, working=1.0, accepted=0.8, messages=3)
"""Bare turns without end beside accepted work."""

ALL: Final = {"mixed": MIXED, "harsh": HARSH, "nested": NESTED, "streams": STREAMS}
