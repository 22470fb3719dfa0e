"""Description of a task as JSON values, for the fingerprint of a store.

A value that cannot be described raises an error, because rows of different tasks must never be confused. Nothing
depends on addresses or hashes of Python objects, which differ between processes.
"""

from __future__ import annotations

import copyreg
import functools
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from trak_lite.core.fingerprint import (
    NO_VALUE,
    SIMPLE,
    array_json,
    carried_values,
    dtype_name,
    function_digest,
    functions_of,
    is_foreign,
    name_of,
    sha256,
    source_bytes,
    tensor_json,
)
from trak_lite.core.json_text import module_name
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, CallableModelOutput

_MAX_DEPTH = 32
"""Maximum nesting depth of described objects."""
_MAX_TEXT = 1000
"""Characters of JSON above which a value is replaced by its digest, so that a manifest stays readable."""
_DEFAULTED: Final = "_use_default_values"
"""Entry of a configuration of diffusers that names its defaults, in an order that differs between processes."""
_ORIGIN: Final = ("_name_or_path", "transformers_version", "_diffusers_version")
"""Entries of a configuration that say where it comes from."""
_PLAIN = (*SIMPLE, Tensor, np.ndarray, np.generic)
"""Types of class attributes that are described besides functions."""


def describe_task(task: AbstractModelOutput, model: nn.Module | None = None) -> dict[str, Any]:
    """Return JSON values that differ whenever two tasks may give different results for train rows.

    A built-in task is described by its name, version and settings. A custom class is described by its qualified
    name, its settings, and the SHA-256 of the source and code of itself, of its custom base classes and, as far as
    possible, of the values that its methods carry. Attributes of the object are not read, because they may change
    during use: return them from ``settings()``.

    A callable is described by its qualified name, the SHA-256 of its source and code, and the values it carries:
    defaults, closure, attributes, the object of a bound method, ``functools`` arguments. Tensors and arrays are
    described by dtype, shape and bytes; containers and objects by their contents; modules (``nn.Module``) by state
    dict, simple settings, ``config`` and training mode; classes and functions by name and source, or by name only if
    they belong to Python, NumPy or torch. Global variables that a function reads are not described; their effect on
    a row is detected when stored rows are recomputed.

    The attributed model, its modules and the tensors of its state dict are described by name and shape only: their
    values change in a training, and the tables of a checkpoint name its weights. ``None`` if it is not known.

    Raises:
        InvalidInputError: If ``settings()`` does not return JSON values, or a callable carries a value that
            cannot be described (an open file, a lock); the message names the variable.
    """
    task = task.train_task()
    settings = task.settings()
    try:
        json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{type(task).__name__}.settings() returned {settings!r}. Expected JSON values (finite numbers, "
            f"strings, lists, dicts): {error}."
        ) from error
    if isinstance(task, CallableModelOutput):
        function = _Description(_Parts(model)).value(task.function, "function")
        return {"name": "callable", "version": task.version, "function": function}
    cls = type(task)
    if cls.__module__.partition(".")[0] == "trak_lite":
        return {"name": task.name, "version": task.version, "settings": settings}
    return {**_Description(_Parts(model), lenient=True).value(cls, cls.__name__), "settings": settings}


def _is_setting(value: Any) -> bool:
    """Return whether a module's attribute is a simple setting: a number, a string, an activation function."""
    if isinstance(value, tuple | list):
        return all(map(_is_setting, value))
    return isinstance(value, (*SIMPLE, FunctionType, BuiltinFunctionType))


