"""Packages that are imported when a test uses them: every process collects all files, and runs only some of them."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Stands for a package, or a module of one, until an attribute of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
