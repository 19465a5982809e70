"""``make dist``: looks at the wheel and the sdist in dist/, and runs from the wheel what a user would, elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
NOT_SHIPPED: Final = {".gitignore", ".ci/run"}
"""Files of the repository that nobody needs who has the sdist."""


def only(pattern: str) -> Path:
    """The one file in dist/ that is called so."""
    (found,) = (ROOT / "dist").glob(pattern)
    return found


def committed() -> set[str]:
    """What git keeps, by its path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


def check_same(what: str, found: set[str], expected: set[str]) -> None:
    """Refuse an archive in which something is missing, or too much."""
    if found != expected:
        sys.exit(f"{what}: missing {sorted(expected - found)}, too much {sorted(found - expected)}")
    print(f"{what}: {len(found)} files, as they should be")


def check_sdist(sdist: Path, folder: Path) -> Path:
    """Unpack it; what git keeps is in it, and nothing else."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    found = {str(each.relative_to(source)) for each in source.rglob("*") if each.is_file()}
    # hatchling always adds the .gitignore that it has gone by.
    check_same(sdist.name, found - {"PKG-INFO", ".gitignore"}, committed() - NOT_SHIPPED)
    return source


def check_wheel(wheel: Path) -> None:
    """The package is in it, with its types, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    check_same(wheel.name, found, {name for name in committed() if name.startswith("chatflow/")})


def run(*command: str | Path, folder: Path, typed: str = "") -> str:
    """What a command prints that ends well."""
    unset = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MODEL", "CHAT_DB", "CHATFLOW_DB"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} has ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def main() -> None:
    """Look at both, install the wheel into a new environment outside of the repository, and use it there."""
    with tempfile.TemporaryDirectory(prefix="chatflow-dist-") as name:
        folder = Path(name)
        wheel = only("*.whl")
        check_wheel(wheel)
        source = check_sdist(only("*.tar.gz"), folder)
        run(sys.executable, "-m", "venv", "venv", folder=folder)
        python = folder / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1", folder=folder)
        group = f"{source / 'pyproject.toml'}:examples"
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[cli]", "--group", group, folder=folder)

        where = run(python, "-c", "import chatflow; print(chatflow.__file__)", folder=folder).strip()
        if not Path(where).is_relative_to(folder / "venv"):
            sys.exit(f"chatflow is imported from {where}")
        print("installed into a new environment")

        readme = (source / "README.md").read_text(encoding="utf-8")
        (program,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[:1]
        (said,) = re.findall(r"^It prints `([^`]+)`", readme, re.MULTILINE)
        if (printed := run(python, "-", folder=folder, typed=program)) != f"{said}\n":
            sys.exit(f"the README's program prints {printed!r}")
        print(f"the README's program prints {said!r}")

        answer = run(folder / "venv" / "bin" / "chatflow", "chat", folder=folder, typed="where is order 404?\n")
        if "It is on its way" not in answer:
            sys.exit(f"the command chatflow says {answer!r}")
        print("the command chatflow answers")

        # Beside demo.py there is no folder chatflow: what it imports is the wheel's.
        print(run(python, source / "examples" / "demo.py", folder=folder))


if __name__ == "__main__":
    main()
