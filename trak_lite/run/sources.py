"""Describes functions by source and values, to recognise the training that computed a result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from trak_lite.modelout_functions._describe import FOREIGN, is_foreign
from trak_lite.modelout_functions._digests import array_json, code_bytes, sha256, source_bytes, tensor_json

__all__ = ["carried_values", "describe_source"]

_SIMPLE = (type(None), bool, int, float, str)


@runtime_checkable
class _Identified(Protocol):
    """An object of trak_lite that holds functions or data of the user, such as a recipe or rows of a dataset."""

    def identity(self) -> dict[str, Any]:
        """Return JSON values that differ for objects with different results."""


def describe_source(function: Any) -> Any:
    """Return JSON values that differ for functions with different source, settings or data.

    The description includes closures, defaults, ``functools.partial``, bound methods, frozen dataclasses, tuples,
    and recipes and rows of trak_lite.
    Numbers and strings are described by value, tensors and arrays by content, functions and classes of torch, NumPy
    and Python by name. Objects that may change during a training (lists, dicts, modules, other objects) are described
    by class only, and global variables are left out; :func:`carried_values` returns their digests.

    Example:
        >>> from functools import partial
        >>> describe_source(partial(print, "a")) == describe_source(partial(print, "b"))
        False
    """
    return _describe(function, set())


def _describe(value: Any, seen: set[int]) -> Any:
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, Tensor):
        return tensor_json(value) or {"object": _name(type(value))}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return array_json(value)
    if id(value) in seen:  # a recursive function
        return {"again": _name(value if isinstance(value, FunctionType | type) else type(value))}
    seen = {*seen, id(value)}
    if isinstance(value, tuple):
        return [_describe(item, seen) for item in value]
    if isinstance(value, functools.partial):
        keywords = {key: _describe(item, seen) for key, item in sorted(value.keywords.items())}
        return {
            "partial": _describe(value.func, seen),
            "args": _describe(value.args, seen),
            "keywords": keywords,
        }
    if isinstance(value, MethodType):
        return {"method": _describe(value.__func__, seen), "self": _describe(value.__self__, seen)}
    if isinstance(value, BuiltinFunctionType) or (
        isinstance(value, FunctionType | type) and is_foreign(value)
    ):
        return {"name": _name(value)}
    if isinstance(value, FunctionType):
        return _function(value, seen)
    if isinstance(value, type):
        return {"class": _name(value), "source": sha256(source_bytes(value))}
    return _object(value, seen)


def _function(function: FunctionType, seen: set[int]) -> dict[str, Any]:
    """Return name, source and carried values of a function."""
    code = function.__code__
    carried = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            carried.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            carried.append("empty")
    return {
        "function": _name(function),
        # Add the code: two lambdas on one line have the same source text.
        "source": sha256(source_bytes(code) + b"\0" + code_bytes(code)),
        "values": [_describe(item, seen) for item in carried],
    }


def _object(value: Any, seen: set[int]) -> dict[str, Any]:
    """Return the class of an object, and the fields of a frozen dataclass or the identity of an object of trak_lite."""
    cls: Any = type(value)
    described = {"object": _describe(cls, seen)}
    if isinstance(value, _Identified) and is_foreign(cls):
        return {**described, "identity": value.identity()}
    parameters: Any = getattr(cls, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        described["fields"] = {
            field.name: _describe(getattr(value, field.name), seen) for field in dataclasses.fields(value)
        }
    return described


def _name(thing: Any) -> str:
    """Return the qualified name; objects written in C may have no module."""
    return f"{getattr(thing, '__module__', None) or 'builtins'}.{thing.__qualname__}"


_DEEPEST = 8
"""Largest depth of nested objects."""
_MOST_VALUES = 1024
"""Largest number of values of a container or object with separate digests; more values share one digest."""
_MOST_IN_ALL = 1024
"""Largest number of digests in all."""


def carried_values(*functions: Any) -> dict[str, str]:
    """Return a digest of every value that functions capture, by path, with those that :func:`describe_source` omits.

    The walk includes closures, defaults, ``functools.partial``, bound methods, attributes of objects, containers,
    datasets, modules (``nn.Module``), and global variables named by a function or by a function that it calls. Some of
    these values may change during a training: compare the digests before and after.

    Example:
        >>> from functools import partial
        >>> list(carried_values(partial(print, {"lr": 0.1})))
        ['0.func#', '0.args#', '0.args[0]#', '0.args[0].lr', '0.keywords#']
    """
    walk = _Walk()
    for number, function in enumerate(functions):
        walk.visit(function, str(number), 0)
    return walk.found


class _Walk:
    """One walk through the values that functions capture."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._seen: dict[int, tuple[str, Any]] = {}  # keeps the object alive, so its id stays unique

    def visit(self, value: Any, path: str, depth: int) -> None:
        """Record the digest of a value, or of the values inside it."""
        plain = _plain_json(value)
        if plain is not None:
            self._note(path, json.dumps(plain))
            return
        if id(value) in self._seen:
            self._note(path, f"the same as {self._seen[id(value)][0]}")
            return
        if depth > _DEEPEST:
            return
        self._seen[id(value)] = path, value
        inside = list(_inside(value))
        if not isinstance(value, FunctionType | MethodType | functools.partial):
            self._note(f"{path}#", str(len(inside)))
        if len(inside) > _MOST_VALUES:
            self._note(path, _text(inside))
            return
        for name, item in inside:
            self.visit(item, f"{path}{name}", depth + 1)

    def _note(self, path: str, text: str) -> None:
        if len(self.found) >= _MOST_IN_ALL:
            path, text = "the others", f"{self.found.get('the others')} {path} {text}"
        self.found[path] = sha256(text.encode())[:16]


