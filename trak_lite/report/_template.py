"""HTML from the templates of this folder; Jinja2 escapes every value."""

from __future__ import annotations

import base64
import functools
import hashlib
import secrets
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trak_lite._validate import require_packages
from trak_lite._version import __version__
from trak_lite.errors import InvalidInputError
from trak_lite.report.content import LEVELS

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["environment", "fragment", "visible", "write_page"]

_FILES: Final = {
    "style": "style.css",
    "script": "script.js",
    "serve_style": "serve.css",
    "serve_script": "serve.js",
}
"""Files of inline styles and scripts by their names in templates."""
_SYMBOLS: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD),
}
"""Visible characters for control characters, and for lone surrogates, which UTF-8 cannot encode."""


@functools.cache
def environment() -> Environment:
    """Return the Jinja2 environment of the templates.

    Raises:
        MissingPackageError: If Jinja2 is not installed.
    """
    require_packages("jinja2", extra="report")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("trak_lite.report"),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, file in _FILES.items():
        made.globals[name] = Markup(made.get_template(file).render(levels=LEVELS))
    made.globals.update(digest=_digest, version=__version__)
    return made


def fragment(template: str, **values: Any) -> str:
    """Return a filled template."""
    return environment().get_template(template).render(values)


def write_page(path: str | PathLike[str], template: str, **values: Any) -> Path:
    """Write a page piece by piece and return its path; an existing file is replaced when the new one is complete.

    Args:
        path: Path of the file.
        template: Name of the template.
        **values: Values of the template. Iterators are consumed while the page is written.

    Raises:
        InvalidInputError: If the path is a folder.
        MissingPackageError: If Jinja2 is not installed.
    """
    out = Path(path)
    if out.is_dir():
        raise InvalidInputError(f"{out} is a folder. Name a file in it, such as {out / 'report.html'}.")
    pieces = environment().get_template(template).generate(values)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    try:
        with unfinished.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(pieces)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def visible(value: Any) -> Any:
    """Return a value of a template; in text, line ends become newlines and control characters visible."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return value.replace("\r\n", "\n").replace("\r", "\n").translate(_SYMBOLS)


def _digest(text: str) -> str:
    """Return the source expression of an inline style or script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
