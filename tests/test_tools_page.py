"""The page on tools: its sample runs, and its numbers are the runner's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Final

import pytest

import chatflow
from chatflow.core.messages import ImagePart, TextPart
from chatflow.engines.scripted import ScriptedEngine
from chatflow.running.results import ResultLimits
from tests.runs import results, session_of
from tests.test_readme import blocks
from tests.test_sessions_page import run

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = (ROOT / "docs" / "tools.md").read_text()


async def test_sample() -> None:
    """The page's sample runs, and its tool's picture is stored and sent."""
    engine = ScriptedEngine([ScriptedEngine.call("show_receipt", order_id="404"), "It says 12 euros."])

    async def scan_of(order_id: str) -> bytes:
        return order_id.encode()

    class Runner(chatflow.Runner):
        def __init__(self, agent: chatflow.Agent, **options: Any) -> None:
            super().__init__(agent, engine=engine, **options)

    names: dict[str, Any] = {name: getattr(chatflow, name) for name in chatflow.__all__}
    names |= {"scan_of": scan_of, "Runner": Runner}
    sample, _ = blocks(PAGE, "python")
    await run(sample, names)
    assert names["response"].content == "It says 12 euros."
    (result,) = results(await session_of(names["runner"], "conversation-7"))
    assert result.parts == (
        TextPart("The receipt of order 404:"),
        ImagePart(data=b"404", media_type="image/png"),
    )
    assert engine.requests[-1].messages[-1].tool_results == (result,)


async def test_failing_sample() -> None:
    """The page's tool that fails tells the model why."""
    names: dict[str, Any] = {name: getattr(chatflow, name) for name in chatflow.__all__}
    _, sample = blocks(PAGE, "python")
    await run(sample, names)
    engine = ScriptedEngine([ScriptedEngine.call("cancel_order", order_id="5")], default="Which one?")
    runner = chatflow.Runner(chatflow.Agent("Support", tools=[names["cancel_order"]], engine=engine))
    await runner.run_async("conversation-7", "Cancel order 5.")
    (result,) = results(await session_of(runner, "conversation-7"))
    assert (result.is_error, result.content.startswith("There is no order of this number.")) == (True, True)


@pytest.mark.parametrize(
    "name", ["max_concurrent_tool_calls", "max_result_characters", "max_result_bytes", "tool_timeout"]
)
def test_defaults(name: str) -> None:
    """The page names each limit with its default."""
    default = inspect.signature(chatflow.Runner).parameters[name].default
    assert re.search(rf"`{name}` \({default:,}", PAGE)


def test_marker() -> None:
    """The page shows the marker as it is written."""
    shown = re.search(r"`(\[\.\.\. .*?\])`", PAGE)
    assert shown is not None
    stored, _ = ResultLimits(characters=246, size=None).cut("x" * 2000)
    assert shown[1] in stored


def test_names_what_is_there() -> None:
    """Every file that the page links to is there."""
    linked = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[\w-]+)?\)", PAGE)
    assert linked
    assert all((ROOT / "docs" / path).exists() for path in linked)