def _text(inside: list[tuple[str, Any]]) -> str:
    """Return a text that determines many values, including the contents of lists and mappings among them."""
    try:
        return json.dumps(inside, default=lambda item: _plain_json(item) or _name(type(item)))
    except (TypeError, ValueError):  # keys that are no strings, or a list that contains itself
        return json.dumps([[name, _plain_json(item) or _name(type(item))] for name, item in inside])


def _plain_json(value: Any) -> Any:
    """Return JSON values for a number, a string, a tensor or an array; ``None`` for other objects."""
    if isinstance(value, (*_SIMPLE, complex, bytes)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, Tensor):
        return tensor_json(value) or ["object", _name(type(value))]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return array_json(np.asarray(value))
    return None


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values inside a value, each with the suffix of its path."""
    if isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, MethodType):
        yield ".__func__", value.__func__
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        if not is_foreign(value):
            yield from _inside_function(value)
    elif isinstance(value, type):
        if not is_foreign(value):
            yield from ((f".{name}", item) for name, item in vars(value).items() if _is_member(name, item))
    elif isinstance(value, Mapping):
        yield from (
            (f".{key}" if isinstance(key, str) else f"[{key!r}]", item) for key, item in value.items()
        )
    elif isinstance(value, list | tuple | np.ndarray):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield "{}", repr(sorted(map(repr, value)))
    elif not isinstance(value, ModuleType | BuiltinFunctionType):
        yield from _inside_object(value)


def _inside_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    yield ".source", sha256(source_bytes(function.__code__) + b"\0" + code_bytes(function.__code__))
    yield ".__defaults__", function.__defaults__ or ()
    yield ".__kwdefaults__", function.__kwdefaults__ or {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield f".{name}", cell.cell_contents
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield ".__wrapped__", wrapped
    names = sorted(_names_in(function.__code__))
    for name in names:
        item = function.__globals__.get(name)
        if isinstance(item, ModuleType):  # a module of the user: only attributes that the code names
            if item.__name__.partition(".")[0] not in FOREIGN:
                attributes = {key: vars(item)[key] for key in names if key in vars(item)}
                yield f".{name}", attributes
        elif name in function.__globals__:
            yield f".{name}", item


def _names_in(code: CodeType) -> set[str]:
    """Return the global names and attributes in the code of a function and of its inner functions."""
    inner = (item for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_member(name: str, item: Any) -> bool:
    return not name.startswith("__") or name in ("__init__", "__call__", "__getitem__")


def _inside_object(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the class and attributes of an object; for foreign classes, only of datasets, modules and dataclasses."""
    known = isinstance(value, Dataset | nn.Module)
    if is_foreign(type(value)) and not known:
        if dataclasses.is_dataclass(value):  # a recipe of trak_lite holds functions of the user
            yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
        return
    yield ".__class__", type(value)
    held = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                held[name] = getattr(value, name)
    yield from ((f".{name}", item) for name, item in held.items() if name not in ("__dict__", "__weakref__"))
