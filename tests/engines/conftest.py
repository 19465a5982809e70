"""A server for each module, and one loop for both: litellm keeps its connections for a loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from blockbuster import BlockBuster

from chatflow.engines import LiteLLMEngine
from tests.responses_server import ResponsesServer, responses_server


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One event loop for the module: litellm keeps its connections for a loop, and so does the server."""
    return "asyncio"


@pytest.fixture(autouse=True)
def fence(fence: BlockBuster) -> BlockBuster:
    """Lets litellm look for certificates when it makes its first client: two stats, which nobody can move elsewhere."""
    fence.functions["os.stat"].can_block_in("litellm/llms/custom_httpx/http_handler.py", {"get_ssl_configuration"})
    return fence


@pytest.fixture(scope="module")
async def running_server(anyio_backend: str) -> AsyncIterator[ResponsesServer]:
    """The server; litellm, whose clients outlive each call, closes them before it stops."""
    async with responses_server() as server:
        engine = LiteLLMEngine()
        await engine.warm_up()
        yield server
        await engine._litellm.close_litellm_async_clients()


@pytest.fixture
def server(running_server: ResponsesServer) -> ResponsesServer:
    """The server, with nothing to say, nothing asked and nothing kept yet."""
    running_server.script()
    running_server.forget()
    return running_server
