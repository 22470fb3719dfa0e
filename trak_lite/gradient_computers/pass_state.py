"""What a pass depends on beside its batch: compared before every replay, and before and after a recorded pass."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import itertools
import logging
import random
import sysconfig
import types
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from trak_lite.core.fingerprint import functions_of
from trak_lite.gradient_computers.outside import (
    ABSENT,
    MOST_READ,
    NUMBERS,
    Outside,
    globals_in,
    is_of_users,
    names_in,
    package_of,
    read_from,
)
from trak_lite.gradient_computers.tape import is_plain
from trak_lite.modelout_functions import AbstractModelOutput

_MOST_DESCRIBED: Final = 1 << 14
"""Entries of a list or a dict that are compared by value; larger ones are compared by identity and length."""
_DEPTH: Final = 8
_LEVELS: Final = 7
"""Levels of dicts and lists in an attribute of a module whose contents are compared before every replay, from 0 on.

An object or a function is two levels: what it refers to may be all of a training.
"""
_MOST_HELD: Final = 1 << 9
"""Entries of a dict or a list that are compared before every replay, by identity; of larger ones, their number."""
_MOST_ENTRIES: Final = 1 << 13
"""Of all containers and objects in the attributes of a model that is replayed."""
_MOST_ARRAY_BYTES: Final = 1 << 18
"""Of all arrays in the attributes of a model that is replayed: a checksum is computed before every replay."""
_ATOMS = (*NUMBERS, str, bytes, type(None), type, types.ModuleType)
_ATOM_TYPES: Final = frozenset(_ATOMS)
_METHODS = types.MethodType, types.BuiltinMethodType, types.MethodWrapperType  # also built-in functions
_INSTALLED: Final = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_READ_AS_THEY_ARE: Final = _ATOM_TYPES - {type, types.ModuleType}
_READ: Final = nn.Module, types.FunctionType, types.MethodType, functools.partial
_ENTRIES: Final[Mapping[type, Any]] = {dict: dict.values, list: list.__iter__, tuple: tuple.__iter__}
_GENERATORS: Final = random.Random, np.random.Generator, np.random.RandomState
_UNSEEN_READS: Final = frozenset({"DisableTorchFunction", "_to_dlpack", "_to_dlpack_versioned", "to_dlpack"})
"""Functions that read values, and that a mode of torch does not see, and what turns the mode off."""
_UNSEEN_IN_SCRIPTS: Final = (
    "prim::tolist",
    *map("aten::{}".format, ("format", "percentFormat", "str", "tensor_split")),
)
_IS_OWN: Final = weakref.WeakKeyDictionary[type, bool]()
"""Whether a class of modules or of a task, or a base of it, is of a user."""
_NOT_OWN: Final = frozenset({"abc", "builtins", "torch", "trak_lite"})
_CONTAINERS: Final = frozenset({dict, types.MappingProxyType, list, tuple, set, frozenset, deque, np.ndarray})
_NOT_ENTERED: Final = (Tensor, type, logging.Filterer, io.IOBase)
_MEMBER_TYPES: Final = _ATOM_TYPES | {types.FunctionType, property, classmethod, staticmethod}
"""Types of attributes of classes that hold nothing else."""
_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))


def identities(
    model: nn.Module, task: AbstractModelOutput, others: Sequence[object], alive: list[Any]
) -> tuple[int, ...] | None:
    """Return the identity of all that a pass reads; ``None`` if a tensor has no memory of its own, or it is too much.

    A pass depends on the attributes of ``others``, not on their own identity. ``alive`` takes what is named by ``id``:
    the result is meaningful as long as this is alive.
    """
    alive += [one for held in others for one in getattr(held, "__dict__", {}).values()]
    contents = _Contents(alive, model)
    return (*map(id, alive), *contents.places) if contents.add_all(task) else None


def _hooks_of(module: nn.Module) -> tuple[Sized, ...]:
    backward = module._backward_hooks, module._backward_pre_hooks
    return module._forward_hooks, module._forward_pre_hooks, *backward


@final
class _Contents:
    """What attributes hold, a few levels deep, and methods: they may be changed in place."""

    def __init__(self, alive: list[Any], model: nn.Module) -> None:
        self.modules = [*model.modules()]
        """Those of the model; then also those that its attributes and the task hold, as in a list."""
        self.places: list[int] = []
        self._alive = alive
        self._seen = set(map(id, self.modules))
        self._classes: set[type] = set()
        self._num_bytes, self._num_entries = 0, 0

    def add_all(self, task: object) -> bool:
        """Add the modules and the task; return whether all that may change could be added."""
        self._alive.append(task)
        self.add_class(type(task), with_code=True)
        self.add(task, _LEVELS + 2)
        return all(map(self._add_module, self.modules))  # which grow

    def _add_module(self, module: nn.Module) -> bool:
        self.add_class(type(module))
        self._alive += (module, getattr(type(module), "forward", None))  # TorchScript has none
        for name, value in vars(module).items():
            self._alive.append(value)
            if type(value) not in _ATOM_TYPES and name not in _OF_EVERY_MODULE:
                self.add(value, _LEVELS)
        if self._num_bytes > _MOST_ARRAY_BYTES or self._num_entries > _MOST_ENTRIES:
            return False
        self._alive += module._modules.values()
        held = module._parameters, module._buffers
        names = [tuple(one.keys()) for one in (vars(module), module._modules, *held)]
        self.places += (hash(tuple(names)), *map(len, _hooks_of(module)))
        for tensor in itertools.chain(*(one.values() for one in held)):
            if tensor is None:
                continue
            if not is_plain(tensor):
                return False
            self._alive.append(tensor)
            layout = tensor.shape, tensor.stride(), tensor.dtype
            hooks = len(tensor._backward_hooks or ())
            self.places += (tensor.data_ptr(), tensor.requires_grad, hash(layout), hooks)
        return True

    def add_class(self, cls: type, *, with_code: bool = False) -> None:
        """Add the attributes of a class and its bases that are of a user, methods above all, and what these read."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        for base in cls.__mro__:
            is_own = _IS_OWN.get(base)
            if is_own is None:
                is_own = _IS_OWN[base] = package_of(base.__module__) not in _NOT_OWN
            if is_own:
                held = vars(base)
                self._alive.extend(held.values())
                self.places.append(hash((*held,)))
                for name, value in held.items():
                    if type(value) not in _MEMBER_TYPES and not name.startswith("__"):
                        self.add(value, _LEVELS)
                    for function in functions_of(value) if with_code else ():
                        self.add(function, _LEVELS)

    def add(self, value: Any, levels: int) -> None:
        """Add what a configuration, a dict, a list or an array holds."""
        if id(value) in self._seen or isinstance(value, _NOT_ENTERED):
            return
        if isinstance(value, nn.Module):
            self.modules += (one for one in value.modules() if id(one) not in self._seen)
            self._seen.update(map(id, value.modules()))
            return
        self._seen.add(id(value))
        # Copies: another thread may change what is walked through.
        if isinstance(value, dict | types.MappingProxyType):
            contents = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            contents = list(iter(value))  # list(value) would ask for a length
        elif isinstance(value, np.ndarray) and value.dtype == object:
            contents = value.ravel().tolist()
        elif isinstance(value, np.ndarray | array | bytearray):
            self._add_array(value)
            return
        elif isinstance(value, functools.partial):
            contents = [value.func, value.args, value.keywords]
        elif isinstance(value, types.FunctionType):
            contents = _read_by(value)
            levels -= 1
        elif isinstance(value, _METHODS):
            contents = [value.__self__, getattr(value, "__func__", None)]
        elif package_of(kind := type(value).__module__) == "torch" and "distributions" not in kind:
            return
        else:
            call = type(value).__call__
            contents = [call] if isinstance(call, types.FunctionType) else []
            levels -= 1
        if type(value) not in _CONTAINERS:  # an object, or a container with attributes
            contents += _slots_of(value)
            if hasattr(value, "__dict__"):
                self.places.append(hash((*vars(value),)))
                contents += vars(value).values()
        self.places.append(len(contents))
        if len(contents) > _MOST_HELD * (1 + isinstance(value, dict)):
            return
        self._num_entries += len(contents)
        if self._num_entries > _MOST_ENTRIES:
            return
        self._alive.extend(contents)
        if levels > 0 and not _ATOM_TYPES.issuperset(map(type, contents)):
            for one in contents:
                if type(one) not in _ATOM_TYPES:
                    self.add(one, levels - 1)

    def _add_array(self, value: np.ndarray[Any, Any] | array[Any] | bytearray) -> None:
        size = value.nbytes if isinstance(value, np.ndarray) else memoryview(value).nbytes
        # In fields: their addresses are no values.
        has_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
        self._num_bytes += _MOST_ARRAY_BYTES + 1 if has_objects else size
        if self._num_bytes <= _MOST_ARRAY_BYTES:
            buffer = value.tobytes() if isinstance(value, np.ndarray) else value
            layout = (value.shape, value.strides, value.dtype) if isinstance(value, np.ndarray) else ()
            self.places += (size, zlib.crc32(buffer), hash(layout))


