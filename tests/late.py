"""Packages that are imported when a test uses them: every process collects all files, and runs only some of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Late:
    """Stands for a package, or a module of one, until an attribute of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for wrapped or mocked fixtures in all that a file names
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def script(path: Path) -> ModuleType:
    """Import a script of a folder that is no package, under a name that nothing else has."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
