"""A model server on loopback that speaks Google's Gemini API and says what it is told to.

What Google would refuse it refuses (`gemini_rules`), whatever is scripted. Models from the third on sign what they say.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from tests.gemini_rules import SIGNS, Part, refusal
from tests.model_server import DISCONNECT, HANG, Events, ModelServer, Status, serving, streamed, words


def text(said: str) -> Part:
    """What the model says."""
    return {"text": said}


def thought(said: str) -> Part:
    """What the model thinks."""
    return {"text": said, "thought": True}


def function_call(name: str, arguments: Mapping[str, Any], id_: str | None = None) -> Part:
    """A call; models from the third on give it an id."""
    call = {"name": name, "args": arguments}
    return {"functionCall": call if id_ is None else {**call, "id": id_}}


def error(
    status: int, message: str, *, kind: str = "INVALID_ARGUMENT", headers: Mapping[str, str] | None = None
) -> Status:
    """An error in Google's form."""
    return Status(status, {"error": {"code": status, "message": message, "status": kind}}, headers or {})


class GeminiServer(ModelServer):
    """What it was asked, what it has signed (`told`, parts by their signatures), and what it will say.

    `script` takes text, a list of parts, an HTTP answer, HANG, DISCONNECT, or a `Partly` of the first two.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url.removesuffix("/v1") + "/v1beta")
        self.told: Final[dict[str, Part]] = {}

    def answer(self, path: str, request: Mapping[str, Any]) -> Status | Events | str:
        """The next answer to a request for *path*: an HTTP answer, a stream of events, HANG or DISCONNECT."""
        asked = re.fullmatch(r"/v1beta/models/([^:]+):(generateContent|streamGenerateContent)(\?.*)?", path)
        assert asked, path
        model, method, _ = asked.groups()
        refused = refusal(request, model, self.told)
        if refused is not None:
            return error(400, refused)
        answer = self.next_scripted()
        if isinstance(answer, Status) or answer in (HANG, DISCONNECT):
            unmade: Status | str = answer
            return unmade
        if method == "streamGenerateContent":
            return streamed(answer, lambda whole: list(_events(self._parts(whole, model), model)))
        return Status(200, _response(self._parts(answer, model), model, ended=True))

    def key_in(self, path: str, headers: Mapping[str, str]) -> str:
        """The key that came with a request."""
        named = re.search(r"[?&]key=([^&]*)", path)
        return named[1] if named else headers.get("x-goog-api-key", "")

    def _parts(self, answer: str | Sequence[Part], model: str) -> list[Part]:
        parts = [text(answer)] if isinstance(answer, str) else list(answer)
        if SIGNS.search(model):
            # The first call has the signature of all; without calls it is the last part that has one.
            calls = [place for place, part in enumerate(parts) if "functionCall" in part]
            place = calls[0] if calls else len(parts) - 1
            made = hashlib.sha256(f"{len(self.told)} {parts}".encode()).digest()
            signature = base64.b64encode(made).decode()
            parts[place] = {**parts[place], "thoughtSignature": signature}
            self.told[signature] = parts[place]
        return parts


def gemini_server() -> AbstractAsyncContextManager[GeminiServer]:
    """Serve on a free port of loopback until left."""
    return serving(GeminiServer)


def _events(parts: Sequence[Part], model: str) -> Iterator[str]:
    """An answer as Google streams it: texts in pieces, a text's signature after it, and calls whole."""
    pieces: list[Part] = []
    for part in parts:
        if "text" not in part:
            pieces.append(part)
            continue
        plain = {name: value for name, value in part.items() if name != "thoughtSignature"}
        pieces += [{**plain, "text": word} for word in words(part["text"])]
        if "thoughtSignature" in part:
            pieces.append({"text": "", "thoughtSignature": part["thoughtSignature"]})
    for place, piece in enumerate(pieces):
        yield json.dumps(_response([piece], model, ended=place == len(pieces) - 1))


def _response(parts: Sequence[Part], model: str, *, ended: bool) -> dict[str, Any]:
    candidate = {
        "content": {"role": "model", "parts": parts},
        "index": 0,
        **({"finishReason": "STOP"} if ended else {}),
    }
    return {
        "candidates": [candidate],
        "usageMetadata": {
            "promptTokenCount": 11,
            "cachedContentTokenCount": 4,
            "candidatesTokenCount": 5,
            "thoughtsTokenCount": 2,
            "totalTokenCount": 18,
        },
        "modelVersion": model,
        "responseId": "resp1",
    }
