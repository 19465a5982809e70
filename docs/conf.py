"""How the documentation is built: `make docs`. Nothing in it is fetched, when it is built or when it is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from sphinx.application import Sphinx

import chatflow

project = "chatflow"
version = release = chatflow.__version__
html_title = f"chatflow {release}"

autodoc_mock_imports = ["agents", "fastapi", "starlette"]  # what the adapters are for: docstrings are read without

extensions = ["myst_parser", "sphinx_external_toc", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

external_toc_path = "_toc.yml"
myst_heading_anchors = 3  # as GitHub makes them, so that a link to a heading works there and here

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

default_role = "py:obj"  # what stands in single backticks in a docstring is a name
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

_LINK: Final = re.compile(r"\]\((\.\./[^)#]+\.md)\)")


def _link_to_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Let a page that is none of the documentation, such as benchmarks/README.md, be a file to load."""
    folder, docs = (app.srcdir / name).parent, Path(app.srcdir)

    def link(found: re.Match[str]) -> str:
        is_page = (folder / found[1]).resolve().is_relative_to(docs)
        return found[0] if is_page else f"](path:{found[1]})"

    source[0] = _LINK.sub(link, source[0])


def _say_what_properties_are(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Keep napoleon from taking what stands before a property's first colon for its type."""
    if what == "property":
        lines.insert(0, "\\ ")  # nothing, for the parser of reStructuredText


def _show_factories(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show that a field of an attrs class has a default, where that is made anew each time."""
    return signature and signature.replace("= NOTHING", "= ..."), returns


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("source-read", _link_to_files)
    app.connect("autodoc-process-docstring", _say_what_properties_are, priority=400)
    app.connect("autodoc-process-signature", _show_factories)
