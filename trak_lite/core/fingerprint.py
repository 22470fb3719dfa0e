"""Names and digests of what a user passes: classes, functions and their code, tensors and arrays.

Nothing depends on addresses or hashes of Python objects, which differ between processes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sys
import weakref
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.json_text import module_name

SIMPLE = (type(None), bool, int, float, str)
FOREIGN = frozenset({"numpy", "torch", "trak_lite"}) | sys.stdlib_module_names
"""Packages whose classes and functions are described by name only, as they are not the user's."""


def is_foreign(thing: Any) -> bool:
    """Return whether a class or function can be looked up by its name in Python, NumPy, torch or this package.

    The ``__module__`` attribute alone is not enough: a class made by ``type(...)`` may claim the module ``abc``.
    """
    module = str(getattr(thing, "__module__", None))
    resolved: Any = sys.modules.get(module)
    for part in thing.__qualname__.split("."):
        resolved = getattr(resolved, part, None)
    return resolved is thing and module.partition(".")[0] in FOREIGN


_FORMER_MODULES: Final = {
    "evaluation.ranking.MislabelDetection": "evaluation.detection",
    "evaluation.subsets.LossRise": "evaluation.removal",
    "integrations.trl.PairCollator": "integrations._trl",
    "integrations.trl.RolloutCollator": "integrations._trl",
    "methods.inverse.AbstractInverseMethod": "methods.ekfac",
    "methods.inverse.CG": "methods.cg",
    "methods.inverse.EKFAC": "methods.ekfac",
    "methods.inverse.LiSSA": "methods.lissa",
    "methods.stored.Fisher": "methods.fisher",
    "methods.stored.GaussNewton": "methods.gauss_newton",
    "methods.stored.TRAK": "methods.trak",
    "methods.stored.GradCos": "methods.grad_cos",
    "methods.stored.GradDot": "methods.grad_dot",
    "methods.stored.LESS": "methods.less",
    "methods.stored.TracIn": "methods.tracin",
    "modelout_functions._base.CallableModelOutput": "modelout_functions.callable",
    "modelout_functions.contrastive.CLIPModelOutput": "modelout_functions.clip",
    "modelout_functions.language_modeling.DenseClassificationModelOutput": "modelout_functions.dense",
    "modelout_functions.language_modeling.PositionwiseModelOutput": "modelout_functions._positions",
    "modelout_functions.post_training.AnswerDifferenceModelOutput": "modelout_functions.preferences",
    "modelout_functions.post_training.DPOModelOutput": "modelout_functions.preferences",
    "modelout_functions.post_training.PolicyGradientModelOutput": "modelout_functions.policy_gradient",
    "modelout_functions.post_training.RewardModelOutput": "modelout_functions.preferences",
    "modelout_functions.post_training._PreferenceModelOutput": "modelout_functions.preferences",
    "modelout_functions.post_training.reference_columns": "modelout_functions.preferences",
    "modelout_functions.post_training.response_labels": "modelout_functions._chat",
    "modelout_functions.supervised.BinaryClassificationModelOutput": "modelout_functions.binary",
    "modelout_functions.supervised.ImageClassificationModelOutput": "modelout_functions.classification",
    "modelout_functions.supervised.IterativeImageClassificationModelOutput": "modelout_functions.classification",
    "modelout_functions.supervised.MultiLabelModelOutput": "modelout_functions.binary",
    "modelout_functions.supervised.RegressionModelOutput": "modelout_functions.regression",
    "modelout_functions.supervised.TextClassificationModelOutput": "modelout_functions.classification",
    "modelout_functions.supervised._Classifier": "modelout_functions.classification",
    "modelout_functions._base.LossModelOutput": "modelout_functions._sampling",
    "modelout_functions._base.resolve_task": "modelout_functions._registry",
    "projectors.dense.projectors.FastJLProjector": "projectors.dense.fast_jl",
    "projectors.mask.GraSSProjector": "projectors.mask.projectors",
    "projectors.mask.MaskProjector": "projectors.mask.projectors",
    "projectors.per_module.NoOpProjector": "projectors.identity",
    "retraining.verify.verify_run": "retraining.one_run",
    "scoring.uncertainty.Reliability": "scoring.source",
    "store._columns.TableSpec": "store._base",
    "store._table.AbstractRowTable": "store._base",
    "unrolled.runs.Recipe": "unrolled.recipe",
    "unrolled.subsets.SubsetTraining": "unrolled.runs",
}
"""Modules in which classes of this package stood when descriptions that hold their names were first stored."""


def name_of(thing: Any) -> str:
    """Return the qualified name, as stored; objects implemented in C may have no module."""
    module, name = module_name(getattr(thing, "__module__", None) or "builtins"), thing.__qualname__
    former = _FORMER_MODULES.get(f"{module.removeprefix('trak_lite.')}.{name}")
    return f"{module}.{name}" if former is None else f"trak_lite.{former}.{name}"


