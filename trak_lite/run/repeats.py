"""Decides whether a stored result still is that of a function of the user.

A function is described by its source and values. What else it depends on cannot be followed in general (helpers, base
classes, files, the environment): a part of the work is repeated and compared.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, Protocol, TypeVar, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from trak_lite.core.eval_caches import passes_undone
from trak_lite.data.datasets import Rows
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.modelout_functions._describe import (
    array_json,
    code_bytes,
    is_foreign,
    name_of,
    sha256,
    source_bytes,
    tensor_json,
)

_T = TypeVar("_T")

SAME: Final = 1e-2
"""Largest distance on another machine: rounding errors grow with every step of a training."""
_ROUNDING: Final = 1e-5
"""Largest distance under the same conditions, if two repetitions have the same bits."""
_NOISE: Final = 10.0
"""Largest distance in units of that of two repetitions."""
_SIMPLE = (type(None), bool, int, float, str)


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """A stored result beside repetitions of it. Distances are relative to the size of the stored result."""

    apart: float
    """Distance between the stored result and the nearest repetition."""
    noise: float
    """Distance between two repetitions; 0 if the first one equals the stored result."""
    exact: bool
    """Whether the stored result was made under the present conditions, which give the same bits."""

    @property
    def is_same(self) -> bool:
        """Whether the stored result is that of the present function, as far as its noise allows to say."""
        return self.apart <= max(_ROUNDING if self.exact else SAME, _NOISE * self.noise)

    @property
    def is_random(self) -> bool:
        """Whether repetitions differ by more than rounding."""
        return self.noise > SAME


def compare(
    stored: _T, repeat: Callable[[int], _T], distance: Callable[[_T, _T], float], *, exact: bool
) -> Comparison:
    """Compare a stored result with repetition 0 of it, and with repetition 1 if they differ.

    The distance of two results is relative to the size of the stored one.

    Example:
        >>> compare(1.0, lambda number: 1.001, lambda one, other: abs(one - other), exact=True).is_same
        False
    """
    first = repeat(0)
    apart = distance(first, stored)
    if not apart:
        return Comparison(0.0, 0.0, exact)
    second = repeat(1)
    return Comparison(min(apart, distance(second, stored)), distance(second, first), exact)


def conditions(**others: Any) -> dict[str, Any]:
    """Return JSON values for what the bits of a computation depend on, besides its function, and others."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
    return {
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if in_use else None,
        **others,
    }


def outputs_of_model(model: nn.Module, task: AbstractModelOutput, rows: Rows, device: torch.device) -> Tensor:
    """Return f of every target, ``(M,)`` float64, for a model in eval mode."""
    task.prepare(model)
    found = []
    with torch.no_grad():
        for _, batch in rows.moved(np.arange(len(rows)), device):
            with passes_undone(model):
                found.append(task.evaluate(ModelCall(model), batch).output.cpu().double())
    return torch.cat(found)


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
    by class only, and global variables are left out: repeat a part of a training to notice other changes.

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
        return tensor_json(value) or {"object": name_of(type(value))}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return array_json(value)
    if id(value) in seen:  # a recursive function
        return {"again": name_of(value if isinstance(value, FunctionType | type) else type(value))}
    seen = {*seen, id(value)}
    if isinstance(value, tuple):
        return [_describe(item, seen) for item in value]
    if isinstance(value, functools.partial):
        keywords = {key: _describe(item, seen) for key, item in sorted(value.keywords.items())}
        of_function, args = _describe(value.func, seen), _describe(value.args, seen)
        return {"partial": of_function, "args": args, "keywords": keywords}
    if isinstance(value, MethodType):
        return {"method": _describe(value.__func__, seen), "self": _describe(value.__self__, seen)}
    is_code = isinstance(value, FunctionType | type)
    if isinstance(value, BuiltinFunctionType) or (is_code and is_foreign(value)):
        return {"name": name_of(value)}
    if isinstance(value, FunctionType):
        return _function(value, seen)
    if isinstance(value, type):
        return {"class": name_of(value), "source": sha256(source_bytes(value))}
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
        "function": name_of(function),
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
        names = [field.name for field in dataclasses.fields(value)]
        described["fields"] = {name: _describe(getattr(value, name), seen) for name in names}
    return described
