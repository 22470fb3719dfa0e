"""Docstrings are written with the roles of reStructuredText; the site is Markdown. This turns one into the other."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_NAME = re.compile(r":(?:class|meth|func|data|attr|mod|exc):`(~?)([\w.]+)`")
_FORMULA = re.compile(r":math:`([^`]+)`")


def as_markdown(text: str) -> str:
    """Return a docstring with code for names (``~`` leaves the last part) and dollars for formulas."""
    named = _NAME.sub(lambda m: f"`{m[2].rpartition('.')[2] if m[1] else m[2]}`", text)
    return _FORMULA.sub(lambda m: f"${m[1]}$", named).replace("::\n\n    ", ":\n\n    ")


class Roles(Extension):
    """Rewrites every docstring as it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
