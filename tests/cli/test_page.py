from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from chatflow.cli.commands import chatflow
from tests.cli.page import make_files
from tests.cli.processes import ROOT
from tests.cli.terminal import CTRL_D, at_terminal
from tests.cli.test_start import commands
from tests.pages import texts_of

PAGE: Final = ROOT / "docs" / "cli.md"
CHAT, *OTHERS = texts_of(PAGE.read_text(encoding="utf-8"), "console")
(COPY,) = (each for each in OTHERS if "postgresql://" in each)  # tests/postgres/test_page.py has a server
CONSOLES: Final = [each for each in OTHERS if each != COPY]

_SPINNER: Final = re.compile(r"[\u2800-\u28ff] \.\.\.")

_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{6})?(Z|\+00:00)")


def settled(text: str) -> str:
    """The text with all moments, ages and checksums the same."""
    text = _MOMENT.sub(
        lambda found: "2026-03-01 10:00:00Z" if found[2] == "Z" else "2026-03-01T10:00:00.000000+00:00", text
    )
    text = re.sub(r"\t[0-9a-f]{16}$", "\t08dac265cbb4e11b", text, flags=re.MULTILINE)
    return re.sub(r"\t\d+s\t", "\t0s\t", text)


def run(line: str) -> str:
    """What a command prints, on both streams."""
    words = shlex.split(line)
    assert words[0] == "chatflow"
    return settled(CliRunner().invoke(chatflow, words[1:], prog_name="chatflow").output)


def really(console: str) -> str:
    """The block as it really is: its commands, each with what it prints."""
    lines = re.findall(r"^\$ (.*)$", console, re.MULTILINE)
    return "".join(f"$ {line}\n{run(line)}" for line in lines)


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHATFLOW_DB", raising=False)
    make_files(tmp_path)


@pytest.mark.usefixtures("_files")
def test_output() -> None:
    """Each command on the page prints what the page says, one after the other."""
    assert [really(console) for console in CONSOLES] == CONSOLES


def test_chat(tmp_path: Path) -> None:
    """The conversation on the page is held as it is printed."""
    with at_terminal("chat", folder=tmp_path, COLUMNS="500") as terminal:
        for line in CHAT.splitlines()[1:]:
            asked = re.match(r"you: |  \"y\".*later: ", line)
            came = terminal.until(line if asked is None else asked[0])
            assert _SPINNER.sub("", came).strip() == (line if asked is None else asked[0]).strip()
            if asked is not None:
                terminal.type(f"{line[asked.end() :]}\n")
                terminal.until(f"{line[asked.end() :]}\r\n")
        terminal.until("you: ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_all_commands_are_described() -> None:
    """Every command stands on the page."""
    page = PAGE.read_text(encoding="utf-8")
    for words in commands(chatflow):
        assert re.search(rf"chatflow {words}\b", page) or words.split()[-1] in page.split("What all of them")[0]


if __name__ == "__main__":  # writes the blocks as they really are: python -m tests.cli.test_page EMPTY_FOLDER
    make_files(Path(sys.argv[1]))
    os.chdir(sys.argv[1])
    text = PAGE.read_text(encoding="utf-8")
    for each in CONSOLES:
        text = text.replace(f"```console\n{each}```", f"```console\n{really(each)}```")
    PAGE.write_text(text, encoding="utf-8")
