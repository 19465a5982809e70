"""Histories as hostile as chance makes them: what providers, tools and users really do, and what nobody should.

All that may not get lost carries a mark by which it is found again in any provider's form: ``<u3>`` in the text of a
user's message, ``<m4>`` in a model's, ``<s0>`` in a system message, ``<c4.1>`` in a call's arguments, ``<r5.0>`` in a
result.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from chatflow.core.messages import (
    MODEL_KEY,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.pruning import prune
from chatflow.engines.common_form import PROVIDER_KEY
from chatflow.engines.litellm_form import CALL_FIELDS_KEY
from chatflow.engines.responses_form import OUTPUT_KEY

MODELS: Final = (
    "openai/gpt-4o",
    "anthropic/claude-sonnet-4-5",
    "gemini/gemini-2.5-flash",
    "gemini/gemini-3-pro-preview",
    "mistral/mistral-large-latest",
    "cohere/command-a-03-2025",
    "bedrock/anthropic.claude-sonnet-4-5-20250929-v1:0",
)
"""Who may have begun a history, and who goes on with it."""

IDS: Final[Sequence[str]] = (
    "a",
    "b",
    "c",
    "a b",
    "a_b",
    "a.b",
    "ä",
    "\ud800",
    "",
    " ",
    "null",
    "None",
    "0",
    "call00001",
    "call00002",
    "abcDEF123",
    "functions.look_up:0",
    "functions.look_up:1",
    "toolu_01A09q90qw90lq917835lq9",
    "srvtoolu_01A09q90qw90lq917835",
    "call_0123456789abcdef0123456789ab",
    "call_0123__thought__AAAA",
    "call_0123__thought__BBBB",
    f"call_{'0123456789abcdef' * 2}__thought__{'QUFB' * 200}",
    "x" * 40,
    "x" * 41,
    "x" * 64,
    "x" * 65,
    "x" * 5000,
    "line\nbreak",
    "{}",
)
"""What providers, servers and other libraries give as ids, and what they should not."""

NAMES: Final[Sequence[str]] = (
    "look_up",
    "look_up",
    "look_up",
    "send-mail",
    "a.b",
    "a b",
    "a_b",
    "21st_of_month",
    "-x",
    "",
    "süß",
    "n" * 64,
    "n" * 70,
    "json_tool_call",
    "\ud800",
)

ODD_VALUES: Final[Sequence[Any]] = (
    math.nan,
    math.inf,
    -0.0,
    2**70,
    10**5000,
    b"\xff\x00",
    {1: "one", (2, 3): "two"},
    {"b", "a"},
    dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC),
    dt.date(2026, 1, 2),
    dt.timedelta(seconds=5),
    decimal.Decimal("1.10"),
    uuid.UUID(int=1),
    "lone \ud800",
    "nul \0 and \x1b",
    {"": "no name"},
    {"$ref": "part_0"},
    [],
    None,
)

RESULTS: Final[Sequence[Callable[[str], Any]]] = (
    lambda mark: mark,
    lambda mark: mark,
    lambda mark: {"found": mark},
    lambda mark: f'{{"found": "{mark}"}}',
    lambda mark: f'["{mark}"]',
    lambda mark: [mark, 1],
    lambda mark: f'{{"found": "{mark}", "part": NaN}}',
    lambda mark: f'{{"found": "{mark}", "part": 1e999}}',
    lambda mark: f'{{"found": "{mark}", "part": "\\ud800"}}',
    lambda mark: f'{{"found": "{mark}", "found": 1}}',
    lambda mark: f'{{"found": "{mark}"',
    lambda mark: f'{{"$ref": "{mark}"}}',
    lambda mark: "[" * 3000 + mark,
    lambda mark: '{"a":' * 3000 + mark,
    lambda mark: f"data:image/png;base64,{mark}",
    lambda mark: f"Error: {mark}",
    lambda mark: f"  {mark}\n",
    lambda mark: f"lone \ud800 {mark}",
    lambda mark: "",
    lambda mark: " \n",
)
"""What tools give back, each with its mark where it has room for one."""

PIXEL: Final = b"\x89PNG\r\n\x1a\n"

TEXTS: Final[Sequence[Callable[[str], str | None]]] = (
    lambda mark: mark,
    lambda mark: mark,
    lambda mark: mark,
    lambda mark: f" {mark} \n",
    lambda mark: f"{mark} \ud800",
    lambda mark: "",
    lambda mark: " \n",
    lambda mark: None,
)

PARTS: Final[Sequence[Callable[[str], list[Part]]]] = (
    lambda mark: [TextPart(mark), ImagePart(data=PIXEL, media_type="image/png")],
    lambda mark: [ImagePart(data=PIXEL, media_type="image/png"), TextPart(""), TextPart(mark)],
    lambda mark: [ImagePart(data=PIXEL)],
    lambda mark: [TextPart(""), TextPart(" ")],
    lambda mark: [TextPart(mark), UnknownPart("video", {"url": "x"})],
    lambda mark: [],
)


class _Drawing:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.history: list[Message] = []
        self._called: list[tuple[str, str]] = []

    def _rarely(self, times: int = 4) -> bool:
        return self._chance.randrange(times) == 0

    def says(self, role: Role) -> None:
        """A message of words, if it has any."""
        mark = f"<{role.value[0]}{len(self.history)}>"
        parts = self._rarely() and role is Role.USER
        content: Any = self._chance.choice(PARTS if parts else TEXTS)(mark)
        extra = self._extra(0) if role is Role.MODEL else {}
        self.history.append(Message(role, content, extra=extra))

    def calls(self) -> list[tuple[str, str]]:
        """A model's message with calls; they are equal, or have equal ids, more often than anybody would like."""
        position = len(self.history)
        made: list[ToolCall] = []
        for index in range(self._chance.choice([1, 1, 2, 3])):
            if made and self._rarely():
                args: Any = made[-1].args
            else:
                args = {"mark": f"<c{position}.{index}>"}
                args |= (
                    {"odd": self._chance.choice(ODD_VALUES)}
                    if self._rarely()
                    else {"n": self._chance.choice([1, 1.0, True])}
                )
            name = made[-1].name if made and self._rarely(2) else self._chance.choice(NAMES)
            made.append(ToolCall(id=self._id(), name=name, args=args))
        text = self._chance.choice(TEXTS)(f"<m{position}>") if self._rarely(2) else None
        self.history.append(Message(Role.MODEL, text, tool_calls=made, extra=self._extra(len(made))))
        self._called += [(call.id, call.name) for call in made]
        return [(call.id, call.name) for call in made]

    def results(self, of: Sequence[tuple[str, str]] = ()) -> None:
        """Results of these calls, or of any that have ever been made, or of none."""
        answered = list(of) or self._chance.choices(
            [*self._called, (self._id(), "look_up")], k=self._chance.choice([1, 1, 2])
        )
        if self._rarely():
            self._chance.shuffle(answered)
        if self._rarely():
            answered = answered[:-1] or answered
        if self._rarely():
            answered.append(answered[0])
        position = len(self.history)
        given = [
            ToolResult(
                tool_call_id=id_,
                name=name if not self._rarely(8) else "other",
                content=self._result(f"<r{position}.{index}>"),
                is_error=self._rarely(),
            )
            for index, (id_, name) in enumerate(answered)
        ]
        apart = [[each] for each in given] if self._rarely() else [given]
        self.history += [Message(Role.TOOL, tool_results=each) for each in apart]

    def _result(self, mark: str) -> Any:
        content: Any = self._chance.choice(RESULTS)(mark)
        return [mark, content, self._chance.choice(ODD_VALUES)] if self._rarely(6) else content

    def _id(self) -> str:
        if self._rarely(2):
            return self._chance.choice(IDS)
        return f"call_{self._chance.getrandbits(64):016x}"

    def _extra(self, calls: int) -> dict[str, Any]:
        """What a provider said beside text and calls."""
        model = self._chance.choice(MODELS)
        provider = model.partition("/")[0]
        extra: dict[str, Any] = {MODEL_KEY: model} if self._rarely(2) else {}
        if self._rarely(2):
            return extra
        extra |= {PROVIDER_KEY: provider}
        if provider in {"anthropic", "bedrock"}:
            extra["reasoning_content"] = "Hm."
            extra["thinking_blocks"] = [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}]
        elif provider == "gemini":
            signed = [{"provider_specific_fields": {"thought_signature": "c2ln"}}]
            extra |= {CALL_FIELDS_KEY: [*signed, *[{}] * (calls - 1)]} if calls else {}
        elif provider == "openai":
            extra[OUTPUT_KEY] = [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]
        return extra


def history(chance: random.Random) -> list[Message]:
    """A history, whole, cut off anywhere, or pruned."""
    drawing = _Drawing(chance)
    if chance.randrange(4):
        drawing.says(Role.USER)
    for _ in range(chance.randrange(1, 14)):
        step = chance.choice("uuummsccxxxrr")
        if step == "c":
            drawing.calls()
        elif step == "x":
            drawing.results(drawing.calls())
        elif step == "r":
            drawing.results()
        else:
            drawing.says({"u": Role.USER, "m": Role.MODEL, "s": Role.SYSTEM}[step])
    drawn = drawing.history
    way = chance.randrange(4)
    if way == 0:
        first = chance.randrange(len(drawn))
        return drawn[first : chance.randrange(first, len(drawn)) + 1]
    return list(prune(drawn, chance.randint(1, 4))) if way == 1 else drawn
