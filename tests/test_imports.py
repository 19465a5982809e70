from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeAlias

import attrs
import pytest

import chatflow

PACKAGE: Final = Path(chatflow.__file__).parent

IMPORT: Final = """
import sys
used = []
def note(event, arguments):
    if event.startswith("socket.") and event != "socket.gethostname":  # which asks the kernel and nobody else
        used.append(event)
sys.addaudithook(note)
import chatflow
print(sorted({"litellm", "psycopg", "pydantic"} & sys.modules.keys()), used)
"""

MAY_IMPORT: Final = {
    "chatflow.exceptions": (),
    "chatflow.core": ("chatflow.core", "chatflow.exceptions"),
    "chatflow.sqlite": ("chatflow.core", "chatflow.exceptions", "chatflow.sqlite"),
    "chatflow.postgres": ("chatflow.core", "chatflow.exceptions", "chatflow.postgres"),
    "chatflow.engines": ("chatflow.core", "chatflow.exceptions", "chatflow.engines"),
    "chatflow.adapters": (
        "chatflow.core",
        "chatflow.exceptions",
        "chatflow.engines",
        "chatflow.runner",
        "chatflow.running",
        "chatflow.adapters",
    ),
}
"""What of ours each part may import. What is not in it runs turns, and may import all parts but the storage."""

RUNS_TURNS: Final = (
    "chatflow.core",
    "chatflow.exceptions",
    "chatflow.engines",
    "chatflow.runner",
    "chatflow.running",
)
RUNS_BY_ITSELF: Final = "chatflow.core.agent"
"""An agent that runs by itself makes a runner, which knows agents: never where the module is loaded."""

COMMAND: Final = ("chatflow.cli", "chatflow.__main__")
"""The command, which may import all parts, and which none of them may."""

TESTING: Final = "chatflow.testing"
"""What tests are written with, which may import all parts, and which none of them may."""


Place: TypeAlias = Literal["module", "function", "for checkers"]


@attrs.frozen
class Import:
    """One module that a module imports."""

    importer: str
    imported: str
    place: Place


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _walk(node: ast.AST, place: Place = "module") -> Iterator[tuple[ast.AST, Place]]:
    for child in ast.iter_child_nodes(node):
        inside = place
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = "function"
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            inside = "for checkers"
        yield child, inside
        yield from _walk(child, inside)


def _imports(path: Path) -> Iterator[Import]:
    """What a module imports, wherever it does: by a statement, or by a name that is given to `import_module`."""
    for node, place in _walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        for name in names:
            yield Import(_name(path), name, place)


def is_within(module: str, part: str) -> bool:
    """Whether *module* is *part*, or lies in it."""
    return f"{module}.".startswith(f"{part}.")


ALL_IMPORTS: Final = tuple(each for path in sorted(PACKAGE.rglob("*.py")) for each in _imports(path))


def importers(*packages: str) -> set[tuple[str, Place]]:
    """Who imports one of these, and where."""
    return {
        (each.importer, each.place)
        for each in ALL_IMPORTS
        if any(is_within(each.imported, package) for package in packages)
    }


def test_what_an_import_loads() -> None:
    """`import chatflow` loads neither litellm, psycopg nor pydantic, and asks for no socket and no host's address."""
    run = subprocess.run([sys.executable, "-c", IMPORT], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert run.stdout == "[] []\n"


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_directions(part: str) -> None:
    """Imports run one way: each part imports of ours only what it may."""
    assert any(is_within(each.importer, part) for each in ALL_IMPORTS)
    wrong = [
        each
        for each in ALL_IMPORTS
        if is_within(each.importer, part)
        and is_within(each.imported, "chatflow")
        and not any(is_within(each.imported, allowed) for allowed in MAY_IMPORT[part])
        and not (each.importer == RUNS_BY_ITSELF and each.place != "module")
    ]
    assert wrong == []


def test_running_turns_knows_no_storage() -> None:
    """The runner and its parts import engines and core, and no storage."""
    wrong = [
        each
        for each in ALL_IMPORTS
        if each.importer != "chatflow"
        and not any(is_within(each.importer, part) for part in (*MAY_IMPORT, *COMMAND, TESTING))
        and is_within(each.imported, "chatflow")
        and not any(is_within(each.imported, allowed) for allowed in RUNS_TURNS)
    ]
    assert wrong == []


def test_command_is_an_extra() -> None:
    """Only the command itself imports it, and what it needs."""
    for name in ("chatflow.cli", "click", "rich"):
        assert {importer for importer, _ in importers(name) if not is_within(importer, "chatflow.cli")} <= {
            "chatflow.__main__"
        }


def test_testing_is_an_extra() -> None:
    """Only what tests are written with imports itself, and what it needs."""
    for name in (TESTING, "pytest", "hypothesis", "blockbuster"):
        assert {is_within(importer, TESTING) for importer, _ in importers(name)} == {True}


def test_adapters_are_extras() -> None:
    """Only the command imports an adapter, and only an adapter the package that it is for."""
    found = {importer for importer, _ in importers("chatflow.adapters")}
    assert all(is_within(each, "chatflow.adapters") or is_within(each, "chatflow.cli") for each in found)
    web = {"chatflow.adapters.starlette", "chatflow.adapters.fastapi"}
    for package, expected in (("agents", {"chatflow.adapters.openai_agents"}), ("starlette", web), ("fastapi", web)):
        assert {importer for importer, _ in importers(package)} <= expected


def test_sqlite_is_in_one_module() -> None:
    """SQLite is spoken to in one module."""
    assert importers("sqlite3", "aiosqlite") == {("chatflow.sqlite.database", "module")}


def test_psycopg_is_in_one_module() -> None:
    """PostgreSQL is spoken to in one module."""
    assert {importer for importer, _ in importers("psycopg")} == {"chatflow.postgres.connection"}


def test_litellm_is_in_one_function() -> None:
    """Only one module loads litellm, and only once a function of it is called."""
    assert importers("litellm") == {("chatflow.engines.litellm", "function")}


def test_pydantic_waits_for_the_first_tool() -> None:
    """What describes tools and answers loads pydantic, and only once a function of it is called."""
    found = {each for each in importers("pydantic", "pydantic_core") if not is_within(each[0], TESTING)}
    assert {importer for importer, _ in found} == {
        f"chatflow.core.{name}" for name in ("mirrors", "output", "schemas", "tools")
    }
    assert {place for _, place in found} == {"function", "for checkers"}
