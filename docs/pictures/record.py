"""Make chat.svg, a picture of a terminal: ``make picture``. A real shell runs the command, which is really killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Final

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS: Final = 100
LINES: Final = 60
"""More than are ever filled, so that nothing scrolls away."""
PROMPT: Final = "$ "
COLOURS: Final = {"brown": "yellow"}
"""What pyte calls differently from rich; bright ones have no underscore there."""


class Shell(pyte.ByteStream):
    """A shell at a terminal, typed to, whose screen is kept as a person sees it."""

    def __init__(self, folder: str) -> None:
        self.screen: Final = pyte.Screen(COLUMNS, LINES)
        super().__init__(self.screen)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHATFLOW")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._process: Final = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile"],
            cwd=folder,
            env={**inherited, "PATH": path, "PS1": PROMPT, "TERM": "xterm-256color"},
            dimensions=(LINES, COLUMNS),
            timeout=60,
        )
        self._process.logfile_read = self
        self._process.delaybeforesend = None
        self._process.expect_exact(PROMPT)

    def write(self, data: bytes) -> None:
        """Take what the terminal was sent."""
        self.feed(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def say(self, line: str, until: str) -> None:
        """Type a line, and read until something has come."""
        self._process.sendline(line)
        self._process.expect_exact(until)

    def kill(self) -> None:
        """Kill what the shell runs."""
        shell = self._process.pid
        (child,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        self._process.expect_exact(PROMPT)

    def text(self) -> Text:
        """The screen, down to its last line that is not empty."""
        lines = [self._line(number) for number in range(LINES)]
        while not lines[-1].plain.strip():
            lines.pop()
        return Text("\n").join(lines)

    def _line(self, number: int) -> Text:
        row = self.screen.buffer[number]
        line = Text()
        for style, chars in groupby((row[column] for column in range(COLUMNS)), _style):
            line.append("".join(char.data for char in chars), style)
        line.rstrip()
        return line


def _style(char: pyte.screens.Char) -> Style:
    return Style(color=_colour(char.fg), bold=char.bold, italic=char.italics)


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return COLOURS.get(name, name.replace("bright", "bright_"))


def main() -> None:
    """Hold a conversation, kill it while a call waits for approval, and go on."""
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(folder)
        shell.say("chatflow chat", "you: ")
        shell.say("where is order 404?", "you: ")
        shell.say("refund order 404", "nothing decides later: ")
        shell.kill()
        shell.say("chatflow chat", "nothing decides later: ")
        shell.say("y", "you: ")
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(shell.text())
    svg = console.export_svg(title="chatflow chat", unique_id="chat")
    picture = Path(__file__).with_name("chat.svg")
    # The font that it names is fetched from elsewhere: whoever looks at the picture would be seen there.
    picture.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL), encoding="utf-8")
    print(picture)


if __name__ == "__main__":
    main()
