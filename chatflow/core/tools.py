"""What a model may call: Tool, made from a function by `tool`, and the ToolContext that a function may ask for.

The schema a model sees and the check of what it sends are pydantic's, from the function's annotations. Both are built
when the tool is made, so that an annotation that can't work is refused there and not in a conversation. pydantic is
loaded by the first tool, not by `import chatflow`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final, overload

import anyio.to_thread
import attrs

from chatflow.core.inspection import bound_by_partial, namespaces, read_docstring, resolve, without_partial
from chatflow.core.schemas import checking, problems_of, schema_generator, without_titles
from chatflow.core.values import thaw
from chatflow.exceptions import ToolArgumentError, ToolError, listed, shorten

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

    from chatflow.core.agent import Agent
    from chatflow.core.session import AgentSession

_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}")
"""What OpenAI, Anthropic and Gemini all accept as a function's name."""


@attrs.frozen(kw_only=True)
class ToolContext:
    """What surrounds a call. A tool gets it through a parameter annotated with this class, which no model sees.

    *state* is the session's, a shorthand. *idempotency_key* is the same each time this call is tried again, also after
    a restart, and another for every other call: hand it to a service that takes such keys, and it acts once.
    """

    session: AgentSession
    state: MutableMapping[str, Any]
    agent: Agent
    idempotency_key: str


@attrs.frozen
class _Parameter:
    adapter: TypeAdapter[Any]
    required: bool
    filled: bool
    """Whether its default stands in a pydantic Field, so that calling the function does not fill it in."""


