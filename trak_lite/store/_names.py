"""Validation and ordering of table and column names."""

from __future__ import annotations

import re

from trak_lite.errors import InvalidInputError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_RESERVED = "zarr.json"
_LONGEST_PATH = 200  # the joined path is also a file name; file systems allow 255 bytes


def check_name(name: object, *, what: str) -> str:
    """Return the name if it is safe as a folder name on every file system; raise otherwise."""
    if isinstance(name, str) and is_name(name):
        return name
    raise InvalidInputError(
        f"{name!r} cannot be a {what} name. Expected 1 to 64 of the characters A-Z a-z 0-9 . _ -, "
        f"no leading dot, no '..' and not {_RESERVED!r}. Rename it."
    )


def is_name(name: str) -> bool:
    """Return whether a name is safe as a folder name."""
    return bool(_NAME.fullmatch(name)) and ".." not in name and name.lower() != _RESERVED


def path_parts(path: object, *, what: str) -> tuple[str, ...]:
    """Return the checked names of a ``/``-separated path."""
    if not isinstance(path, str):
        raise InvalidInputError(f"A {what} path must be a string such as 'ckpt-0', got {path!r}.")
    if len(path) > _LONGEST_PATH:
        raise InvalidInputError(
            f"{path[:40]!r}... cannot be a {what} path: it has {len(path)} characters, expected at most "
            f"{_LONGEST_PATH}. Shorten it."
        )
    return tuple(check_name(part, what=what) for part in path.split("/"))


def natural_order(path: str) -> tuple[object, ...]:
    """Return a sort key that puts ``ckpt-2`` before ``ckpt-10``."""
    parts = tuple(
        tuple(int(token) if token.isdigit() else token for token in re.split(r"([0-9]+)", part))
        for part in path.split("/")
    )
    return parts, path
