"""What Google's Gemini API refuses, and in what words: pure functions of a request's body.

From its documentation, and from the answers that others have quoted in the trackers of their libraries.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Part = dict[str, Any]
"""A part of a content."""

_FIELDS: Final = {
    *("cachedContent", "contents", "generationConfig", "labels", "safetySettings", "systemInstruction", "toolConfig"),
    "tools",
}
_DATA: Final = {"text", "inlineData", "fileData", "functionCall", "functionResponse"}
_BESIDE: Final = {"thought", "thoughtSignature", "videoMetadata", "mediaResolution"}
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}")
SIGNS: Final = re.compile(r"gemini-[3-9]")
"""The models that want their signatures back."""

UNSIGNED: Final = frozenset(
    {
        base64.b64encode(word.encode()).decode()
        for word in ("skip_thought_signature_validator", "context_engineering_is_the_way_to_go")
    }
)
"""What Google lets stand for a signature that was never made: the call came from another model."""


def refusal(request: Mapping[str, Any], model: str, told: Mapping[str, Part] | None = None) -> str | None:
    """Why Google would refuse the request for *model*, in its words; None where it would not.

    *told* are the parts that the server has signed, by their signatures; without it no signature is looked at, only
    whether there is one.
    """
    return next(_faults(as_json_names(request), model, told), None)


def as_json_names(value: Any) -> Any:
    """The same with its fields' names as JSON has them: a request may have them as protocol buffers do."""
    if isinstance(value, list):
        return [as_json_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    # Arguments, results and schemas are the user's.
    return {
        _camel(name): item if name in {"args", "response", "parameters", "response_schema"} else as_json_names(item)
        for name, item in value.items()
    }


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _faults(request: Mapping[str, Any], model: str, told: Mapping[str, Part] | None) -> Iterator[str]:
    for name in sorted(set(request) - _FIELDS):
        yield f'Invalid JSON payload received. Unknown name "{name}": Cannot find field.'
    contents: list[Mapping[str, Any]] = request.get("contents") or []
    if not contents:
        yield "* GenerateContentRequest.contents: contents is not specified"
    for position, content in enumerate(contents):
        yield from _content_faults(content, f"* GenerateContentRequest.contents[{position}]", model)
    for part in (request.get("systemInstruction") or {"parts": [{"text": "x"}]})["parts"]:
        yield from _part_faults(part, "* GenerateContentRequest.system_instruction.parts", model)
    yield from _order_faults(contents)
    yield from _tool_faults(request)
    yield from _signature_faults(contents, model, told)


def _content_faults(content: Mapping[str, Any], path: str, model: str) -> Iterator[str]:
    if content.get("role") not in {"user", "model"}:
        yield "Please use a valid role: user, model."
    if not content.get("parts"):
        yield f"{path}.parts: contents.parts must not be empty."
    for number, part in enumerate(content["parts"]):
        yield from _part_faults(part, f"{path}.parts[{number}]", model)


def _part_faults(part: Part, path: str, model: str) -> Iterator[str]:
    for name in sorted(set(part) - _DATA - _BESIDE):
        yield f"Invalid JSON payload received. Unknown name \"{name}\" at '{path}': Cannot find field."
    data = set(part) & _DATA
    if len(data) != 1 or part.get("text") == "":
        yield f"{path}.data: required oneof field 'data' must have one initialized field"
    for name in {"functionCall", "functionResponse"} & data:
        if not _NAME.fullmatch(part[name].get("name", "")):
            yield f"{path}.{name}.name: Invalid function name. Must start with a letter or an underscore."
        if "id" in part[name] and not SIGNS.search(model):
            yield f"Invalid JSON payload received. Unknown name \"id\" at '{path}.{name}': Cannot find field."
    if not isinstance(part.get("functionCall", {}).get("args", {}), dict):
        yield f"{path}.function_call.args: Proto field is not repeating, cannot start list."
    if not isinstance(part.get("functionResponse", {"response": {}}).get("response"), dict):
        yield f"{path}.function_response.response: Proto field is not repeating, cannot start list."


def _order_faults(contents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with calls and responses."""
    before: Mapping[str, Any] | None = None
    called: list[Part] = []
    for content in contents:
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        responses = [part["functionResponse"] for part in content["parts"] if "functionResponse" in part]
        if (calls and content["role"] != "model") or (responses and content["role"] != "user"):
            yield "Please ensure that function calls are of the model and function responses of the user."
        if responses and not called:
            yield "Please ensure that function response turn comes immediately after a function call turn."
        if len(responses) != len(called):
            yield (
                "Please ensure that the number of function response parts is equal to the number of function call parts"
                " of the function call turn."
            )
        if [each["name"] for each in responses] != [each["name"] for each in called]:
            yield "Please ensure that function response parts have the names of the function call parts."
        if [each.get("id") for each in responses] != [each.get("id") for each in called]:
            yield "Please ensure that function response parts have the ids of the function call parts."
        if calls and (before is None or before["role"] != "user"):
            yield (
                "Please ensure that function call turn comes immediately after a user turn or after a function response"
                " turn."
            )
        before, called = content, calls
    if called:
        yield (
            "Please ensure that the number of function response parts is equal to the number of function call parts of"
            " the function call turn."
        )
    if contents and contents[-1]["role"] != "user":
        yield "Please ensure that multiturn requests ends with a user role or a function response."


def _tool_faults(request: Mapping[str, Any]) -> Iterator[str]:
    tools = request.get("tools")
    if tools is None:
        if "functionCallingConfig" in (request.get("toolConfig") or {}):
            yield "Function calling config is set without function_declarations."
        return
    declared = [each for tool in tools for each in tool.get("functionDeclarations") or ()]
    if not declared:
        yield "* GenerateContentRequest.tools[0].tool_type: required one_of 'tool_type' must have one initialized field"
    names = [each["name"] for each in declared]
    for name in names:
        if not _NAME.fullmatch(name):
            yield "* GenerateContentRequest.tools[0].function_declarations.name: Invalid function name."
        if names.count(name) > 1:
            yield f"Duplicate function declaration found: {name}"


def _signature_faults(
    contents: Sequence[Mapping[str, Any]], model: str, told: Mapping[str, Part] | None
) -> Iterator[str]:
    now = max((place for place, content in enumerate(contents) if _speaks(content)), default=0)
    for place, content in enumerate(contents):
        first = next((part for part in content["parts"] if "functionCall" in part), None)
        if place > now and first is not None and SIGNS.search(model) and not first.get("thoughtSignature"):
            yield (
                "Function call is missing a thought_signature in functionCall parts. This is required for tools to work"
                " correctly, and missing thought_signature may lead to degraded model performance. Additional data,"
                f" function call `default_api:{first['functionCall']['name']}` , position {place}."
            )
        for part in content["parts"]:
            signature = part.get("thoughtSignature")
            if told is None or signature is None or signature in UNSIGNED:
                continue
            if signature not in told or _call_in(told[signature]) != _call_in(part):
                yield "Corrupted thought signature."


def _speaks(content: Mapping[str, Any]) -> bool:
    """Whether the user speaks, and not only tools."""
    return content["role"] == "user" and any("functionResponse" not in part for part in content["parts"])


def _call_in(part: Part) -> tuple[Any, Any]:
    call = part.get("functionCall") or {}
    return call.get("name"), call.get("args")
