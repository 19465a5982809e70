"""Messages to JSON and back."""

from __future__ import annotations

import json

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from chatflow import Message
from chatflow.core.codec import message_from_json, message_to_json
from chatflow.sqlite.commit import texts_of

KINDS = ("a question", "a call", "a result", "an answer")


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_write_a_message(benchmark: BenchmarkFixture, history: list[Message], kind: int) -> None:
    """What a commit does for each message."""
    benchmark(message_to_json, history[kind])


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_read_a_message(benchmark: BenchmarkFixture, history: list[Message], kind: int) -> None:
    """What a load does for each message."""
    benchmark(message_from_json, message_to_json(history[kind]))


def test_write_the_messages_of_a_turn(benchmark: BenchmarkFixture, history: list[Message]) -> None:
    """What a commit hands to its one statement."""
    benchmark(texts_of, history[:4])


def test_read_a_history(benchmark: BenchmarkFixture, history: list[Message]) -> None:
    """What a cold load of 160 messages decodes."""
    texts = [message_to_json(message) for message in history]
    benchmark(lambda: [message_from_json(text) for text in texts])


def test_read_a_history_as_json_alone(benchmark: BenchmarkFixture, history: list[Message]) -> None:
    """The floor of that: `json.loads`, no types."""
    texts = [message_to_json(message) for message in history]
    benchmark(lambda: [json.loads(text) for text in texts])


def test_read_a_history_as_json_alone_by_msgspec(benchmark: BenchmarkFixture, history: list[Message]) -> None:
    """The floor of the floor."""
    texts = [message_to_json(message) for message in history]
    benchmark(lambda: [msgspec.json.decode(text) for text in texts])
