"""Values outside the model that code reads by name, compared before every replay."""

from __future__ import annotations

import contextlib
import contextvars
import dis
import enum
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch

NUMBERS: Final = bool, int, float, complex
ABSENT: Final = ...
_COMPARED: Final = frozenset({*NUMBERS, str, bytes, type(None), type(ABSENT), torch.dtype, torch.device})
"""Types of values outside the model that are compared before every replay."""
_COMPARED_AS_OBJECTS: Final = torch.Tensor, np.ndarray, np.generic, enum.Enum
"""Types of which replays expect the same object; they read the values of tensors anew."""
MOST_READ: Final = 64
"""Entries of a container that code reads by name, which are looked at."""
_LOADING: Final = frozenset({"accelerate", "huggingface_hub", "safetensors"})
"""Packages that models name to load weights, and run in no pass."""
_NOT_OF_USERS: Final = (sys.stdlib_module_names | {"torch", "numpy"}) - {"argparse"}


@final
class Outside:
    """The numbers and strings outside the model that code of the model and the task reads by name."""

    def __init__(self) -> None:
        self._namespaces: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self._owners: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        """Tensors and the like, and globals and attributes whose attributes are read, with their names."""
        self._absent: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        """Where an object or a class may get an attribute in place of the one of its class or base class."""
        self._cells: list[types.CellType] = []
        self._variables: list[contextvars.ContextVar[Any]] = []
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, Any]]] = []
        self._last: tuple[Any, ...] = ()

    def note(self, function: types.FunctionType, read: Sequence[object]) -> None:
        """Note where a function reads values: ``NAME``, ``Class.name``, ``module.name``, ``settings.part.name``."""
        if package_of(function.__module__) in _LOADING:
            return
        used = names_in(function.__code__)
        cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]
        held = [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ())]
        held += (function.__kwdefaults__ or {}).values()
        scopes = [(function.__globals__, function.__globals__, globals_in(function.__code__))]
        self._note_names(*scopes[0])
        for one in (*held, *map(function.__globals__.get, scopes[0][2])):
            if type(one) is dict and len(one) <= MOST_READ:
                self._note_names(one, one, one)
        # Also what is imported inside the function.
        held += [*read, *(sys.modules[name] for name in used if name in sys.modules)]
        self._cells += [cell for cell in cells if type(cell.cell_contents) in _COMPARED]
        variables = [one for one in held if isinstance(one, contextvars.ContextVar)]
        self._variables += [one for one in variables if type(one.get(None)) in _COMPARED]
        for one in held:
            if hasattr(one, "__dict__") and is_of_users(one):
                self._note_owner(one, used)
                scopes += [(base, vars(base), vars(base).keys() & used) for base in _holders(one)]
        for holder, namespace, names in scopes:
            for name in names:
                owner = namespace.get(name)
                if holder is not namespace and hasattr(owner, "__dict__") and is_of_users(owner):
                    self._note_owner(owner, used)
                if owner is not None and any(id(base) in self._namespaces for base in _holders(owner)):
                    self._owners[id(holder), name] = namespace, name, owner

    def _note_owner(self, owner: Any, used: Sequence[str]) -> None:
        behind = set[str]()
        for base in reversed(_holders(owner)):
            for name in behind.difference(vars(base)):
                self._absent[id(base), name] = vars(base), name
            behind |= self._note_names(base, vars(base), used)

    def _note_names(self, holder: Any, namespace: Mapping[str, Any], used: Iterable[str]) -> set[str]:
        found = [(name, namespace.get(name)) for name in used]
        owners = [(name, one) for name, one in found if issubclass(type(one), _COMPARED_AS_OBJECTS)]
        self._owners.update({(id(holder), name): (namespace, name, one) for name, one in owners})
        names = {name for name in used if type(namespace.get(name, self)) in _COMPARED}
        if names:
            self._namespaces.setdefault(id(holder), (namespace, set()))[1].update(names)
        return names

    def values(self) -> tuple[Any, ...] | None:
        """Return the values as they are now, and their texts; ``None`` if one is of another kind or elsewhere."""
        if any(namespace.get(name) is not owner for namespace, name, owner in self._owners.values()):
            return None
        if not self._getters:
            self._getters = [
                (operator.itemgetter(*names, next(iter(names))), namespace)
                for namespace, names in self._namespaces.values()
            ]
        try:
            values = [value for getter, namespace in self._getters for value in getter(namespace)]
            values += [cell.cell_contents for cell in self._cells]
        except (LookupError, ValueError):  # a name or a cell has no value any more
            return None
        values += [namespace.get(name, ABSENT) for namespace, name in self._absent.values()]
        values += [variable.get(None) for variable in self._variables]
        if len(self._last) != 2 * len(values) or not all(map(operator.is_, values, self._last)):
            texts = map(repr, values)  # 1, 1.0 and True are equal, and 0.0 and -0.0
            self._last = (*values, *texts) if _COMPARED.issuperset(map(type, values)) else ()
        return self._last if self._last or not values else None


def package_of(module: object) -> str:
    """Return the package of a module, given the name of the module."""
    return str(module).partition(".")[0]


def _holders(owner: Any) -> Sequence[Any]:
    """Return what an attribute of an owner may stand in: itself and its classes."""
    if isinstance(owner, types.ModuleType):
        return [owner]
    bases = owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__)
    return [base for base in bases if hasattr(base, "__dict__") and base is not object]


def read_from(owner: Any, names: Sequence[str]) -> list[Any]:
    """Return what an owner and its classes hold under names that code reads, or that methods with such names read."""
    bases, waiting, held = _holders(owner), [*names, "__call__"], dict[str, Any]()
    for name in waiting:  # which grows
        for one in () if name in held else (vars(base)[name] for base in bases if name in vars(base)):
            is_slot = isinstance(one, types.MemberDescriptorType) and not isinstance(owner, type)
            held.setdefault(name, [])
            with contextlib.suppress(AttributeError):  # a slot that is not set
                held[name].append(one.__get__(owner) if is_slot else one)
            if isinstance(one, types.FunctionType) and not isinstance(owner, types.ModuleType):
                waiting += names_in(one.__code__)
    return [*itertools.chain.from_iterable(held.values())]


@functools.cache
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code reads, also in functions, lambdas and comprehensions inside it."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *itertools.chain.from_iterable(map(names_in, inner)))))


@functools.cache
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals alone: those of attributes may be names of a script's variables."""
    inner = (globals_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    names = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    return frozenset(names).union(*inner)


def is_of_users(owner: Any) -> bool:
    """Return whether a module, a class, a function or an object is none of Python, torch or NumPy."""
    name = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", None)
    return package_of(name) not in _NOT_OF_USERS
