"""The themes by name, in the order they run. A new one is a module and a line."""

from __future__ import annotations

from typing import Final

from benchmarks.themes.base import Theme
from benchmarks.themes.dedup import Dedup
from benchmarks.themes.disk import Disk
from benchmarks.themes.growth import GrowingHistory, GrowingStore
from benchmarks.themes.imports import Imports
from benchmarks.themes.listing import Listing
from benchmarks.themes.load import Load
from benchmarks.themes.readers import Readers
from benchmarks.themes.resources import Resources
from benchmarks.themes.running import Running
from benchmarks.themes.server import ServerLoad
from benchmarks.themes.steps import Steps
from benchmarks.themes.together import Together
from benchmarks.themes.turn import Turn

THEMES: Final[dict[str, Theme]] = {
    "turn": Turn(),
    "steps": Steps(),
    "load": Load(),
    "together": Together(),
    "readers": Readers(),
    "dedup": Dedup(),
    "listing": Listing(),
    "history": GrowingHistory(),
    "store": GrowingStore(),
    "resources": Resources(),
    "disk": Disk(),
    "server": ServerLoad(),
    "imports": Imports(),
    "running": Running(),
}
