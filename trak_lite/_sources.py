"""What a user's function is, by its source: for recognising the training that made a result."""

from __future__ import annotations

import dataclasses
import functools
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor

from trak_lite.modelout_functions._describe import is_foreign
from trak_lite.modelout_functions._digests import array_json, code_bytes, sha256, source_bytes, tensor_json

__all__ = ["describe_source"]

_SIMPLE = (type(None), bool, int, float, str)


def describe_source(function: Any) -> Any:
    """Return JSON values that differ where two functions have other source, settings or data.

    Followed are closures, defaults, ``functools.partial``, bound methods, frozen dataclasses and tuples; numbers and
    strings in them count by value, tensors and arrays by content, functions and classes of torch, NumPy and Python by
    name. Whatever may change while a training runs (lists, dicts, modules, other objects) counts by its class only,
    and global variables are not followed.

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
    if id(value) in seen:  # a function that calls itself
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
        # The code too: two lambdas of one line have the same source text.
        "source": sha256(source_bytes(code) + b"\0" + code_bytes(code)),
        "values": [_describe(item, seen) for item in carried],
    }


def _object(value: Any, seen: set[int]) -> dict[str, Any]:
    """Return the class of an object, and what a frozen dataclass holds."""
    cls: Any = type(value)
    described = {"object": _describe(cls, seen)}
    parameters: Any = getattr(cls, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        described["fields"] = {
            field.name: _describe(getattr(value, field.name), seen) for field in dataclasses.fields(value)
        }
    return described


def _name(thing: Any) -> str:
    """Return the qualified name; things written in C may have no module."""
    return f"{getattr(thing, '__module__', None) or 'builtins'}.{thing.__qualname__}"
