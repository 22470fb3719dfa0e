"""Argument checks, which raise :class:`InvalidInputError`."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.errors import InvalidInputError, MissingPackageError, TrakLiteError, UnknownNameError


def positive_int(**named: object) -> int:
    """Return the one keyword value if it is an integer of at least 1, of any type, as a Python integer."""
    return integer_at_least(1, **named)


def integer_at_least(minimum: int, **named: object) -> int:
    """Return the one keyword value if it is an integer of at least ``minimum``, of any type, as a Python integer."""
    ((name, value),) = named.items()
    if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
            if number >= minimum:
                return number
    raise InvalidInputError(f"{name} must be an integer of at least {minimum}, got {value!r}.")


def real_at_least(minimum: float, **named: object) -> float:
    """Return the one keyword value as a finite float of at least ``minimum``."""
    ((name, value),) = named.items()
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < math.inf:
        raise InvalidInputError(f"{name} must be a finite number of at least {minimum:g}, got {value!r}.")
    return float(value)


def positive_real(
    message: str = "{name} must be a finite number above 0, got {value!r}.", **named: object
) -> float:
    """Return the one keyword value as a finite float above 0; ``message`` is that for 0."""
    ((name, value),) = named.items()
    number = real_at_least(0.0, **named)
    if number == 0.0:
        raise InvalidInputError(message.format(name=name, value=value))
    return number


def integer(**named: object) -> int:
    """Return the one keyword value if it is an integer of any size, sign and type, as a Python integer."""
    ((name, value),) = named.items()
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type]
    raise InvalidInputError(f"{name} must be an integer, got {value!r}.")


def flag(**named: object) -> bool:
    """Return the one keyword value if it is a boolean, of Python or NumPy, as one of Python."""
    ((name, value),) = named.items()
    if not isinstance(value, bool | np.bool_):
        raise InvalidInputError(f"{name} must be True or False, got {value!r:.100}.")
    return bool(value)


def require_function(**named: object) -> None:
    """Raise :class:`InvalidInputError` if the one keyword value is neither ``None`` nor can be called."""
    ((name, value),) = named.items()
    if value is not None and not callable(value):
        raise InvalidInputError(f"{name} must be a function, got {value!r:.100}.")


def optional(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a check of one keyword value that accepts ``None``, too."""
    return lambda **named: None if next(iter(named.values())) is None else check(**named)


def one_of(allowed: Collection[str], **named: object) -> str:
    """Return the one keyword value if it is among the allowed strings; else the message names the nearest one."""
    ((name, value),) = named.items()
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(str(value), list(allowed), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"{name} must be one of {sorted(allowed)}, got {value!r}.{hint}")


def known_names(argument: Iterable[str], allowed: Collection[str], *, what: str) -> list[str]:
    """Return the names as a list if all are allowed; else the message lists the unknown and the nearest known names."""
    names = [argument] if isinstance(argument, str) else list(argument)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        choices = list(allowed)
        near = [match for name in unknown for match in difflib.get_close_matches(str(name), choices, n=1)]
        hint = (
            f"Nearest known: {list(dict.fromkeys(near))}"
            if near
            else f"Known: {choices[:10]}{' ...' if choices[10:] else ''}"
        )
        raise UnknownNameError(f"Unknown {what}: [{some_of(map(repr, unknown))}]. {hint}.")
    return names


def installing(extra: str) -> str:
    """Return how to install the packages of an extra, as the end of a message."""
    return f"Install it with pip install 'trak-lite[{extra}]' (in a checkout: pip install -e '.[{extra}]')."


def require_packages(*modules: str, extra: str) -> None:
    """Raise :class:`MissingPackageError` if an optional package is not installed; none is imported."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(
                f"This needs {module}, which is not installed. {installing(extra)}", name=module
            )


def some_of(items: Iterable[Any]) -> str:
    """Return items as a list for a message: the first 10 as text, and the number of the others.

    Example:
        >>> some_of(range(12))
        '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more'
    """
    listed = list(items)
    return ", ".join(map(str, listed[:10])) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise :class:`InvalidInputError` if a file that the user named cannot be written."""
    try:
        yield
    except TrakLiteError:  # some are an OSError as well
        raise
    except OSError as error:
        raise InvalidInputError(
            f"{out} cannot be written: {error.strerror or error}. Name a file in a folder that can be written."
        ) from error


def target_number(target: Any, count: int, name: str) -> int:
    """Return a target's number; negative numbers count from the end."""
    if isinstance(target, bool) or not isinstance(target, int | np.integer) or not -count <= target < count:
        raise InvalidInputError(f"There is no target {target}: {name!r} has targets 0 to {count - 1}.")
    return int(target) % count


def row_numbers(count: int, what: str, **named: ArrayLike) -> NDArray[np.int64]:
    """Return the one keyword value as an array if it is a list of numbers below ``count`` of rows of ``what``."""
    ((name, value),) = named.items()
    numbers = np.asarray(value)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise InvalidInputError(
            f"{name} must be a list of integers, got {numbers.dtype} of shape {numbers.shape}. Pass row numbers, such "
            "as the indices of a Selection."
        )
    outside = numbers[(numbers < 0) | (numbers >= count)]
    if outside.size:
        raise InvalidInputError(
            f"{name} of {what} must lie between 0 and {count - 1}, got {outside[:5].tolist()}."
        )
    return numbers.astype(np.int64)