class Tool:
    """A function that a model may call; the decorator `tool` makes one.

    *name* is the function's own unless given, *description* its docstring. A Google-style ``Args:`` section is taken
    out of the docstring, and each text in it describes that parameter to the model, unless a pydantic
    ``Field(description=...)`` does. *idempotent* says that running the same call twice does no harm, and
    *requires_approval* that no call may run before a person has approved it: see `Runner.approve`.

    Parameters may be of any type that pydantic can check and describe; one without an annotation takes anything. One
    annotated `ToolContext` is filled in, and what `functools.partial` bound stays bound; a model sees neither.
    ``*args`` and ``**kwargs`` are refused: a model could not know what to send.

    It may return any value that a message can hold, parts among them (`ToolResult`), or a `Handoff`. A `ToolResult` is
    taken for its content and *is_error*; its id and name are the call's. Raising a `ToolError` tells the model why the
    tool has failed; of any other exception it is told a reference to the log alone.

    Decorating a method in a class makes the tool of each instance: ``Agent(tools=[warehouse.look_up])``.

    Raises:
        ToolError: The name is none that providers accept, or a parameter can't be described to a model.
        TypeError: *function* is not a function, method or callable object, or another argument is of a wrong type.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        idempotent: bool = False,
        requires_approval: bool = False,
    ) -> None:
        _refuse_bad_types(function, name, description, idempotent=idempotent, requires_approval=requires_approval)
        source = without_partial(function)
        called = source if inspect.isroutine(source) else type(source).__call__
        own_name: Any = getattr(source, "__name__", type(source).__name__)
        self._name: Final[str] = own_name if name is None else name
        if not _NAME.fullmatch(self._name):
            raise ToolError(
                f"{shorten(self._name)} is no tool name that providers accept: 1 to 64 of a-z, A-Z, 0-9, _ and -, of"
                " which the first is a letter or _; give another with name=",
                tool=self._name,
            )
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise ToolError(f"tool {self._name} yields; a tool returns its result", tool=self._name)
        text, documented = read_docstring(called.__doc__ or source.__doc__ or "")
        self._description: Final[str] = text if description is None else description
        self._idempotent: Final[bool] = idempotent
        self._requires_approval: Final[bool] = requires_approval
        self._function: Final[Callable[..., Any]] = function
        self._is_async: Final[bool] = inspect.iscoroutinefunction(called)
        self._is_unbound = False
        self._read_parameters(documented)
        functools.update_wrapper(self, function, updated=())

    @property
    def name(self) -> str:
        """What a model calls it by."""
        return self._name

    @property
    def description(self) -> str:
        """What a model is told about it; empty for a function without a docstring."""
        return self._description

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of the arguments a model may send: an object, its ``$defs`` inside. A copy each time."""
        return copy.deepcopy(self._schema)

    @property
    def idempotent(self) -> bool:
        """Whether running the same call twice does no harm."""
        return self._idempotent

    @property
    def requires_approval(self) -> bool:
        """Whether a person has to approve each call before it runs."""
        return self._requires_approval

    @property
    def is_unbound(self) -> bool:
        """Whether it is a method read from its class, which has no instance to be called on."""
        return self._is_unbound

    def check(self, args: Mapping[str, Any]) -> None:
        """Check *args* as `invoke` does, and run nothing.

        Raises:
            ToolArgumentError: As `invoke` does.
        """
        _refuse_bad_arguments(self._name, args)
        self._bind(args, None)

    async def invoke(self, args: Mapping[str, Any], context: ToolContext) -> Any:
        """Check *args* and call the function with them and *context*; what it returns comes back as it is.

        The check is pydantic's lax one: the text ``"5"`` is taken for an int and an ISO text for a datetime, but not
        the number 5 for a str. What the function receives is its own to change.

        A function that is not async runs in a worker thread, with a copy of the context variables. Cancelled, the call
        is left at once; a thread can't be stopped, so the function goes on until it returns, unheard.

        Raises:
            ToolArgumentError: An argument is missing, unknown or not what the annotation asks for; nothing was run.
            Exception: Whatever the function raises, unchanged.
        """
        _refuse_bad_arguments(self._name, args)
        call = self._bind(args, context)
        if self._is_async:
            return await self._function(*call.args, **call.kwargs)
        result = await anyio.to_thread.run_sync(
            functools.partial(self._function, *call.args, **call.kwargs), abandon_on_cancel=True
        )
        # A lambda or a wrapper around an async function is not async itself.
        return await result if inspect.isawaitable(result) else result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it was written, unchecked and in this thread."""
        return self._function(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        # Only what was written in the class is its method; a tool kept as a class attribute is not called on instances.
        written = self._function
        self._is_unbound = (
            isinstance(written, types.FunctionType)
            and written.__qualname__ == f"{owner.__qualname__}.{written.__name__}"
        )

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        if instance is None or not self._is_unbound:
            return self
        method = types.MethodType(self._function, instance)
        return Tool(
            method,
            name=self._name,
            description=self._description,
            idempotent=self._idempotent,
            requires_approval=self._requires_approval,
        )

    def __repr__(self) -> str:
        return f"<Tool {self._name}>"

    def _read_parameters(self, documented: Mapping[str, str]) -> None:
        from pydantic import Field, TypeAdapter, ValidationError
        from pydantic.fields import FieldInfo

        self._signature = self._read_signature()
        self._parameters: dict[str, _Parameter] = {}
        self._context_names: set[str] = set()
        self._refusal: type[ValidationError] = ValidationError
        bound = bound_by_partial(self._function)  # may hold secrets: no model is shown them or may replace them
        # Linters move an import that only annotations need under TYPE_CHECKING; this class is found all the same.
        spaces = namespaces(self._function, ToolContext=ToolContext)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
                raise self._unfit(str(parameter), "a model could not know what to send; name each parameter")
            if name in bound:
                continue
            # Resolving and describing an annotation runs what others wrote: any exception means that it can't be used.
            try:
                hint: Any = resolve(parameter.annotation, *spaces)
                if _is_context(hint):
                    self._context_names.add(name)
                    continue
                default = parameter.default
                in_field = isinstance(default, FieldInfo)
                if default is not parameter.empty:
                    hint = _annotated(hint, default if in_field else Field(default=default))
                adapter = TypeAdapter[Any](hint)
                adapter.json_schema(schema_generator=schema_generator())
                required = adapter.get_default_value() is None
            except Exception as error:
                raise self._unfit(name, str(error).partition("\n\n")[0]) from error
            filled = not required and (in_field or default is parameter.empty)
            self._parameters[name] = _Parameter(adapter=adapter, required=required, filled=filled)
        self._schema = self._describe(documented)

    def _read_signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self._function)
        except (ValueError, TypeError, NameError) as error:
            raise ToolError(
                f"tool {self._name}: its parameters can't be read ({error}); wrap it in a function of your own",
                tool=self._name,
            ) from error

    def _unfit(self, parameter: str, reason: str) -> ToolError:
        return ToolError(
            f"tool {self._name}: the parameter {parameter} can't be described to a model: {reason}", tool=self._name
        )

    def _describe(self, documented: Mapping[str, str]) -> dict[str, Any]:
        from pydantic import TypeAdapter

        schemas, shared = TypeAdapter.json_schemas(
            [(name, "validation", parameter.adapter) for name, parameter in self._parameters.items()],
            schema_generator=schema_generator(),
        )
        properties = {name: without_titles(schemas[name, "validation"]) for name in self._parameters}
        for name in documented.keys() & properties.keys():
            properties[name].setdefault("description", documented[name])
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        required = [name for name, parameter in self._parameters.items() if parameter.required]
        if required:
            schema["required"] = required
        schema.update(without_titles(shared))
        return schema

    def _bind(self, args: Mapping[str, Any], context: ToolContext | None) -> inspect.BoundArguments:
        known = listed(self._parameters, 100) if self._parameters else "no arguments"
        problems = {str(name): f"unknown; the tool takes {known}" for name in args if name not in self._parameters}
        values: dict[str, Any] = dict.fromkeys(self._context_names, context)
        with checking():
            for name, parameter in self._parameters.items():
                if name in args:
                    try:
                        values[name] = parameter.adapter.validate_python(thaw(args[name]))
                    except self._refusal as refusal:
                        problems.update(problems_of(refusal, name))
                elif parameter.required:
                    problems[name] = "missing"
                elif parameter.filled:
                    default = parameter.adapter.get_default_value()
                    assert default is not None
                    values[name] = default.value
        if problems:
            raise ToolArgumentError(tool=self._name, problems=problems)
        call = inspect.BoundArguments(self._signature, values)
        call.apply_defaults()
        return call


@overload
def tool(
    function: Callable[..., Any],
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    idempotent: bool = False,
    requires_approval: bool = False,
) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    idempotent: bool = False,
    requires_approval: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    idempotent: bool = False,
    requires_approval: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a `Tool`, as ``@tool`` or ``@tool(name=..., idempotent=True, requires_approval=True)``.

    The result can still be called like the function. ``tool(function, name=...)`` works as well.

    Raises:
        ToolError: As `Tool` does.
    """
    if function is not None:
        return Tool(
            function,
            name=name,
            description=description,
            idempotent=idempotent,
            requires_approval=requires_approval,
        )
    return functools.partial(
        Tool, name=name, description=description, idempotent=idempotent, requires_approval=requires_approval
    )


