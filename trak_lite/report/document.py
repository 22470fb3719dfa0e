"""One HTML file that needs no other: its policy forbids every request and every script but its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path

from trak_lite._version import __version__
from trak_lite.errors import InvalidInputError
from trak_lite.report._html import Html, join, tag
from trak_lite.report._look import SCRIPT, STYLE, digest_source

__all__ = ["search_field", "written"]


def written(path: str | PathLike[str], title: str, body: Iterable[Html], *, script: bool = False) -> Path:
    """Write a page, part by part, and return its path; an older one is replaced when the new one is whole.

    Args:
        path: The file.
        title: Plain text.
        body: What is in it, in order.
        script: Whether it has the search field.

    Raises:
        InvalidInputError: If the path is a folder.
    """
    out = Path(path)
    if out.is_dir():
        raise InvalidInputError(f"{out} is a folder. Name a file in it, such as {out / 'report.html'}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    try:
        with unfinished.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(_document(title, body, script))
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def search_field() -> Html:
    """Return the field that narrows the targets; it stays hidden where no script runs."""
    return tag(
        "div",
        tag("label", "Search targets", for_="query"),
        tag("input", id="query", type="search", placeholder="number, or text of a row", autocomplete="off"),
        tag("span", id="found", class_="note", role="status"),
        class_="search",
        hidden=True,
    )


def _document(title: str, body: Iterable[Html], script: bool) -> Iterator[str]:
    scripts = digest_source(SCRIPT) if script else "'none'"
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src {digest_source(STYLE)}; script-src {scripts}"
    )
    yield "<!DOCTYPE html>\n"
    yield '<html lang="en">\n<head>\n'
    yield join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="generator", content=f"trak_lite {__version__}"),
        tag("title", title),
        tag("style", STYLE),
    )
    yield '\n</head>\n<body class="trak-lite">\n<main>\n'
    yield tag("h1", title)
    for part in body:
        yield "\n" + part
    yield "\n</main>\n"
    if script:
        yield tag("script", SCRIPT)
    yield "\n</body>\n</html>\n"
