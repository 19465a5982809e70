"""Parts of messages as OpenAI's two languages have them, the Responses API and chat completions. Pure functions."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from chatflow.core.messages import AudioPart, FilePart, ImagePart, Part, TextPart, UnknownPart


def content_of(content: Any) -> str | list[Part]:
    """A message's content: text, where it is text or a single part of it, else parts.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: It is not as it is documented.
    """
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in expected(content, (list, tuple), "its content must be text or a list of parts")]
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else parts


def expected(value: Any, kind: type | tuple[type, ...], rule: str) -> Any:
    """*value* itself, if it is of that *kind*.

    Raises:
        ValueError: It is not; the error says the *rule*, and what it is.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{rule}, not {type(value).__name__}")  # noqa: TRY004  # what was read is wrong, no argument
    return value


def _part(part: Any) -> Part:
    kind = expected(part, Mapping, "a part of its content must be a mapping")["type"]
    if kind in {"input_text", "output_text", "text"}:
        return TextPart(part["text"])
    if kind == "input_image":
        return _image(part.get("image_url") or part["file_id"])
    if kind == "image_url":
        image = part["image_url"]
        return _image(image) if isinstance(image, str) else _image(image["url"], image.get("format"))
    if kind in {"input_file", "file"}:
        return _file(part if kind == "input_file" else part["file"])
    if kind == "input_audio":
        audio = part["input_audio"]
        return AudioPart(data=_decoded(audio["data"]), media_type=f"audio/{audio['format']}")
    return UnknownPart(kind, {name: value for name, value in part.items() if name != "type"})


def _image(url: str, media_type: str | None = None) -> ImagePart:
    if not url.startswith("data:"):
        return ImagePart(url=url, media_type=media_type)
    said, content = _data_of(url)
    return ImagePart(data=content, media_type=said or media_type)


def _file(file: Mapping[str, Any]) -> FilePart:
    name, media_type, data = file.get("filename"), file.get("format"), file.get("file_data")
    if data is None:
        return FilePart(url=file.get("file_url") or file["file_id"], media_type=media_type, filename=name)
    said, content = _data_of(data)
    return FilePart(data=content, media_type=said or media_type, filename=name)


def _data_of(uri: str) -> tuple[str | None, bytes]:
    """What a ``data:`` address holds, or base64 without one."""
    header, _, data = uri.rpartition(",")
    return header.removeprefix("data:").partition(";")[0] or None, _decoded(data)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its data is no base64: {error}") from error
