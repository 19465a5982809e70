"""What Hypothesis draws items of openai-agents' sessions from: conversations as the SDK saves them, in pieces."""

from __future__ import annotations

from typing import Any, Final

import attrs
from hypothesis import strategies as st

Item = dict[str, Any]

texts: Final = st.sampled_from(["", " ", "hello", "Grüße \U0001f600", "a\nb"])
_json: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
_status: Final = st.sampled_from(["completed", "in_progress", "incomplete"])
_more: Final = st.dictionaries(st.sampled_from(["provider_data", "namespace", "agent"]), _json, max_size=2)
_ids: Final = st.integers(0, 9).map("id_{}".format)

_user_parts: Final = st.lists(
    st.one_of(
        texts.map(lambda text: {"type": "input_text", "text": text}),
        st.just({"type": "input_image", "detail": "high", "image_url": "data:image/png;base64,YWJj"}),
        st.just({"type": "input_image", "detail": "auto", "file_id": "file-1"}),
        st.just({"type": "input_file", "file_data": "not base64", "filename": "a.pdf"}),
        st.just({"type": "input_audio", "input_audio": {"data": "YWJj", "format": "mp3"}}),
        st.just({"type": "hologram", "depth": 3}),
    ),
    max_size=3,
)
user_items: Final = st.builds(
    lambda content, more: {"role": "user", "content": content, **more},
    texts | _user_parts,
    st.dictionaries(st.just("type"), st.just("message"), max_size=1),
)
front_items: Final = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "developer", "assistant"]),
        texts,
    ),
    st.just({"type": "compaction", "id": "cmp_1", "encrypted_content": "abc"}),
)
"""What may stand before the first user message."""

_answers: Final = st.one_of(
    texts.map(lambda text: {"role": "assistant", "content": text}),
    st.builds(
        lambda id_, texts, status, more: {
            "id": id_,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts],
            **more,
        },
        _ids,
        st.lists(texts, max_size=2),
        _status,
        _more,
    ),
    st.just(
        {"id": "m", "type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I won't."}]}
    ),
)
_others: Final = st.one_of(
    st.builds(
        lambda id_, more: {"type": "reasoning", "id": id_, "summary": [], **more},
        _ids,
        st.sampled_from([{}, {"encrypted_content": "abc"}, {"content": [{"type": "reasoning_text", "text": "hm"}]}]),
    ),
    st.just({"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}}),
    st.just({"type": "image_generation_call", "id": "ig", "result": "YWJj", "status": "completed"}),
    st.just({"type": "mcp_list_tools", "id": "l", "server_label": "docs", "tools": [{"name": "read"}]}),
    st.just({"type": "mcp_call", "id": "m", "server_label": "docs", "name": "read", "arguments": "{", "output": None}),
    st.just({"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}}),
    st.just({"type": "tool_search_output", "call_id": None, "execution": "server", "tools": []}),
    st.just({"type": "item_reference", "id": "msg_1"}),
    st.just({"role": "developer", "content": "The user is Ada."}),
    st.just({"type": "message", "role": "assistant", "content": None}),
    st.builds(lambda more: {"type": "of next year", **more}, _more),
)
_outputs: Final = texts | st.lists(texts.map(lambda text: {"type": "input_text", "text": text}), max_size=2)


def _pair(id_: str, kind: str, arguments: str, output: Any, extra: Item) -> tuple[Item, Item]:
    calls: dict[str, Item] = {
        "function": {"type": "function_call", "name": "look_up", "arguments": arguments},
        "custom": {"type": "custom_tool_call", "name": "sql", "input": arguments},
        "shell": {"type": "shell_call", "action": {"commands": [arguments]}},
        "computer": {"type": "computer_call", "action": {"type": "wait"}, "pending_safety_checks": []},
        "apply_patch": {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": arguments}},
        "program": {"type": "program", "code": arguments},
    }
    if kind == "approval":
        request = {"type": "mcp_approval_request", "name": "read", "arguments": arguments, "server_label": "docs"}
        response = {"type": "mcp_approval_response", "approval_request_id": id_, "approve": True}
        return {"id": id_, **request}, response
    kept = calls[kind]["type"]
    return {"call_id": id_, **calls[kind], **extra}, {"call_id": id_, "type": f"{kept}_output", "output": output}


_kinds: Final = st.sampled_from(["function", "custom", "shell", "computer", "apply_patch", "program", "approval"])
_arguments: Final = st.sampled_from(["{}", '{"a":1}', '{"a": 1}', "", "{not json", "[1]"])


@attrs.frozen
class Conversation:
    """Items in the pieces that they are added in."""

    pieces: list[list[Item]]

    @property
    def items(self) -> list[Item]:
        """All of them."""
        return [item for piece in self.pieces for item in piece]


@st.composite
def _conversations(draw: st.DrawFn) -> Conversation:
    items: list[Item] = draw(st.lists(front_items, max_size=2))
    late: list[Item] = []
    number = 0
    for _ in range(draw(st.integers(0, 5))):
        items.append(draw(user_items))
        items.extend(draw(st.lists(_others | _answers, max_size=2)))
        pairs = []
        for _ in range(draw(st.integers(0, 3))):
            number += 1
            extra = draw(_more)
            pairs.append(_pair(f"call_{number}", draw(_kinds), draw(_arguments), draw(_outputs), extra))
        items.extend(call for call, _ in pairs)
        items.extend(late)  # a person has approved in the meantime
        given = draw(st.permutations([output for _, output in pairs]))
        late = [output for output in given if draw(st.integers(0, 4)) == 0]
        items.extend(output for output in given if output not in late)
        items.extend(draw(st.lists(_others | _answers, max_size=2)))
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=4)))
    return Conversation([items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)])


conversations: Final = _conversations()


def call_id(item: Item) -> tuple[str, bool] | None:
    """The id of the call that *item* is or answers, and whether it answers it."""
    kind = item.get("type") or ""
    if kind.startswith("mcp_approval"):
        return (item["approval_request_id"], True) if kind.endswith("response") else (item["id"], False)
    id_ = item.get("call_id")
    return None if id_ is None else (id_, kind.endswith("_output"))
