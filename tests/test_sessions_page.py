"""The page on sessions: its samples run in order, as one program that has an agent, a store and a service."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import attrs
import pytest
from blockbuster import BlockBuster

import chatflow
from chatflow import Agent, Runner, ScriptedEngine, SessionStore
from tests.pages import ROOT, blocks_of, run, texts_of
from tests.responses_server import responses_server

PAGE: Final = ROOT / "docs" / "sessions.md"
DOCUMENT: Final = (
    "session = agent.create_session()",
    'first = await agent.run("My name is Alice.", session=session)',
    'second = await agent.run("What is my name?", session=session)',
    'session = agent.get_session(service_session_id="<service-conversation-id>")',
    'response = await agent.run("Continue this conversation.", session=session)',
    "serialized = session.to_dict()",
    "resumed = AgentSession.from_dict(serialized)",
)
"""What the documentation of `AgentSession` shows in Python."""


@pytest.fixture(autouse=True)
def fence(fence: BlockBuster) -> BlockBuster:
    """Lets two stats through: litellm looks for certificates when it makes its first client."""
    fence.functions["os.stat"].can_block_in("litellm/llms/custom_httpx/http_handler.py", {"get_ssl_configuration"})
    return fence


async def test_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every sample of the page runs, one after the other, and does what the page says."""
    monkeypatch.chdir(tmp_path)
    store = SessionStore()
    agent = Agent("Support", engine=ScriptedEngine(default="Hello, Alice."))
    async with store, responses_server() as server:
        server.script("Hello, Alice.", "Alice.", "Hello again.")
        theirs = server.new_conversation()
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        names: dict[str, Any] = {
            **{name: getattr(chatflow, name) for name in chatflow.__all__},
            "agent": agent,
            "store": store,
            "runner": Runner(agent, store),
            "user": SimpleNamespace(id="alice"),
            "service_session_id": "resp_of_somebody_else",
            "dataclass": dataclass,
            "json": json,
            "Path": Path,
        }
        for block in blocks_of(PAGE.read_text()):
            if "runner.for_owner" in block.text:
                names["agent"] = agent
            if block.language == "python":
                text = block.text.replace("<service-conversation-id>", theirs)
                await run(attrs.evolve(block, text=text), PAGE, names)
        printed = capsys.readouterr().out.splitlines()[-1].removeprefix("Hello, Alice.")
        assert server.chained == [None, printed, theirs]
    assert names["first"].content == "Hello, Alice."
    assert names["second"].content == "Alice."
    assert names["prefs"].theme == "dark"
    assert names["resumed"].history[0].text == "My name is Alice."
    assert names["response"].content == "Hello, Alice."
    assert [len(each) for each in server.inputs] == [1, 1, 1]
    assert printed.startswith("resp_")


@pytest.mark.parametrize("sample", DOCUMENT)
def test_shows_the_samples(sample: str) -> None:
    """The page shows each sample of the documentation as it stands there."""
    assert sample in "\n".join(texts_of(PAGE.read_text(), "python"))
