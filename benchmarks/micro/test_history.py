"""Messages as they are made, added, pruned and turned into a prompt."""

from __future__ import annotations

from itertools import cycle

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.conversation import WINDOW
from benchmarks.systems.ours import messages
from chatflow import Message, prune
from chatflow.core.prompt import to_prompt
from chatflow.core.pruning import Window


def test_make_the_messages_of_a_turn(benchmark: BenchmarkFixture) -> None:
    """Four frozen values, checked."""
    benchmark(messages, 7)


def test_add_a_message_to_a_window(benchmark: BenchmarkFixture, history: list[Message]) -> None:
    """Into one that is full, with the cut that a commit makes after each turn."""
    window, turns = Window(), cycle(history)
    for message in history:
        window.add(message)

    def add_a_turn() -> None:
        for _ in range(4):
            window.add(next(turns))
        window.trim(WINDOW)

    benchmark(add_a_turn)


def test_prune_a_history(benchmark: BenchmarkFixture, history: list[Message]) -> None:
    """160 messages at once, to half of their turns."""
    benchmark(prune, history, WINDOW // 2)


def test_make_a_prompt(benchmark: BenchmarkFixture, history: list[Message]) -> None:
    """Of 160 messages: what each request to a model costs."""
    benchmark(to_prompt, history, "Help with orders.")
