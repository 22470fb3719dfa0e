"""Tables that notebooks show, as HTML in the colours of the notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from trak_lite.errors import printable

_ROWS: Final = 10
_SETTINGS: Final = 20
_LONGEST: Final = 300
"""Largest number of characters of a text."""


def notebook_table(
    title: str,
    columns: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    *,
    notes: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Return a title, a table of at most 10 rows, notes and the first settings as HTML; long texts are cut."""
    lines = [_line(row) for row in rows[:_ROWS]]
    head = f"<thead>{_line(columns, 'th')}</thead>"
    table = f"<table>{head}<tbody>{''.join(lines)}</tbody></table>" if lines else ""
    more = [f"{len(rows) - _ROWS:,} more"] if len(rows) > _ROWS else []
    texts = "".join(f"<p>{_escaped(text)}</p>" for text in (*more, *notes))
    pairs = [(name, value) for name, value in (settings or {}).items() if value is not None][:_SETTINGS]
    named = (f"<tr><th>{_escaped(name)}</th><td>{_escaped(str(value))}</td></tr>" for name, value in pairs)
    listed = f"<table><tbody>{''.join(named)}</tbody></table>" if pairs else ""
    return f"<div><p><strong>{_escaped(title)}</strong></p>{table}{texts}{listed}</div>"


def _line(values: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{_escaped(value)}</{tag}>' for value in values)}</tr>"


def _escaped(text: str) -> str:
    return escape(printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."))
