"""Markup by construction: every string is escaped on its way into a page, unless it is markup already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final, TypeAlias, final

__all__ = ["Child", "Html", "cut", "join", "tag"]

_VOID: Final = {"img", "input", "meta"}
# C0 and C1 controls but tab and newline, which <pre> shows; lone surrogates, which UTF-8 cannot hold.
_CONTROLS: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


@final
class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"


def escaped(text: str) -> Html:
    """Return a string as markup: special characters escaped, characters that cannot be shown made visible.

    Example:
        >>> escaped('<script>"&' + chr(0))
        '&lt;script&gt;&quot;&amp;\u2400'
    """
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    return Html(html.escape(_CONTROLS.sub(_visible, plain), quote=True))


def join(*children: Child) -> Html:
    """Return children one after the other; strings that are no markup are escaped, ``None`` is left out."""
    return Html("".join(_markup(child) for child in children))


def tag(name: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Return an element.

    Args:
        name: Such as ``"p"``; never text of a user's.
        *children: What is inside.
        **attributes: ``class_`` stands for ``class``, ``data_target`` for ``data-target``; ``None`` and ``False`` are
            left out, ``True`` stands alone.

    Example:
        >>> tag("p", "a < b", tag("b", "!"), class_="note", hidden=True)
        '<p class="note" hidden>a &lt; b<b>!</b></p>'
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(*children)}</{name}>")


def cut(text: str, limit: int) -> str:
    """Return text of at most ``limit`` characters, and how many there were if some were left out.

    Example:
        >>> cut("abcdef", 3)
        'abc … (6 characters in all)'
    """
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters in all)"


def _markup(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    return escaped(child) if isinstance(child, str) else join(*child)


def _attribute(key: str, value: str | float | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'


def _visible(found: re.Match[str]) -> str:
    """Return the picture of an ASCII control, or the replacement character."""
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"
