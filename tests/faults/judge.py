"""The judge: reads the storage and the ledger once all is over, and compares them with what the senders know.

It reads with plain SQL and chatflow's pure functions, and with nothing that was under test.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from chatflow.core.codec import message_from_json, values_from_json
from chatflow.core.messages import Message, Role
from chatflow.core.prompt import to_prompt
from chatflow.core.pruning import prune
from tests.faults.ledger import Sent
from tests.faults.storage import Storage

Runs = defaultdict[tuple[str, int, str], list[dict[str, Any]]]
"""The runs of tools, by message, batch and tool."""

TOOL_WRITES: Final = {"plain": "plain", "idempotent": "idempotent", "hang": "idempotent"}


@attrs.define
class Verdict:
    """What was found. All lists but *acknowledged* are to be empty."""

    acknowledged: list[str] = attrs.field(factory=list[str])
    lost: list[str] = attrs.field(factory=list[str])
    doubled: list[str] = attrs.field(factory=list[str])
    out_of_order: list[str] = attrs.field(factory=list[str])
    broken: list[str] = attrs.field(factory=list[str])
    """Anything else: half turns, orphans, states, left-over rows, damage."""
    recovery: float = 0.0


@attrs.frozen
class Conversation:
    """A conversation as it is stored; its turns by message."""

    history: tuple[Message, ...]
    turns: list[tuple[str, list[Message]]]
    metadata: dict[str, Any]
    state: dict[str, Any]


def read(storage: Storage) -> dict[str, Conversation]:
    """Read all conversations."""
    conversations: dict[str, Conversation] = {}
    with storage.connected() as query:
        texts: dict[int, list[str]] = defaultdict(list)
        for key, text in query(
            "SELECT session_key, CAST(message_json AS text) FROM chatflow_messages ORDER BY session_key, place"
        ):
            texts[key].append(text)
        for key, name, metadata, state in query(
            "SELECT session_key, session_id, CAST(metadata_json AS text), CAST(state_json AS text)"
            " FROM chatflow_sessions"
        ):
            history = tuple(message_from_json(text) for text in texts[key])
            conversations[name] = Conversation(
                history, _turns(history), dict(values_from_json(metadata)), dict(values_from_json(state))
            )
    return conversations


def rows_of(storage: Storage) -> list[str]:
    """The rows of turns, and their journals, that are stored."""
    with storage.connected() as query:
        rows = [
            f"turn {turn_id} of {message} is left, {state} in the hands of {holder}"
            for turn_id, message, state, holder in query(
                "SELECT turn_id, message_id, state, holder FROM chatflow_turns"
            )
        ]
        rows += [
            f"the journal of turn {row[0]} is left" for row in query("SELECT DISTINCT turn_id FROM chatflow_journal")
        ]
    return rows


def _turns(history: Iterable[Message]) -> list[tuple[str, list[Message]]]:
    turns: list[tuple[str, list[Message]]] = []
    for message in history:
        if message.role is Role.USER:
            turns.append((message.text.split()[0], []))
        if turns:
            turns[-1][1].append(message)
    return turns


def judge(storage: Storage, sents: Sequence[Sent], *, journals_lost: bool = False) -> Verdict:
    """Compare. With *journals_lost* the fault itself has taken journals, and calls may have been run again."""
    verdict, conversations = Verdict(broken=storage.damage()), read(storage)
    by_session: dict[str, list[Sent]] = defaultdict(list)
    for sent in sents:
        by_session[sent.session].append(sent)
        verdict.recovery = max(verdict.recovery, sent.recovery)
        if sent.acked_at is not None:
            verdict.acknowledged.append(sent.message)
        if not sent.answers:
            verdict.lost.append(f"{sent.message} was never answered; errors: {Counter(sent.errors)}")
        if len(set(sent.answers)) > 1:
            verdict.doubled.append(f"{sent.message} has several answers: {sorted(set(sent.answers))}")
    effects: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for effect in storage.ledger.lines("effect"):
        effects[effect["message"]].append(effect)
    for session, its in by_session.items():
        found = conversations.get(session)
        if found is None:
            verdict.lost += [f"{sent.message}: the conversation is not there" for sent in its]
        else:
            _judge_conversation(session, found, its, verdict)
            _judge_effects(found, its, effects, verdict, journals_lost=journals_lost)
    return verdict


def _judge_conversation(session: str, found: Conversation, its: list[Sent], verdict: Verdict) -> None:
    if prune(found.history, 1_000_000) != found.history:
        verdict.broken.append(f"{session}: its history is not what pruning leaves of it")
    repairs = to_prompt(found.history).repairs
    if repairs:
        verdict.broken.append(f"{session}: its history had to be repaired: {repairs}")
    places: dict[str, list[int]] = defaultdict(list)
    for place, (message, _) in enumerate(found.turns):
        places[message].append(place)
    sent_by_name = {sent.message: sent for sent in its}
    verdict.broken += [f"{session} has {name}, which nobody sent" for name in places.keys() - sent_by_name.keys()]
    for name, sent in sent_by_name.items():
        at = places.get(name, [])
        if not at:
            if sent.acked_at is not None:
                verdict.lost.append(f"{name} was acknowledged and is not in {session}")
            continue
        if len(at) > 1:
            verdict.doubled.append(f"{name} has {len(at)} turns in {session}")
        _judge_turn(sent, found.turns[at[0]][1], found, verdict)
    _judge_order(its, places, verdict)


def _judge_turn(sent: Sent, messages: list[Message], found: Conversation, verdict: Verdict) -> None:
    plan = [batch.split(",") for batch in sent.plan.split() if batch != "die"]
    calls = [[call.name for call in message.tool_calls] for message in messages if message.tool_calls]
    last = messages[-1]
    if calls != plan or last.role is not Role.MODEL or last.tool_calls or len(messages) != 2 + 2 * len(plan):
        verdict.broken.append(f"{sent.message}: half a turn, {[message.role.value for message in messages]}")
        return
    if last.agent_name != sent.agent:
        verdict.broken.append(f"{sent.message} of {sent.agent} was answered by {last.agent_name}")
    if sent.answers and last.text != sent.answers[0]:
        verdict.doubled.append(f"{sent.message}: answered {sent.answers[0]!r}, and stored {last.text!r}")
    if sent.message not in found.metadata:
        verdict.broken.append(f"{sent.message}: its metadata is not there")


def _judge_order(its: list[Sent], places: dict[str, list[int]], verdict: Verdict) -> None:
    """Whoever was acknowledged before another was sent stands before it.

    What is only accepted is passed by another application's turns.
    """
    there = [sent for sent in its if places.get(sent.message) and sent.sent_at is not None]
    for earlier in there:
        if earlier.acked_at is None:
            continue
        for later in there:
            assert later.sent_at is not None
            if earlier.way == "accept" and earlier.agent != later.agent:
                continue
            if earlier.acked_at < later.sent_at and places[earlier.message][0] > places[later.message][0]:
                verdict.out_of_order.append(f"{later.message} stands before {earlier.message}")


def _judge_effects(
    found: Conversation,
    its: list[Sent],
    effects: dict[str, list[dict[str, Any]]],
    verdict: Verdict,
    *,
    journals_lost: bool,
) -> None:
    runs: Runs = defaultdict(list)
    for sent in its:
        for effect in effects[sent.message]:
            runs[sent.message, effect["batch"], effect["tool"]].append(effect)
    for (message, batch, tool), its_runs in runs.items():
        if tool == "plain" and len(its_runs) > 1 and not journals_lost:
            verdict.doubled.append(f"{message}: its call {batch} of a plain tool was run {len(its_runs)} times")
        if len({run["key"] for run in its_runs}) > 1:
            verdict.broken.append(f"{message}: its call {batch} of the {tool} tool had several keys")
    wanted = _results(found, runs, verdict)
    if found.state != wanted:
        differ = sorted(set(found.state.items()) ^ set(wanted.items()))
        verdict.broken.append(f"the state and the results of tools differ: {differ}")


def _results(found: Conversation, runs: Runs, verdict: Verdict) -> dict[str, str]:
    """What the tools have returned, each of which has to have its effect; that is also what they left in the state."""
    wanted: dict[str, str] = {}
    for message, messages in found.turns:
        for batch, answers in enumerate(each for each in messages if each.tool_results):
            for result in answers.tool_results:
                tool = TOOL_WRITES[result.name]
                if result.is_error:
                    if tool == "idempotent":
                        verdict.broken.append(f"{message}: an idempotent tool ended with {result.content}")
                    continue
                content: Any = result.content
                wanted[f"{message}.{batch}.{tool}"] = content["run"]
                if content["run"] not in [run["run"] for run in runs[message, batch, tool]]:
                    verdict.broken.append(f"{message}: the result {content} of its {tool} tool has no effect")
    return wanted


async def nothing_left(storage: Storage, *but: str) -> list[str]:
    """Rows that are left although there are workers to do them; those of the messages *but* are excepted.

    What its sender has heard of may still have to be struck off, by whoever looks for work next.
    """
    left: list[str] = []
    for _ in range(200):
        left = [row for row in rows_of(storage) if not any(f" of {message} " in row for message in but)]
        if not left:
            break
        await asyncio.sleep(0.05)
    return left
