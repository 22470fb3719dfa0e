"""The URLs of the pages: their parameters are read and checked, and written into links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlencode

from trak_lite.errors import InvalidInputError

Params = Mapping[str, str]
"""Parameters of a URL or of a form."""
WHERE: Final = "where-"
"""Prefix of the parameters that filter by a column."""
MOST_ROWS: Final = 50
_DEFAULT_ROWS: Final = 5
_TEXT_BYTES: Final = 8192
END: Final = 2**62


def text(params: Params) -> str:
    """Return the text to score, with newlines as ends of lines."""
    text = params.get("text", "").replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise InvalidInputError("The text is empty. Enter a text to score.")
    if len(text.encode()) > _TEXT_BYTES:
        raise InvalidInputError(f"The text is longer than {_TEXT_BYTES} bytes of UTF-8. Shorten it.")
    return text


def rows(params: Params) -> int:
    """Return the number of train rows to show at each end."""
    return number(params, "k", _DEFAULT_ROWS, 1, MOST_ROWS)


def number(params: Params, name: str, default: int | None, low: int, high: int) -> int:
    """Return a parameter as an integer from ``low`` to ``high``; an empty one is the default, if there is one."""
    text = params.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise InvalidInputError(f"{name} must be a whole number from {low} to {high}, got {text!r:.40}.")
    return int(text)


def first(params: Params, count: int, step: int) -> int:
    """Return the number of the first item of a page; after the last page, that of the last page."""
    return min(number(params, "from", 0, 0, END), max(0, count - 1) // step * step)


def filters(params: Params) -> dict[str, str]:
    """Return the chosen values by column; an empty value does not filter."""
    filters = {name: value for name, value in params.items() if name.startswith(WHERE) and value}
    return {name.removeprefix(WHERE): value for name, value in filters.items()}


def where(filters: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of chosen values."""
    return {f"{WHERE}{name}": value for name, value in filters.items()}


def address(path: str, params: Params) -> str:
    """Return a link to a page of this server."""
    return f"{path}?{urlencode(params)}"


def pages(path: str, state: Params, first: int, step: int, count: int) -> list[tuple[str, str]]:
    """Return the titles and addresses of the pages before and after."""
    links = []
    if first > 0:
        links.append(("Previous", address(path, {**state, "from": str(max(0, first - step))})))
    if first + step < count:
        links.append(("Next", address(path, {**state, "from": str(first + step)})))
    return links
