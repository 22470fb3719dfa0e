"""Keys of a config: their names, types, defaults and help texts, read from signatures and docstrings.

The type of a key is the part of an annotation that JSON values can satisfy: text, numbers, booleans, null, lists and
mappings. No value of a config can therefore name a class or a function.
"""

from __future__ import annotations

import collections.abc
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

from docstring_parser import parse as parse_docstring

from trak_lite.errors import InvalidInputError

REQUIRED: Final = inspect.Parameter.empty
"""Default of a key without a default."""
_NONE = type(None)
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
_ROLE = re.compile(r":\w+:`~?([^`]*)`")  # :meth:`score`
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Key(NamedTuple):
    """A value that a config can set."""

    name: str
    """Dotted path: ``score.method``."""
    type: Any
    """Annotation, restricted to JSON values."""
    default: Any
    """:data:`REQUIRED` if there is none."""
    help: str
    """The description in the docstring."""

    @property
    def argument(self) -> str:
        """Name of the argument."""
        return self.name.rpartition(".")[2]


def keys_of(function: Callable[..., Any], *, section: str = "", without: Collection[str] = ()) -> list[Key]:
    """Return a key for every argument of a function that JSON values can set, but for those in ``without``.

    The names begin with a section: ``score.method``. The help texts are those of a docstring in Google style.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise InvalidInputError(
            f"The annotations of {function.__name__}() cannot be read: {error}. Import what they name."
        ) from error
    documented = parse_docstring(inspect.getdoc(function) or "").params
    texts = {entry.arg_name: " ".join((entry.description or "").split()) for entry in documented}
    keys = []
    for name, parameter in signature.parameters.items():
        default = parameter.default
        plain = plain_type(type(default) if parameter.annotation is REQUIRED else parameter.annotation)
        if name in ("self", *without) or parameter.kind not in _BY_NAME or plain in (None, _NONE):
            continue
        text = _ROLE.sub(r"\1", texts.get(name, "")).replace("``", "")
        default = list(default) if isinstance(default, tuple) else default  # as JSON
        keys.append(Key(f"{section}.{name}" if section else name, plain, default, text))
    return keys


def plain_type(annotation: Any) -> Any:
    """Return the part of an annotation that JSON values can satisfy; ``None`` if there is none.

    Example:
        >>> plain_type(str | Callable[..., Any])
        <class 'str'>
        >>> plain_type(Callable[..., Any] | None) is None
        True
    """
    if annotation in (str, int, float, bool, _NONE) or get_origin(annotation) is Literal:
        return annotation
    origin, parts = get_origin(annotation), [plain_type(part) for part in get_args(annotation)]
    if origin in _LISTS and parts[0] is not None:
        return list[parts[0]]  # type: ignore[valid-type]
    if origin is collections.abc.Mapping and parts[0] is str and parts[1] is not None:
        return dict[str, parts[1]]  # type: ignore[valid-type]
    if origin in (typing.Union, types.UnionType) and set(parts) - {None, _NONE}:
        return typing.Union[tuple(part for part in parts if part is not None)]  # noqa: UP007  # known at run time only
    return None


def shown_type(kind: Any) -> str:
    """Return the type of a key in words, for messages.

    Example:
        >>> shown_type(int | Literal["auto"] | None)
        "int, 'auto' or null"
    """
    if kind is _NONE:
        return "null"
    if get_origin(kind) in (typing.Union, types.UnionType, Literal):
        as_text = repr if get_origin(kind) is Literal else shown_type
        *first, last = map(as_text, get_args(kind))
        return f"{', '.join(first)} or {last}" if first else last
    return inspect.formatannotation(kind)


def is_plain(value: Any) -> bool:
    """Whether JSON can represent a value: not dates, sets and bytes of YAML, nor NaN and infinite numbers."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
