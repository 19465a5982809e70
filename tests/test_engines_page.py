"""The page on engines: its samples run in order, as one program, and its tables say what the engine does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from blockbuster import BlockBuster

import chatflow
from chatflow.engines.common_form import provider_of
from chatflow.engines.failures import KEY_NAMES
from chatflow.engines.trying import LONGEST_WAIT
from tests.model_server import model_server
from tests.test_readme import blocks
from tests.test_sessions_page import run

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = (ROOT / "docs" / "engines.md").read_text()


@pytest.fixture(autouse=True)
def fence(fence: BlockBuster) -> BlockBuster:
    """Lets two stats through: litellm looks for certificates when it makes its first client."""
    fence.functions["os.stat"].can_block_in("litellm/llms/custom_httpx/http_handler.py", {"get_ssl_configuration"})
    return fence


async def test_samples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every sample of the page runs, one after the other, and does what the page says."""
    async with model_server() as server:
        order = '{"number": 404, "status": "sent", "items": ["a lamp"]}'
        server.script("It is in transit.", "It has arrived.", order, "Hello from here.", "Hello from one of two.")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        names: dict[str, Any] = {name: getattr(chatflow, name) for name in chatflow.__all__} | {"Sequence": Sequence}
        samples = blocks(PAGE, "python")
        first = next(sample for sample in samples if "run_async" in sample)
        streaming = next(sample for sample in samples if "run_stream" in sample)
        for sample in (first, streaming, *(each for each in samples if each not in {first, streaming})):
            await run(sample.replace("http://127.0.0.1:8000/v1", server.url), names)
        assert names["response"].content == "It is in transit."
        [shortened] = re.findall(r"^It prints `(.+)`\.$", PAGE, re.MULTILINE)
        assert capsys.readouterr().out.startswith(f"It has arrived.{shortened}\n{{'completion_tokens': ")
        assert [request["temperature"] for request in server.requests[:2]] == [0.2, 0.2]
        assert names["order"] == names["Order"](404, "sent", ["a lamp"])
        assert server.requests[2]["response_format"]["json_schema"]["strict"] is True
        for engine, expected in (("local", "Hello from here."), ("engine", "Hello from one of two.")):
            agent = chatflow.Agent("Support", engine=names[engine])
            assert (await agent.run("Hi")).content == expected
        assert [request["model"] for request in server.requests[3:]] == ["qwen3", "gpt-4o"]
        assert (await names["echo"].run("Hi")).content == "Hi"
        await names["engine"]._litellm.close_litellm_async_clients()


def test_keys() -> None:
    """The page names every key that the engine knows, and for each name the provider that is asked."""
    table = re.findall(r"^\| (`.*?) \| .*? \| (`.*?) \|$", PAGE, re.MULTILINE)
    told: dict[str, tuple[str, ...]] = {}
    for models, keys in table:
        names = [name.replace("…", "x") for name in re.findall(r"`(.*?)`", models)]
        (provider,) = {provider_of(name) for name in names}
        told[provider] = tuple(re.findall(r"`(.*?)`", keys))
    assert told == dict(KEY_NAMES)


def test_longest_wait() -> None:
    """The page says how long the engine waits when it is asked to."""
    assert f"more than {LONGEST_WAIT:g} s" in PAGE


def test_names_what_is_there() -> None:
    """Every file that the page links to is there."""
    linked = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[\w-]+)?\)", PAGE)
    assert linked
    assert all((ROOT / "docs" / path).exists() for path in linked)