def _ordered(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a configuration, with the names of diffusers' defaults in an order of their own."""
    return {
        key: sorted(value) if key == _DEFAULTED and isinstance(value, list) else value
        for key, value in entries.items()
    }


def _config_of(network: nn.Module) -> str | None:
    """Return a digest of the configuration of a model of transformers or diffusers; ``None`` if it has none."""
    config: Any = getattr(network, "config", None)
    if not isinstance(config, Mapping):
        config = config.to_dict() if callable(getattr(config, "to_dict", None)) else {}
    # Without where it was loaded from, and by which version.
    kept = {key: item for key, item in _ordered(config).items() if key not in _ORIGIN}
    try:
        return sha256(json.dumps(kept, sort_keys=True).encode()) if kept else None
    except (TypeError, ValueError):
        return None


@final
class _Parts:
    """The modules of the attributed model and the tensors of its state dict, of which a task may capture some."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = () if model is None else model.named_modules()
        state = {} if model is None else model.state_dict(keep_vars=True)
        self._modules = {id(module): name for name, module in modules}
        self._tensors = [
            (*_memory(value), name) for name, value in state.items() if isinstance(value, Tensor)
        ]

    def name(self, value: nn.Module | Tensor) -> str | None:
        """Return the name of a module or tensor in the model; ``None`` if it is no part of it.

        Views of a tensor, such as those that ``detach`` returns, are parts too.
        """
        if isinstance(value, nn.Module):
            return self._modules.get(id(value))
        storage, first, last = _memory(value) if self._tensors else (None, 0, 0)
        names = (
            name
            for tensor_storage, start, end, name in self._tensors
            if tensor_storage == storage and start <= first <= last <= end
        )
        return next(names, None)


def _memory(tensor: Tensor) -> tuple[object, int, int]:
    """Return a tensor's storage, and its first and last byte there; its own id if it has no plain memory."""
    if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel():
        first = int(tensor.storage_offset()) * tensor.itemsize
        span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        address = tensor.untyped_storage().data_ptr()
        if address:
            return (str(tensor.device), address), first, first + int(span) * tensor.itemsize
    return id(tensor), 0, 0


@final
@dataclass(eq=False, slots=True)
class _Description:
    """One recursive description of a task's values; ``path`` is the expression that names a value in messages."""

    _parts: _Parts
    lenient: bool = False
    """Describe a value by its type instead of raising if it cannot be described. Used for a class, whose ``settings()``
    already return the relevant values."""
    _open: list[int] = field(init=False, default_factory=list)
    _captured: str = field(init=False, default="")
    """The captured variable that is being described."""
    _classes: dict[type, dict[str, Any]] = field(init=False, default_factory=dict)

    def value(self, value: Any, path: str) -> Any:
        """Return JSON that differs whenever two values differ in content or type."""
        if value is None or type(value) in (int, str):
            return value
        if type(value) in (bool, float, complex):  # tagged: True == 1 == 1.0, and -0.0 == 0.0
            return {type(value).__name__: repr(value)}
        if part := self._part(value):
            return part
        if isinstance(value, Tensor):
            return tensor_json(value) or self._refused(value, path, "it has no plain values")
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return {"scalar": dtype_name(value.dtype), "value": str(value)}
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return array_json(value)
        if type(value) in (bytes, bytearray):
            return {type(value).__name__: sha256(bytes(value))}
        if isinstance(value, ModuleType):
            return {"module": module_name(value.__name__)}
        if id(value) in self._open:  # a reference cycle: describe it by depth, not by address
            return {"cycle": len(self._open) - self._open.index(id(value))}
        if len(self._open) >= _MAX_DEPTH:
            return self._refused(value, path, f"it is nested in more than {_MAX_DEPTH} objects")
        if len(self._open) == 1:
            self._captured = path
        self._open.append(id(value))
        try:
            described = self._holder(value, path)
        finally:
            self._open.pop()
        text = json.dumps(described)
        if len(text) <= _MAX_TEXT or not self._open:
            return described
        return {"type": name_of(type(value)), "sha256": sha256(text.encode())}

    def _refused(self, value: Any, path: str, why: str) -> dict[str, Any]:
        if self.lenient:
            return {"undescribed": name_of(type(value))}
        within = "" if path.startswith(self._captured) else f" (a part of {self._captured})"
        raise InvalidInputError(
            f"The task captures {path}{within}, a {name_of(type(value))}, which cannot be described ({why}), so its "
            "rows could not be distinguished from rows of another task. Expected numbers, strings, tensors, arrays, "
            "functions, and containers and objects of these. Derive a class from AbstractModelOutput, and return the "
            "values that f depends on from settings()."
        )

    def _holder(self, value: Any, path: str) -> Any:
        """Return the description of a value that contains other values."""
        if type(value) is list:
            return self._items(value, path)
        if type(value) is tuple:
            return {"tuple": self._items(value, path)}
        if type(value) is dict:
            return {"dict": self._entries(value, path)}
        if isinstance(value, set | frozenset):
            return self._set(value, path)
        if isinstance(value, nn.Module):
            return self._network(value, path)
        if isinstance(value, AbstractModelOutput):
            return self._task(value, path)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, FunctionType):
            return self._function(value, path)
        if isinstance(value, functools.partial):
            described = {
                "partial": self.value(value.func, path),
                "args": self._items(value.args, f"{path}.args"),
                "keywords": {key: self.value(item, key) for key, item in sorted(value.keywords.items())},
            }
            return {**described, **self._extra(value, path)}
        if isinstance(value, functools._lru_cache_wrapper):
            return {"cached": self.value(value.__wrapped__, path)}
        if isinstance(value, MethodType):
            owner = self.value(value.__self__, f"{path}.__self__")
            return {"method": self.value(value.__func__, path), "self": owner}
        if isinstance(value, BuiltinFunctionType):
            held = value.__self__
            if held is None or isinstance(held, ModuleType | type):
                return {"callable": name_of(value), "self": self.value(held, path)}
            return {"method": value.__name__, "self": self.value(held, f"{path}.__self__")}
        return self._object(value, path)

    def _part(self, part: Any) -> dict[str, Any] | None:
        """Return name and shapes of the attributed model, or of a part of it; ``None`` for other values."""
        name = self._parts.name(part) if isinstance(part, nn.Module | Tensor) else None
        if name is None:
            return None
        if isinstance(part, Tensor):
            layout = [list(part.shape), list(part.stride()), part.storage_offset()]
            return {"of_model": name, "dtype": str(part.dtype), "place": layout}
        shapes = {
            key: list(value.shape) for key, value in part.state_dict().items() if isinstance(value, Tensor)
        }
        return {"of_model": name, "shapes": sha256(json.dumps(shapes).encode())}

    def _items(self, items: Iterable[Any], path: str) -> list[Any]:
        return [self.value(item, f"{path}[{index}]") for index, item in enumerate(items)]

    def _entries(self, entries: Mapping[Any, Any], path: str) -> list[Any]:
        """Return the entries in dict order, because results may depend on it."""
        return [
            [self.value(key, f"a key of {path}"), self.value(item, f"{path}[{key!r}]")]
            for key, item in entries.items()
        ]

    def _attributes(self, attributes: Mapping[Any, Any], path: str) -> dict[str, Any]:
        return {str(key): self.value(item, f"{path}.{key}") for key, item in sorted(attributes.items())}

    def _set(self, members: set[Any] | frozenset[Any], path: str) -> dict[str, Any]:
        """Return the members sorted, because their order differs between processes."""
        described = [self.value(member, f"a member of {path}") for member in members]
        attributes = self._attributes(getattr(members, "__dict__", {}), path)
        return {
            "set": name_of(type(members)),
            "members": sorted(described, key=json.dumps),
            "attributes": attributes,
        }

    def _network(self, network: nn.Module, path: str) -> dict[str, Any]:
        """Return the classes, tensors, simple settings and configuration of a module and its submodules."""
        tensors = {**dict(network.named_buffers(remove_duplicate=False)), **network.state_dict()}
        kinds = list(dict.fromkeys(type(part) for part in network.modules()))
        before = self.lenient
        self.lenient = True  # decorators of transformers wrap methods in generators
        try:
            classes = self._items(kinds, path)
        finally:
            self.lenient = before
        config = _config_of(network)
        settings = {
            name: {key: item for key, item in vars(part).items() if key[0] != "_" and _is_setting(item)}
            for name, part in network.named_modules()
            if self._parts.name(part) is None
        }
        return {
            "network": classes,
            "state": sha256(json.dumps(self._attributes(tensors, path)).encode()),
            "settings": [[name, self._attributes(some, path)] for name, some in settings.items()],
            **({} if config is None else {"config": self.value(config, f"{path}.config")}),
        }

    def _task(self, task: AbstractModelOutput, path: str) -> dict[str, Any]:
        """Return the description of a nested task: its function, or its class and settings."""
        if isinstance(task, CallableModelOutput):
            return {"task": self.value(task.function, path)}
        cls, settings = self.value(type(task), path), self.value(task.settings(), f"{path}.settings()")
        return {"task": cls, "version": task.version, "settings": settings}

    def _class(self, cls: type) -> dict[str, Any]:
        """Return the name and, for a custom class, the digest of its definition and its bases'."""
        if is_foreign(cls):
            return {"class": name_of(cls)}
        if cls not in self._classes:  # reading source is slow, and thousands of objects may share a class
            self._classes[cls] = {"class": name_of(cls), "source": sha256(self._definition(cls))}
        return self._classes[cls]

    def _definition(self, cls: type) -> bytes:
        """Return source, functions and plain attributes of a class and its bases."""
        parts: list[Any] = []
        for base in cls.__mro__:
            if is_foreign(base):
                parts.append(name_of(base))
                continue
            parts.append(sha256(source_bytes(base)))
            for name, member in sorted(vars(base).items()):
                path = f"{base.__name__}.{name}"
                parts.extend([path, self.value(function, path)] for function in functions_of(member))
                if isinstance(member, _PLAIN) and not name.startswith("__"):
                    parts.append([path, self.value(member, path)])
        return json.dumps(parts).encode()

    def _function(self, function: FunctionType, path: str) -> dict[str, Any]:
        """Return name, digest of source and code, and carried values of a function."""
        if is_foreign(function):
            return {"callable": name_of(function)}
        values: dict[str, Any] = {}
        for name, held in carried_values(function).items():
            if held is NO_VALUE:
                values[name] = {"cell": "empty"}
            elif name == "__class__":  # of super(): the enclosing class, which is being described already
                values[name] = {"class": name_of(held)}
            else:
                values[name] = self.value(held, name)
        described = {
            "callable": name_of(function),
            "source": function_digest(function),
            "values": dict(sorted(values.items())),
        }
        return {**described, **self._extra(function, path)}

    def _extra(self, function: Any, path: str) -> dict[str, Any]:
        attributes = vars(function)
        return {"attributes": self._attributes(attributes, path)} if attributes else {}

    def _object(self, value: Any, path: str) -> dict[str, Any]:
        """Return what would reconstruct an object: its class, arguments, attributes and items.

        These come from the pickle protocol, which rejects objects that they do not determine (a lock, an open file);
        nothing is pickled.
        """
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            made = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except (TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            return self._refused(value, path, str(error))
        cls = self.value(type(value), path)
        if isinstance(made, str):  # a name in its module
            return {"object": cls, "global": made}
        parts: list[Any] = [*made, None, None, None]
        make, arguments, state, items, entries = parts[:5]
        if type(value).__module__ == "diffusers.configuration_utils":
            state = _ordered(state) if isinstance(state, dict) else state
            entries = _ordered(dict(entries or ())).items()
        return {
            "object": cls,
            "made": self._items((make, *arguments), path),
            "state": self._state(state, path),
            "items": self._items(items or (), path),
            "entries": self._entries(dict(entries or ()), path),
        }

    def _state(self, state: Any, path: str) -> Any:
        """Return the attributes of an object; with slots the state is a pair of dicts, either of which may be None."""
        if isinstance(state, dict):
            return self._attributes(state, path)
        if isinstance(state, tuple) and all(isinstance(part, dict | None) for part in state):
            return [self._attributes(part or {}, path) for part in state]
        return self.value(state, path)