def functions_of(member: Any) -> list[Any]:
    """Return the functions of a class's attribute: of a method, a property, a cached function."""
    if isinstance(member, property):
        member_functions = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        member_functions = [member.func]
    else:
        member_functions = [getattr(member, "__func__", member)]
    kinds = (FunctionType, functools.partial, functools._lru_cache_wrapper)
    return [function for function in member_functions if isinstance(function, kinds)]


def sha256(raw: bytes | memoryview) -> str:
    """Return the digest in hex."""
    return hashlib.sha256(raw).hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a dense tensor as bytes, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def tensor_json(tensor: Tensor) -> dict[str, Any] | None:
    """Return dtype, shape and digest of the values; ``None`` for a tensor without plain values (sparse, meta)."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    digest = sha256(tensor_bytes(tensor))
    return {"tensor": str(tensor.dtype), "shape": list(tensor.shape), "sha256": digest}


def array_json(array: NDArray[Any]) -> dict[str, Any]:
    """Return dtype, shape and digest of the values of an array that holds no Python objects."""
    return {"array": dtype_name(array.dtype), "shape": list(array.shape), "sha256": sha256(array.tobytes())}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, or the names and dtypes of its fields."""
    return dtype.str if dtype.names is None else repr(dtype.descr)


def source_bytes(thing: type | CodeType) -> bytes:
    """Return the source text of a class or a function's code; empty if it has none (interactive prompt, exec)."""
    if isinstance(thing, CodeType):
        return _source_of_code(thing, thing.co_filename)
    if thing not in _SOURCES:
        _SOURCES[thing] = _read_source(thing)
    return _SOURCES[thing]


_SOURCES: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()
"""Sources of classes: a model of transformers has hundreds of functions, whose files take seconds to parse."""


@functools.lru_cache(maxsize=4096)
def _source_of_code(code: CodeType, _: str) -> bytes:  # codes of different files may be equal
    return _read_source(code)


def _read_source(thing: type | CodeType) -> bytes:
    try:
        return inspect.getsource(thing).encode()
    except (OSError, TypeError):
        return b""


def code_bytes(code: CodeType) -> bytes:
    """Return a function's bytecode and constants, without line numbers and file names."""
    form = (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
    )
    constants = [_constant(value) for value in code.co_consts]
    parts = [code.co_code, code.co_exceptiontable, repr(form).encode(), *constants]
    # Prefix each part with its length: with a separator, different parts could give the same bytes.
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def function_digest(function: FunctionType) -> str:
    """Return a digest of source and code: two lambdas on one line have the same source text."""
    code = function.__code__
    return sha256(source_bytes(code) + b"\0" + code_bytes(code))


NO_VALUE: Final = object()
"""Stands for a captured variable that has no value yet."""


def carried_values(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function carries by the names of its variables: defaults, then the closure's."""
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    carried: dict[str, Any] = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    carried |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            carried[name] = cell.cell_contents
        except ValueError:
            carried[name] = NO_VALUE
    return carried


def _constant(value: Any) -> bytes:
    """Return the bytes of a constant; sets are sorted because their order differs between processes."""
    if isinstance(value, CodeType):
        return code_bytes(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(repr, value))}".encode()
    return repr(value).encode()


def describe_source(function: Any) -> Any:
    """Return JSON values that differ for functions with different source, settings or data.

    The description includes closures, defaults, ``functools.partial``, bound methods, frozen dataclasses, tuples,
    and recipes and rows of trak_lite.
    Numbers and strings are described by value, tensors and arrays by content, functions and classes of torch, NumPy
    and Python by name. Objects that may change during a training (lists, dicts, modules, other objects) are described
    by class only, and global variables are left out: repeat a part of a training to notice other changes.
    """
    return _describe(function, set())


def _describe(value: Any, seen: set[int]) -> Any:
    if isinstance(value, SIMPLE):
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
        values = ["empty" if item is NO_VALUE else item for item in carried_values(value).values()]
        return {
            "function": name_of(value),
            "source": function_digest(value),
            "values": [_describe(item, seen) for item in values],
        }
    if isinstance(value, type):
        return {"class": name_of(value), "source": sha256(source_bytes(value))}
    return _object(value, seen)


def _object(value: Any, seen: set[int]) -> dict[str, Any]:
    """Return the class of an object, and the fields of a frozen dataclass or the identity of an object of trak_lite."""
    cls: Any = type(value)
    described = {"object": _describe(cls, seen)}
    if is_foreign(cls) and hasattr(value, "identity"):  # a recipe, rows of a dataset
        return {**described, "identity": value.identity()}
    parameters: Any = getattr(cls, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        names = [field.name for field in dataclasses.fields(value)]
        described["fields"] = {name: _describe(getattr(value, name), seen) for name in names}
    return described
