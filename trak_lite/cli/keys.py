"""Keys of a config: name, type, default and help, taken from signatures and docstrings, and of plain values only.

What a config may say is what YAML can say: text, numbers, true and false, null, lists and mappings of these. Of every
annotation only that part is kept, so no value of a config can stand for code.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, final, get_args, get_origin

from docstring_parser import parse as parse_docstring

from trak_lite.errors import InvalidInputError

__all__ = ["REQUIRED", "Key", "is_plain", "keys_of", "plain_type", "type_text"]

REQUIRED: Final = inspect.Parameter.empty
"""Default of a key that has none."""
_NONE = type(None)
_SCALARS = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    _NONE: "null",
}
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
_ROLE = re.compile(r":\w+:`~?([^`]*)`")  # :meth:`score`
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One value that a config may set."""

    name: str
    """Dotted path: ``score.method``."""
    type: Any
    """Annotation of plain values."""
    default: Any
    """:data:`REQUIRED` if there is none."""
    help: str
    """One sentence or more, from the docstring."""
    build: Callable[..., Any] | None = None
    """Makes the argument where the value is a mapping."""
    check: Callable[[Any], object] | None = None
    """Raises ``InvalidInputError`` where the value is of the right type and not allowed."""

    @property
    def argument(self) -> str:
        """Name of the argument that it is for."""
        return self.name.rpartition(".")[2]

    @property
    def nullable(self) -> bool:
        """Whether null is among its values."""
        return _NONE in (self.type, *get_args(self.type))


def keys_of(function: Callable[..., Any], *, section: str = "", without: Collection[str] = ()) -> list[Key]:
    """Return the keys of a function's arguments, as far as these have a plain form.

    Args:
        function: Its annotations give the types, its docstring the help.
        section: What stands before the names: ``score`` gives ``score.method``.
        without: Arguments that no config sets.

    Raises:
        InvalidInputError: If an annotation cannot be read.
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
        annotation = type(parameter.default) if parameter.annotation is REQUIRED else parameter.annotation
        plain = None if parameter.kind not in _BY_NAME else plain_type(annotation)
        if name in without or name == "self" or plain in (None, _NONE):
            continue
        path = f"{section}.{name}" if section else name
        text = _ROLE.sub(r"\1", texts.get(name, "")).replace("``", "")
        keys.append(Key(path, plain, parameter.default, text, _dataclass_in(annotation)))
    return keys


def plain_type(annotation: Any) -> Any:
    """Return the part of an annotation that stands for plain values; ``None`` if there is none.

    Example:
        >>> plain_type(str | Callable[..., Any])
        <class 'str'>
        >>> plain_type(Callable[..., Any] | None) is None
        True
    """
    if (isinstance(annotation, type) and annotation in _SCALARS) or get_origin(annotation) is Literal:
        return annotation
    if inspect.isabstract(annotation):
        return None
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        hints = typing.get_type_hints(annotation)
        values = [plain_type(hints[field.name]) for field in dataclasses.fields(annotation)]
        return None if None in values else dict[str, _union(values)]  # type: ignore[misc]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in _LISTS and parts:
        inner = plain_type(parts[0])
        return None if inner is None else list[inner]  # type: ignore[valid-type]
    if origin is collections.abc.Mapping and parts[0] is str:
        inner = plain_type(parts[1])
        return None if inner is None else dict[str, inner]  # type: ignore[valid-type]
    if origin in (typing.Union, types.UnionType):
        kept = [plain for part in parts if (plain := plain_type(part)) is not None]
        return _union(kept) if set(kept) - {_NONE} else None
    return None


def is_plain(value: Any) -> bool:
    """Whether a value is what JSON can say: no date, set or bytes of YAML's, and no number that is not finite."""
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return (
        value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    )


def type_text(plain: Any) -> str:
    """Return what values of a plain type are, in words.

    Example:
        >>> type_text(float | Literal["auto"])
        "a finite number or 'auto'"
    """
    origin, parts = get_origin(plain), get_args(plain)
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin is list:
        return f"a list of ({type_text(parts[0])})"
    if origin is dict:
        return f"a mapping to ({type_text(parts[1])})"
    return " or ".join(map(type_text, parts)) if parts else _SCALARS[plain]


def _union(parts: Collection[Any]) -> Any:
    return typing.Union[tuple(parts)]  # noqa: UP007  # parts are known at run time only


def _dataclass_in(annotation: Any) -> Callable[..., Any] | None:
    """Return the dataclass that a mapping in a config stands for, if the annotation names one."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and dataclasses.is_dataclass(part) and not inspect.isabstract(part):
            return _from_mapping(part)
    return None


def _from_mapping(cls: type) -> Callable[[Mapping[str, Any]], Any]:
    fields = [field.name for field in dataclasses.fields(cls)]

    def build(values: Mapping[str, Any]) -> Any:
        unknown = [name for name in values if name not in fields]
        if unknown:
            raise InvalidInputError(f"unknown keys {unknown}; expected some of {fields}")
        return cls(**values)

    return build
