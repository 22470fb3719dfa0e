"""Error messages shared by all stores: missing tables and name conflicts."""

from __future__ import annotations

from collections.abc import Sequence

from trak_lite._validate import some_of
from trak_lite.errors import InvalidInputError, MissingStoreError

__all__ = ["group_of_tables", "inside_a_table", "missing_table"]


def missing_table(path: str, *, where: str, tables: Sequence[str]) -> MissingStoreError:
    """Return the error for a table that does not exist."""
    return MissingStoreError(
        f"There is no table {path!r} in {where}. Tables there: {some_of(tables) or 'none'}."
    )


def inside_a_table(path: str, *, above: str) -> InvalidInputError:
    """Return the error for a path that lies inside a table."""
    return InvalidInputError(f"{above!r} is a table, so there is no table {path!r} inside it. Rename it.")


def group_of_tables(path: str, *, tables: Sequence[str]) -> InvalidInputError:
    """Return the error for a path that is a group of tables."""
    return InvalidInputError(f"{path!r} is a group of tables, not a table. Choose one of {some_of(tables)}.")