def to_tool(function: Tool | Callable[..., Any]) -> Tool:
    """*function* itself if it is a tool, or a tool made of it.

    Raises:
        ToolError: It can't be made a tool, or is a method that no instance was asked for.
        TypeError: It is neither a tool nor a function.
    """
    found = function if isinstance(function, Tool) else Tool(function)
    if found.is_unbound:
        raise ToolError(f"tool {found.name} is a method; add it from an instance of its class", tool=found.name)
    return found


def _refuse_bad_types(function: Any, name: object, description: object, **flags: object) -> None:
    source = without_partial(function)
    if isinstance(source, Tool):
        raise TypeError(f"{source!r} is a tool already; make another from the function itself")
    if not callable(source) or isinstance(source, type):
        what = f"the class {source.__qualname__}" if isinstance(source, type) else type(source).__name__
        raise TypeError(f"a tool is made from a function, method or callable object, not {what}")
    for argument, value in (("name", name), ("description", description)):
        if not isinstance(value, str | None):
            raise TypeError(f"{argument} must be a string, not {type(value).__name__}")
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{argument} must be a bool, not {type(value).__name__}")


def _refuse_bad_arguments(name: str, args: object) -> None:
    # They are a model's doing, whatever the annotation says: some send a list, or text that is not JSON.
    if not isinstance(args, Mapping):
        raise ToolArgumentError(tool=name, problems={"arguments": f"must be an object, not {type(args).__name__}"})


def _annotated(hint: Any, field: Any) -> Any:
    return typing.Annotated[hint, field]


def _is_context(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _is_context(hint.__origin__)
    if origin is typing.Union or origin is types.UnionType:
        return set(typing.get_args(hint)) == {ToolContext, type(None)}
    return hint is ToolContext
