"""The pages of the documentation: their samples run, and what they link to is there."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from blockbuster import BlockBuster

import chatflow
from tests.model_server import model_server
from tests.pages import ROOT, run_page

PAGES: Final = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "docs").rglob("*.md"))}
# An import reads files, and the fence would fail whichever page imports the driver on the loop.
import_module("chatflow.postgres")

ELSEWHERE: Final = {
    "docs/cli.md": "cli/test_page.py",  # its console is held at a terminal
    "docs/sessions.md": "test_sessions_page.py",
}
"""Pages whose samples a test of their own runs."""


@pytest.fixture(autouse=True)
def fence(fence: BlockBuster) -> BlockBuster:
    """Lets two stats through: litellm looks for certificates when it makes its first client."""
    fence.functions["os.stat"].can_block_in("litellm/llms/custom_httpx/http_handler.py", {"get_ssl_configuration"})
    return fence


@pytest.fixture
async def names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[dict[str, Any]]:
    """What a page's hidden blocks find.

    *model* is a server that says what it is told to instead of OpenAI; *stack* is left when the page has ended.
    """
    monkeypatch.chdir(tmp_path)
    async with model_server() as model, AsyncExitStack() as stack:
        monkeypatch.setenv("OPENAI_BASE_URL", model.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield {"__name__": "page", "model": model, "stack": stack, "capsys": capsys}
        if "litellm" in sys.modules:  # its clients outlive each call, and the loop
            await sys.modules["litellm"].close_litellm_async_clients()


@pytest.mark.parametrize("name", [name for name in PAGES if name not in ELSEWHERE])
async def test_samples(name: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Every sample of the page runs, one after the other, and prints what the page says."""
    await run_page(PAGES[name], names, capsys)


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    """Every file that a page links to is there."""
    page = PAGES[name].read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[\w-]+)?\)", page)
    assert [path for path in linked if not (PAGES[name].parent / path).exists()] == []


def test_installing() -> None:
    """No page installs chatflow by its name, which is another project's on the package index."""
    pages = {**PAGES, "README.md": ROOT / "README.md"}
    by_name = re.compile(r'pip install "?chatflow\b')
    assert [name for name, path in pages.items() if by_name.search(path.read_text(encoding="utf-8"))] == []


def test_reference() -> None:
    """Every public name stands in the reference."""
    pages = "".join(PAGES[name].read_text(encoding="utf-8") for name in PAGES if name.startswith("docs/reference/"))
    named = set(re.findall(r"^\.\. (?:auto\w+|data):: (?:chatflow\.)?(\w+)$", pages, re.MULTILINE))
    assert set(chatflow.__all__) - {"__version__"} - named == set()


def test_contents() -> None:
    """Every page is in the contents, and on the first page or that of the reference."""
    listed = set(re.findall(r"(?:file|root): (\S+)", (ROOT / "docs" / "_toc.yml").read_text(encoding="utf-8")))
    assert {f"docs/{name}.md" for name in listed} == set(PAGES)
    for first in ("docs/index.md", "docs/reference/index.md"):
        linked = re.findall(r"\]\(([\w./-]+\.md)\)", PAGES[first].read_text(encoding="utf-8"))
        listed -= {str((PAGES[first].parent / path).resolve().relative_to(ROOT / "docs"))[:-3] for path in linked}
    assert listed == {"index"}
