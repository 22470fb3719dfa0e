"""The optional packages of reports."""

from __future__ import annotations

import importlib.util

from trak_lite.errors import MissingPackageError

__all__ = ["require"]


def require(*modules: str) -> None:
    """Check that optional packages are installed, without importing them.

    Args:
        modules: ``"jinja2"``, ``"PIL"`` (Pillow) or ``"matplotlib"``.

    Raises:
        MissingPackageError: If one is not installed.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(
                f"Reports need {module}, which is not installed. Install it with pip install 'trak-lite[report]'.",
                name=module,
            )
