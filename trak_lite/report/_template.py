"""HTML from the templates of this folder; Jinja2 escapes every value."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import secrets
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trak_lite._version import __version__
from trak_lite.errors import InvalidInputError
from trak_lite.report._extra import require

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["LEVELS", "environment", "fragment", "write_page"]

LEVELS: Final = 7
"""Shades of a token weight, for each sign."""
# C0 and C1 control characters except tab and newline, and lone surrogates, which UTF-8 cannot encode.
_CONTROLS: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


@functools.cache
def environment() -> Environment:
    """Return the Jinja2 environment of the templates.

    Raises:
        MissingPackageError: If Jinja2 is not installed.
    """
    require("jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("trak_lite.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, file in (("style", "style.css"), ("script", "script.js")):
        made.globals[name] = Markup(made.get_template(file).render(levels=LEVELS))
    made.globals.update(digest=_digest, version=__version__)
    return made


def fragment(template: str, **values: Any) -> str:
    """Return a filled template.

    Raises:
        MissingPackageError: If Jinja2 is not installed.
    """
    return environment().get_template(template).render(values)


def write_page(
    path: str | PathLike[str], template: str, *, title: str, searchable: bool = False, **values: Any
) -> Path:
    """Write a page piece by piece and return its path; an existing file is replaced when the new one is complete.

    Args:
        path: Path of the file.
        template: Name of the template.
        title: Title and heading.
        searchable: Whether the page has the search script.
        **values: Other values of the template. Iterators are consumed while the page is written.

    Raises:
        InvalidInputError: If the path is a folder.
        MissingPackageError: If Jinja2 is not installed.
    """
    out = Path(path)
    if out.is_dir():
        raise InvalidInputError(f"{out} is a folder. Name a file in it, such as {out / 'report.html'}.")
    pieces = environment().get_template(template).generate(values, title=title, searchable=searchable)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    try:
        with unfinished.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(pieces)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def _visible(value: Any) -> Any:
    """Return a value of a template; in text, a control character becomes a printable symbol."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _CONTROLS.sub(_symbol, value.replace("\r\n", "\n").replace("\r", "\n"))


def _symbol(found: re.Match[str]) -> str:
    """Return the Unicode symbol of an ASCII control character, else the replacement character."""
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def _digest(text: str) -> str:
    """Return the source expression of an inline style or script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
