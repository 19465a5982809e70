"""What can be read off a function: its annotations with their names resolved, and the sections of its docstring."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final


def without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """What stands under `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def bound_by_partial(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The keywords that `functools.partial` fixed, which `inspect` takes for defaults."""
    return function.keywords if isinstance(function, functools.partial) else {}


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that somebody wrote, under partials, methods, decorators and ``__call__``."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = getattr(function, "__wrapped__")  # noqa: B009  # pyright knows of no such attribute
        elif inspect.isroutine(function):
            return function
        else:
            function = type(function).__call__


def namespaces(function: Callable[..., Any], **ours: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The globals and locals in which the function's annotations mean something.

    Annotations as text may name locals of an enclosing function, which are only to be had from its frame. That is on
    the stack wherever the tool is made next to its function. *ours* are known too, unless the module has such names.
    """
    source = _written(function)
    known: dict[str, Any] = getattr(source, "__globals__", {})
    nearby = nearby_names(known, getattr(source, "__qualname__", ""))
    code, cells = getattr(source, "__code__", None), getattr(source, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code else (), cells, strict=True):
        with contextlib.suppress(ValueError):  # the variable is not set yet
            nearby[name] = cell.cell_contents
    return ours | known, nearby


def nearby_names(known: Mapping[str, Any], qualname: str) -> dict[str, Any]:
    """The locals of the functions that enclose what has this *qualname* in the module of the globals *known*.

    Of those that are on the stack.
    """
    scopes = set(_enclosing(qualname))
    nearby: dict[str, Any] = {}
    frame = inspect.currentframe() if scopes else None
    while frame is not None:
        if frame.f_globals is known and frame.f_code.co_qualname in scopes:
            nearby = frame.f_locals | nearby
        frame = frame.f_back
    return nearby


def _enclosing(qualname: str) -> Iterator[str]:
    while ".<locals>." in qualname:
        qualname = qualname.rpartition(".<locals>.")[0]
        yield qualname


def resolve(annotation: Any, known: dict[str, Any], nearby: dict[str, Any]) -> Any:
    """The type that one parameter's annotation names, or Any where there is none; raises whatever naming it raises."""
    if annotation is inspect.Parameter.empty:
        return Any
    # One at a time, so that an error is of one parameter, and what stands at the return does not matter.
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, known, nearby, include_extras=True)["it"]


_ARGS_HEADER: Final = re.compile(r"(Args|Arguments|Parameters):\s*")
_ARGS_ENTRY: Final = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\(.*?\))?:(?P<text>.*)")


def read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """A docstring without its ``Args:`` section, and that section's texts by parameter."""
    kept: list[str] = []
    entries: dict[str, list[str]] = {}
    texts: list[str] = []  # of the entry being read
    indent: int | None = None  # of the section's entries, while in it
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        text = line.strip()
        if text and not line[0].isspace():
            inside, indent = _ARGS_HEADER.fullmatch(line) is not None, None
        if not inside:
            kept.append(line)
        elif text and line[0].isspace():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            entry = _ARGS_ENTRY.fullmatch(text) if depth <= indent else None
            if entry:
                texts = entries.setdefault(entry["name"], [])
                text = entry["text"].strip()
            texts.append(text)
    described = {name: " ".join(filter(None, lines)) for name, lines in entries.items()}
    return inspect.cleandoc("\n".join(kept)), {name: text for name, text in described.items() if text}