def _read_by(function: types.FunctionType) -> list[Any]:
    """Return the modules and the functions that a function of a user reads by name, as in ``parts[0](part.loss(x))``.

    They may be globals, in a closure or defaults; entries of small containers of these; or attributes of these, if the
    function reads one of that name.
    """
    if not is_of_users(function) or package_of(function.__module__) in _NOT_OWN:
        return []
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    scope = function.__globals__
    held += [scope[name] for name in globals_in(function.__code__) if name in scope]
    if function.__code__.co_filename.startswith(_INSTALLED):
        # Those of SciPy refer to hundreds of others.
        return [one for one in held if isinstance(one, nn.Module)]
    seen = dict[int, Any]()
    for one in itertools.islice(held, _MOST_HELD):  # which grows
        if type(one) in _READ_AS_THEY_ARE or issubclass(type(one), (Tensor, *_READ)) or id(one) in seen:
            continue
        seen[id(one)] = one
        # By the type: proxies give another class, and subclasses may have methods that fail or load.
        for kind, entries in _ENTRIES.items():
            if issubclass(type(one), kind):
                held += itertools.islice(entries(one), MOST_READ)
        if isinstance(one, staticmethod | classmethod | functools._lru_cache_wrapper):
            held.append(one.__wrapped__)
        if is_of_users(one):
            held += read_from(one, names_in(function.__code__))
    return [one for one in held if issubclass(type(one), _READ)]


