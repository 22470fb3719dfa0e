"""What a task is, as JSON values: for the fingerprint of a store."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput
from trak_lite.modelout_functions.callable import CallableModelOutput

__all__ = ["describe_task"]

_MAX_DEPTH = 3
"""How far functions held by functions are followed: past factories, yet with an end if one holds itself."""

_FOREIGN = frozenset({"abc", "builtins", "typing", "torch", "trak_lite"})
"""Packages whose classes are not part of a user's task."""


def describe_task(task: AbstractModelOutput) -> dict[str, Any]:
    """Return JSON values that differ whenever two tasks may give different numbers.

    A built-in is its name, version and settings. A user's class is its qualified name, the SHA-256 of its
    source (and of its own base classes) and its settings. A callable is its qualified name, the SHA-256 of
    its source, and the values it carries: defaults, closure, ``functools.partial`` arguments. Attributes of a
    user's object are not read, as they may change while it works: return them from ``settings()``.

    Args:
        task: The model output function.

    Raises:
        InvalidInputError: If ``settings()`` does not return JSON values.
    """
    settings = task.settings()
    try:
        json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{type(task).__name__}.settings() returned {settings!r}. Expected JSON values (finite numbers, "
            f"strings, lists, dicts): {error}."
        ) from error
    if isinstance(task, CallableModelOutput):
        return {"name": "callable", "version": task.version, "function": _callable(task.function)}
    if _package(type(task)) == "trak_lite":
        return {"name": task.name, "version": task.version, "settings": settings}
    return {"class": _name(type(task)), "source": _class_digest(type(task)), "settings": settings}


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _class_digest(cls: type) -> str:
    """Return the SHA-256 of the source of a class and of its bases that are the user's own."""
    digest = hashlib.sha256()
    for base in cls.__mro__:
        if _package(base) not in _FOREIGN:
            digest.update(_source(base))
    return digest.hexdigest()


def _source(thing: Any) -> bytes:
    """Return the source text of a class or function; where there is none, its bytecode and constants."""
    try:
        return inspect.getsource(thing).encode()
    except (OSError, TypeError):  # typed at a prompt, or made by exec
        return _bytecode(thing)


def _bytecode(thing: Any) -> bytes:
    """Return what a class or function compiles to."""
    if isinstance(thing, type):
        parts = [
            name.encode() + _bytecode(member)
            for name, member in sorted(vars(thing).items())
            if isinstance(member, FunctionType | staticmethod | classmethod | property)
        ]
        return b"\0".join(parts)
    if isinstance(thing, property):
        return b"\0".join(_bytecode(part) for part in (thing.fget, thing.fset) if part is not None)
    code = getattr(inspect.unwrap(getattr(thing, "__func__", thing)), "__code__", None)
    return _code(code) if isinstance(code, CodeType) else b""


def _code(code: CodeType) -> bytes:
    """Return the bytes of a code object; sets are sorted, their order changes between processes."""
    constants = [
        _code(value)
        if isinstance(value, CodeType)
        else repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode()
        for value in code.co_consts
    ]
    return b"\0".join([code.co_code, repr((code.co_names, code.co_varnames)).encode(), *constants])


def _callable(function: Callable[..., Any], depth: int = 0) -> dict[str, Any]:
    """Return name, source digest and carried values of a callable."""
    if isinstance(function, functools.partial):
        carried: dict[str, Any] = {str(i): _value(value, depth) for i, value in enumerate(function.args)}
        carried |= {key: _value(value, depth) for key, value in function.keywords.items()}
        return {"partial": _callable(function.func, depth), "values": carried}
    if isinstance(function, MethodType):
        return _callable(function.__func__, depth)
    if not isinstance(function, FunctionType):  # an object with __call__, or a function written in C
        cls = type(function) if not hasattr(function, "__qualname__") else None
        named = function if cls is None else cls
        source = hashlib.sha256(_source(named)).hexdigest() if cls is None else _class_digest(cls)
        return {"callable": _name(named), "source": source}
    closure = inspect.getclosurevars(function).nonlocals
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return {
        "callable": _name(function),
        "source": hashlib.sha256(_source(function)).hexdigest(),
        "values": {key: _value(value, depth) for key, value in sorted({**closure, **defaults}.items())},
    }


def _value(value: Any, depth: int) -> Any:
    """Return a carried value as JSON: itself, a digest, a description, or the name of its type."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else repr(value)
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": list(value.shape), "sha256": hashlib.sha256(raw).hexdigest()}
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): _value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return [_value(item, depth + 1) for item in value]
        if isinstance(value, FunctionType | MethodType | functools.partial):
            return _callable(value, depth + 1)
    return _name(type(value))
