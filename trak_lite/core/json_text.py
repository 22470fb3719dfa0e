"""JSON text: its canonical form, the digest of values in it, names of modules in it, and a parser with limits."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from numpy.typing import NDArray

_SHOWN = 200
"""Characters of a value that is shown whole."""
_MOST_VALUES_SHOWN, _MOST_KEYS_SHOWN = 8, 32
"""Values of a list and keys of a dict that are shown one by one; of more, the first two are shown."""
_DEEPEST = 128
_MOST_BYTES = 64 << 20
_MOST_VALUES = 1 << 21
_STRUCTURE = (b"[", b"{", b",", b":")
_RECIPE: Final = re.compile(r"trak_lite_recipe_[0-9a-f]{16}_")
"""Begins the name of a recipe's module (``trak_lite/cli/recipes.py``), which changes with every byte of the file."""


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical text of JSON values, in hex."""
    return hashlib.sha256(canonical_json(dict(values)).encode("utf-8", "surrogatepass")).hexdigest()


def module_name(module: str) -> str:
    """Return the name of a module, as stored; that of a recipe is the name that ``import`` gives to its file."""
    return _RECIPE.sub("", module, count=1)


def shown(value: Any) -> str:
    """Return a value as text; of a long text, list or dict the start, its size and a digest.

    Example:
        >>> shown({"a": tuple(range(1000))})
        "{'a': [0, 1, ... 1000 values, digest 3e726f1b]}"
    """
    text = repr(value) if isinstance(value, str) else str(value)
    if len(text) <= _SHOWN or not isinstance(value, str | list | tuple | dict):
        return text
    try:
        whole = json.dumps(value, default=str)  # equal for a tuple and for its list, which a store returns
    except (TypeError, ValueError):  # a key that is no key of JSON
        whole = text
    digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
    if isinstance(value, str):
        return f"{value[:_SHOWN]!r}... {len(value)} characters, digest {digest}"
    is_dict = isinstance(value, dict)
    count = len(value) if len(value) <= (_MOST_KEYS_SHOWN if is_dict else _MOST_VALUES_SHOWN) else 2
    entries = [
        f"{shown(key)}: {shown(value[key])}" if is_dict else shown(key) for key in islice(value, count)
    ]
    if count < len(value):
        entries.append(f"... {len(value)} values, digest {digest}")
    return f"{{{', '.join(entries)}}}" if is_dict else f"[{', '.join(entries)}]"


def parse_json(text: bytes | NDArray[Any], *, finite: bool = True) -> Any:
    """Parse a JSON text after checking its size; all JSON read from stores goes through this function.

    Two million values suffice for a manifest of 100,000 modules. An empty list takes 2 bytes of text but 80 bytes of
    memory, so the limit on values, not on bytes, bounds the cost: about 400 MB and one second.

    Raises:
        ValueError: If the text is not JSON in UTF-8, is longer than 64 MiB, has more than 2,097,152 values, is nested
            more than 128 levels deep, or, with ``finite``, has NaN or an infinite number, which Python writes although
            they are not JSON.
    """
    size = len(text) if isinstance(text, bytes) else text.nbytes
    if size > _MOST_BYTES:
        raise ValueError(f"{size} bytes, expected at most {_MOST_BYTES}")
    plain = text if isinstance(text, bytes) else text.tobytes()
    values = sum(map(plain.count, _STRUCTURE))  # an upper bound: characters inside strings count too
    if values > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values")
    try:
        number = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
        value = json.loads(plain, **number)  # type: ignore[arg-type]
    except RecursionError as error:
        raise ValueError(f"nested more than {_DEEPEST} levels deep") from error
    if plain.count(b"[") + plain.count(b"{") > _DEEPEST:  # fewer brackets cannot be nested deeper
        check_depth(value)
    return value


def check_depth(value: Any, *, deepest: int = _DEEPEST) -> None:
    """Raise ValueError if a JSON value is nested so deeply that functions could exceed the recursion limit."""
    level = [value]
    for _ in range(deepest + 1):
        nested = (item for item in level if isinstance(item, dict | list))
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise ValueError(f"nested more than {deepest} levels deep")


def _finite(text: str) -> float:
    """Return a finite number of a JSON text; Python's parser also accepts NaN and infinities."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
