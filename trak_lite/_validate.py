"""Checks that are worth a name: each raises :class:`InvalidInputError` with what was seen and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable

from trak_lite.errors import InvalidInputError, UnknownNameError

__all__ = ["known_names", "one_of", "positive_int", "real_at_least"]


def positive_int(**named: object) -> int:
    """Return the one keyword value if it is an integer of at least 1.

    Example:
        >>> positive_int(proj_dim=512)
        512
        >>> positive_int(proj_dim=0)
        Traceback (most recent call last):
        ...
        trak_lite.errors.InvalidInputError: proj_dim must be an integer of at least 1, got 0.
    """
    ((name, value),) = named.items()
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(f"{name} must be an integer of at least 1, got {value!r}.")
    return value


def real_at_least(minimum: float, **named: object) -> float:
    """Return the one keyword value as a finite float of at least ``minimum``."""
    ((name, value),) = named.items()
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < minimum
    ):
        raise InvalidInputError(f"{name} must be a finite number of at least {minimum:g}, got {value!r}.")
    return float(value)


def one_of(allowed: Collection[str], **named: object) -> str:
    """Return the one keyword value if it is among the allowed strings; the message names the nearest one."""
    ((name, value),) = named.items()
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(str(value), list(allowed), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"{name} must be one of {sorted(allowed)}, got {value!r}.{hint}")


def known_names(given: Iterable[str], allowed: Collection[str], *, what: str) -> list[str]:
    """Return the given names as a list if all are allowed; the message names unknown ones and the nearest known."""
    names = [given] if isinstance(given, str) else list(given)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        near = [
            match for name in unknown for match in difflib.get_close_matches(str(name), list(allowed), n=1)
        ]
        hint = (
            f" Nearest known: {near}."
            if near
            else f" Known: {list(allowed)[:10]}{' ...' if len(allowed) > 10 else ''}."
        )
        raise UnknownNameError(f"Unknown {what}: {unknown}.{hint}")
    return names
