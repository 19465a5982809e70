"""What tests of bots and of stores are written with. Its pytest plugin is `chatflow.testing.plugin`."""

from chatflow.testing.backend import Backend
from chatflow.testing.faults import Faults, Killed

__all__ = ["Backend", "Faults", "Killed"]
