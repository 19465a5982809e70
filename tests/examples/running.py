"""The examples as a user runs them: processes of their own, in a folder of their own, and HTTP over loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import httpx
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"


def environment(**variables: str) -> dict[str, str]:
    """That of the tests, in which no model is named unless *variables* do, and the package is found in any folder."""
    unset = {"MODEL", "CHAT_DB", "SESSION_FILE", "VERIFY_TOKEN"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {key: value for key, value in os.environ.items() if key not in unset}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), **variables}


def run(name: str, *args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """An example, offline, with *folder* as the current one."""
    command = [sys.executable, str(EXAMPLES / name), *args]
    return subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, check=False)


def printed(name: str, *args: str, folder: Path) -> list[str]:
    """The lines that an example prints, which ends well and complains of nothing."""
    done = run(name, *args, folder=folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout.splitlines()


class Served:
    """An application under uvicorn: a client of it, its log so far, and its process."""

    def __init__(self, process: Process, client: httpx.AsyncClient) -> None:
        self.process: Final = process
        self.client: Final = client
        self.log = ""
        self.logged = anyio.Event()

    async def until(self, text: str) -> None:
        """Wait until *text* stands in the log."""
        while text not in self.log:
            self.logged = anyio.Event()
            await self.logged.wait()


@asynccontextmanager
async def served(app: str, folder: Path, *options: str, **variables: str) -> AsyncIterator[Served]:
    """An example's application on a free port, until left, with *folder* as the current one and uvicorn's *options*."""
    address = ["--app-dir", str(EXAMPLES), "--port", "0", "--no-use-colors"]
    command = [sys.executable, "-m", "uvicorn", app, *address, *options]
    async with (
        await anyio.open_process(
            command, env=environment(**variables), cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
        ) as process,
        httpx.AsyncClient(timeout=30, trust_env=False) as client,
        anyio.create_task_group() as tasks,
    ):
        server = Served(process, client)

        async def listen() -> None:
            assert process.stdout is not None
            async for text in TextReceiveStream(process.stdout, errors="replace"):
                server.log += text
                server.logged.set()

        tasks.start_soon(listen)
        await server.until("(Press CTRL+C to quit)")
        found = re.search(r"running on (http://\S+)", server.log)
        assert found is not None
        client.base_url = httpx.URL(found[1])
        try:
            yield server
        finally:
            if process.returncode is None:
                process.terminate()