def _slots_of(value: Any) -> list[Any]:
    """Return what an object holds in ``__slots__``, without running code of its class."""
    contents = []
    for member in _members_of(type(value)):  # type: ignore[arg-type]
        try:
            contents.append(member.__get__(value))
        except AttributeError:  # not set
            contents.append(ABSENT)
    return contents


@functools.lru_cache(maxsize=1 << 10)
def _members_of(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    members = (one for base in cls.__mro__ if "__slots__" in vars(base) for one in vars(base).values())
    return tuple(member for member in members if isinstance(member, types.MemberDescriptorType))


def python_state(model: nn.Module, task: AbstractModelOutput, outside: Outside | None = None) -> Any:
    """Return what a pass may change outside tensors' values, and beside the random states of torch.

    ``None`` if a pass runs hooks of the user or iterators, or reads values where no mode of torch sees it. ``outside``
    notes what code reads.
    """
    contents = _Contents([], model)
    contents.add_all(task)
    for module in contents.modules:
        parameters = [p for p in module._parameters.values() if p is not None]
        if any(_hooks_of(module)) or any(p._backward_hooks for p in parameters) or _reads_unseen(module):
            return None
    described = functools.partial(_described, seen={}, depth=_DEPTH, outside=outside)
    try:
        held = [
            (name, described(value))
            for module in contents.modules
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules")
        ]
        code = list(map(described, (*_code_of(contents.modules, task), *contextvars.copy_context().values())))
    except _UnseenError:
        return None
    return held, code, random.getstate(), repr(np.random.get_state())  # noqa: NPY002 (read only)


class _UnseenError(Exception):
    """An iterator, which looking at it would move, or code that reads values where no mode of torch sees it."""


def _reads_unseen(value: Any) -> bool:
    """Whether it is a function, or TorchScript, that reads values where no mode of torch sees it."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__name__ in _UNSEEN_READS
    graphs: list[Any] = []  # alive as long as their nodes are looked at
    if isinstance(value, torch.jit.ScriptFunction):
        graphs = [value.inlined_graph]
    elif isinstance(value, torch.jit.ScriptModule):
        graphs = [value._c._get_method(name).inlined_graph for name in value._c._method_names()]
    nodes = (node for graph in graphs for kind in _UNSEEN_IN_SCRIPTS for node in graph.findAllNodes(kind))
    return any("Tensor" in str(given.type()) for node in nodes for given in node.inputs())


def _code_of(modules: Iterable[nn.Module], task: Any) -> Iterator[Any]:
    """Yield the task, and the methods and attributes of its class and the modules' classes that are of a user."""
    yield task
    classes = {base for one in (task, *modules) for base in type(one).__mro__}
    for cls in sorted(classes, key=lambda c: (c.__module__, c.__qualname__)):
        if package_of(cls.__module__) not in _NOT_OWN:
            for name, value in vars(cls).items():
                yield from functions_of(value)
                is_value = isinstance(value, (*_ATOMS, *_METHODS, list, dict, set, Tensor))
                if is_value and not name.startswith("__"):
                    yield value


def _described(value: Any, *, seen: dict[int, Any], depth: int, outside: Outside | None) -> Any:
    """Return values that change if something that code reads is changed in place or replaced."""
    if _reads_unseen(value):
        raise _UnseenError
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if depth == 0 or id(value) in seen or isinstance(value, nn.Module | logging.Filterer | io.IOBase):
        return id(value)
    seen[id(value)] = value
    described = functools.partial(_described, seen=seen, depth=depth - 1, outside=outside)
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, None if value.dtype == object else zlib.crc32(value.tobytes())
    with contextlib.suppress(NotImplementedError, TypeError):  # of a tuple that is one thing (irreps of e3nn)
        if isinstance(value, Sized) and len(value) > _MOST_DESCRIBED:
            return id(value), len(value)
    if type(value) in _GENERATORS:
        return repr(value.getstate() if type(value) is random.Random else value._bit_generator.state)
    if isinstance(value, _METHODS):
        function = value.__func__ if isinstance(value, types.MethodType) else value.__name__
        if outside is not None and isinstance(function, types.FunctionType):
            outside.note(function, [value.__self__])
        return described(function), described(value.__self__)
    if isinstance(value, types.FunctionType):
        if package_of(value.__module__) == "torch":
            return id(value)
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        names = names_in(value.__code__)
        if not _UNSEEN_READS.isdisjoint(names):
            raise _UnseenError
        read = [value.__globals__[name] for name in names if name in value.__globals__]
        if outside is not None:
            outside.note(value, read)
        # ``Class.count`` and ``module.count``
        owners = [one for one in read if isinstance(one, type | types.ModuleType) and is_of_users(one)]
        read += [vars(owner)[name] for owner in owners for name in names if name in vars(owner)]
        defaults = value.__defaults__, value.__kwdefaults__
        return [described(one) for one in (*cells, *read, *vars(value).values(), *defaults)]
    if isinstance(value, functools.partial):
        if outside is not None and isinstance(value.func, types.FunctionType):
            outside.note(value.func, [*value.args, *value.keywords.values()])
        return [described(one) for one in (value.func, value.args, value.keywords)]
    if isinstance(value, property | staticmethod | classmethod):
        return [described(one) for one in functions_of(value)]
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_info().currsize
    if isinstance(value, Mapping):
        return [(described(key), described(one)) for key, one in list(value.items())]
    if isinstance(value, list | tuple | set | frozenset):
        return [described(one) for one in value]
    if hasattr(value, "__next__"):
        if depth >= _DEPTH - 2:
            raise _UnseenError
        return id(value)  # of code that a library runs elsewhere
    held = [*_slots_of(value), *itertools.chain(*getattr(value, "__dict__", {}).items())]
    if isinstance(call := vars(type(value)).get("__call__"), types.FunctionType):
        held.append(call)
        if outside is not None:
            outside.note(call, [value])
    return [described(one) for one in held] or repr(value)
