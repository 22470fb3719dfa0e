"""Converts the reStructuredText roles of docstrings into Markdown for the site."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_NAME = re.compile(r":(?:class|meth|func|data|attr|mod|exc):`(~?)([\w.]+)`")
_FORMULA = re.compile(r":math:`([^`]+)`")


def as_markdown(text: str) -> str:
    """Return a docstring in Markdown: names as code (``~`` keeps only the last part), formulas between dollars."""
    named = _NAME.sub(lambda m: f"`{m[2].rpartition('.')[2] if m[1] else m[2]}`", text)
    return _FORMULA.sub(lambda m: f"${m[1]}$", named).replace("::\n\n    ", ":\n\n    ")


class Roles(Extension):
    """Converts every docstring when it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Convert the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
