"""Runs a page of the documentation as one program: its samples, in order, in one event loop.

- A ``python`` block runs with what the blocks before it have left. It may await where it stands. One that begins with
  a comment that names a file, such as ``# bot.py``, is written to that file instead.
- A ``text`` block is all that was printed since the last one.
- A ``console`` block is what a shell shows: after each ``$`` a command, which runs, and then what it prints.
- ``<!-- python`` ... ``-->`` is a block that readers don't see: what a sample needs, and what is to be true after it.

Blocks in other languages, ``sh`` for one, are not run.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import pytest

ROOT: Final = Path(__file__).parent.parent

_BLOCK: Final = re.compile(
    r"^(?P<indent> *)(?:```(?P<shown>\w+)\n(?P<sample>.*?)^ *```|<!-- (?P<hidden>python)\n(?P<check>.*?)^ *-->)$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND: Final = 'chatflow() { python -m chatflow "$@"; }'
"""What is installed as a command is this checkout's."""

_FILE: Final = re.compile(r"# (\w+\.\w+)\n")


@attrs.frozen
class Block:
    """A block of a page: its language, what stands in it, and the number of its first line."""

    language: str
    text: str
    line: int


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of a page, in order."""
    for found in _BLOCK.finditer(page):
        language = found["shown"] or found["hidden"]
        text = re.sub(f"^{found['indent']}", "", found["sample"] or found["check"] or "", flags=re.MULTILINE)
        yield Block(language, text, page.count("\n", 0, found.start()) + 2)


def texts_of(page: str, language: str) -> list[str]:
    """What stands in the blocks of a page that are in that language."""
    return [block.text for block in blocks_of(page) if block.language == language]


async def run(block: Block, path: Path, names: dict[str, Any]) -> None:
    """Run a python block, which may await where it stands, with *names* for its globals."""
    tree = ast.increment_lineno(ast.parse(block.text, str(path)), block.line - 1)
    code = compile(tree, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    found = eval(code, names)
    if inspect.isawaitable(found):
        await found


async def shown(console: str, env: dict[str, str]) -> str:
    """The block as it really is: its commands, each with what it prints on both streams."""
    said = ""
    for line in re.findall(r"^\$ (.*)$", console, re.MULTILINE):
        done = await anyio.run_process(
            ["bash", "-c", f"{_COMMAND}; {line}"], check=False, stderr=subprocess.STDOUT, env=env
        )
        said += f"$ {line}\n{done.stdout.decode()}"
    return said


async def run_page(path: Path, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Run all blocks of a page in the current folder, which is empty."""
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": commands, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    for block in blocks_of(path.read_text(encoding="utf-8")):
        file = _FILE.match(block.text)
        if block.language == "python" and file is not None:
            Path(file[1]).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            await run(block, path, names)
        elif block.language in {"text", "console"}:
            is_console = block.language == "console"
            said = await shown(block.text, env) if is_console else capsys.readouterr().out
            if said != block.text:
                pytest.fail(f"{path}:{block.line} says\n{block.text}\nand it really is\n{said}", pytrace=False)
