"""Operations on nested batches: tensors in tuples, lists, mappings and dataclasses, with samples on axis 0."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import types
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import to_device
from trak_lite.errors import (
    MODEL_FAILURES,
    InvalidInputError,
    UnsupportedModelError,
    refuse_machine_failure,
)
from trak_lite.types import Batch

DEFAULT_BATCH_SIZE: Final = 32
_LARGEST_DEFAULT: Final = 256
_DENSE: Final = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm)
"""Modules of perceptrons that hold parameters."""
_MOST_VALUES: Final = 1 << 25
"""Of the per-sample gradients of a batch, if a gradient computer holds all of them: 128 MiB in float32."""
_FEWEST_BATCHES: Final = 4
"""Of a train set with fewer rows than these of the largest size: a killed run loses at most one of them."""


def default_batch_size(model: nn.Module, num_rows: int) -> int:
    """Return the samples per pass if the user sets none: 32, or up to 256 for perceptrons, in at least 4 batches.

    A batch of a small perceptron costs nearly the same for 32 and for 256 rows. The size depends on the modules and N
    only, and not on a measured time, so that each run over the same data computes the same batches. Of a model with
    other parameters (convolutions, embeddings), their number does not bound the memory of a row, and batches gain less.
    """
    holders = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    if not all(type(module) in _DENSE for module in holders):
        return DEFAULT_BATCH_SIZE
    num_values = sum(parameter.numel() for parameter in model.parameters())
    size = _LARGEST_DEFAULT
    while size > DEFAULT_BATCH_SIZE and (
        size * num_values > _MOST_VALUES or -(-num_rows // size) < _FEWEST_BATCHES
    ):
        size //= 2
    return size


def rows_in_batches(rows: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Return row numbers ``(n,)`` divided into consecutive batches of ``size``; the last one may be smaller."""
    return np.split(rows, range(size, len(rows), size))


_MISSING: Final = object()
_IDENTITY: Final[Any] = object.__eq__
_SCALARS: Final = frozenset({bool, int, float, str, bytes, type(None)})


def with_own_containers(batch: Batch) -> Batch:
    """Return a batch whose containers are new, so that entries can be taken out of them; the tensors are the same."""
    return map_tensors(lambda tensor: tensor, batch)


def map_tensors(
    function: Callable[[Tensor], Any], batch: Batch, other: Callable[[Any], Any] = lambda value: value
) -> Batch:
    """Return the batch with ``function`` applied to each tensor.

    Containers keep their class and their attributes: a dataclass, a named tuple, a ``BatchEncoding`` or any other
    ``dict``, ``UserDict``, list or tuple that can be made from its entries; other mappings become a plain ``dict``. An
    attribute whose name begins with an underscore is a cache, unless the constructor sets it. To everything else (a
    list or tuple without tensors, an array, a number) ``other`` is applied.
    """
    if isinstance(batch, Tensor):
        return function(batch)

    def walk(attribute: Any) -> Any:
        try:
            return map_tensors(function, attribute, other)
        except RecursionError:
            raise InvalidInputError(
                f"{type(batch).__name__}, a class of containers of a batch, holds itself: it can be reached from an "
                f"attribute of its own, of class {type(attribute).__name__}. Leave this attribute out."
            ) from None

    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(function, value, other) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, dict | UserDict):
            return mapped
        made = _remade(batch, dict(batch), mapped, type(batch), walk)
        is_same = made is not None and len(made) == len(mapped)
        return made if is_same and all(made[key] is value for key, value in mapped.items()) else mapped
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.init}
        changes = {name: map_tensors(function, value, other) for name, value in values.items()}
        build = functools.partial(dataclasses.replace, batch)
        return _remade(batch, values, changes, build, walk)
    if isinstance(batch, tuple | list) and holds_tensors(batch):
        parts = [map_tensors(function, item, other) for item in batch]
        if type(batch) is list or type(batch) is tuple:
            return parts if isinstance(batch, list) else tuple(parts)
        # A named tuple takes its fields as separate arguments.
        from_list = (lambda fields: type(batch)(*fields)) if hasattr(batch, "_fields") else type(batch)
        made = _remade(batch, batch, parts, from_list, walk)
        is_same = made is not None and len(made) == len(parts)
        plain = parts if isinstance(batch, list) else tuple(parts)
        keeps = is_same and (hasattr(batch, "_fields") or all(map(operator.is_, made, parts)))
        return made if keeps else plain
    return other(batch)


def with_fields(batch: Any, **values: Any) -> Any:
    """Return a dataclass with other values of some fields."""
    args = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.init}
    return _remade(
        batch, args, {**args, **values}, functools.partial(dataclasses.replace, batch), lambda value: value
    )


def attributes_beside(batch: Batch) -> dict[str, Any]:
    """Return the attributes of a container that are no entries or fields of it, without cached properties."""
    if type(batch) in (dict, list, tuple):
        return {}
    entries = {"data"} if isinstance(batch, UserDict) else set()
    if isinstance(batch, Mapping):
        entries.update(batch)
    elif dataclasses.is_dataclass(batch):
        entries.update(f.name for f in dataclasses.fields(batch))
    return {name: value for name, value in _attributes(batch).items() if name not in entries}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots, without cached properties."""
    state: Any = object.__getstate__(value)
    if isinstance(state, tuple):
        state = (state[0] or {}) | state[1]
    kind: Any = type(value)
    if state and (cached := _cached_properties(kind)):
        return {name: part for name, part in state.items() if name not in cached}
    return state or {}


@functools.cache
def _cached_properties(kind: type) -> frozenset[str]:
    members = ((name, value) for base in kind.__mro__ for name, value in vars(base).items())
    return frozenset(name for name, value in members if isinstance(value, functools.cached_property))


def _remade(
    batch: Any, entries: Any, parts: Any, build: Callable[..., Any], walk: Callable[[Any], Any]
) -> Any:
    """Return a container of the class of a batch that holds ``parts`` in place of ``entries``; ``None`` if that fails.

    Attributes that ``build`` computes from the parts are new. It may change what it is given (a scale that is divided),
    so the others are taken from the batch: those that it would not compute from the batch's own parts.
    """
    has_fields = dataclasses.is_dataclass(batch) and not isinstance(batch, Mapping)
    if has_fields:
        beside = {name: value for name, value in _attributes(batch).items() if name not in entries}
    else:
        beside = attributes_beside(batch)
    try:
        made, again = build(**parts) if has_fields else build(parts), None
        changed = [name for name in parts if getattr(made, name) is not parts[name]] if has_fields else []
        attributes = _attributes(made) if changed or beside else {}
        for name in (*changed, *beside):
            value = beside[name] if name in beside else entries[name]
            now = attributes.get(name, _MISSING)
            if now is value or (_may_be_cache(batch, name, value) and (now is None or now is _MISSING)):
                continue
            if again is None:
                again = _attributes(build(**entries) if has_fields else build(entries))
            computed = again.get(name, _MISSING)
            # What all containers share is not computed from their parts, and may have no values to compare.
            is_shared = computed is _MISSING or (computed is now and type(value).__eq__ is _IDENTITY)
            if is_shared or not is_same_batch(computed, value):
                object.__setattr__(made, name, walk(value) if name in beside else parts[name])
    except InvalidInputError:
        raise
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        return _copied(batch, parts, {**entries, **beside} if has_fields else beside, walk)
    return made


def _may_be_cache(batch: Any, name: str, value: Any) -> bool:
    """Return whether an attribute has the name of a cache, and is no declared field with a setting of the batch."""
    is_setting = isinstance(value, float | str | bool) and name in getattr(batch, "__dataclass_fields__", ())
    return name[:1] == "_" and not is_setting


def _copied(batch: Any, parts: Any, attributes: dict[str, Any], walk: Callable[[Any], Any]) -> Any:
    """Return a container with other parts, without its constructor; ``None`` if it cannot be copied."""
    has_fields = not isinstance(batch, Mapping | list | tuple)
    try:
        made = object.__new__(type(batch)) if has_fields else copy.copy(batch)
        if made is batch:
            return None
        for key, part in (
            () if has_fields else parts.items() if isinstance(batch, Mapping) else enumerate(parts)
        ):
            made[key] = part
        for name, value in attributes.items():
            object.__setattr__(made, name, parts[name] if has_fields and name in parts else walk(value))
    except InvalidInputError:
        raise
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        if has_fields:
            raise
        return None
    return made


def holds_tensors(batch: Batch) -> bool:
    """Return whether there is a tensor in a batch or in a part of it."""
    if type(batch) in _SCALARS:
        return False
    if isinstance(batch, Mapping):
        return any(map(holds_tensors, batch.values()))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return any(holds_tensors(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init)
    if isinstance(batch, tuple | list):
        # A data set of texts may be an attribute of every batch.
        return not _SCALARS.issuperset(map(type, batch)) and any(map(holds_tensors, batch))
    return isinstance(batch, Tensor)


class ListColumn(list[Any]):
    """A list of a batch with one entry per sample: strings, numbers, ragged lists."""


class TupleColumn(tuple[Any, ...]):
    """A tuple of a batch with one entry per sample."""


class ArrayColumn(np.ndarray[Any, Any]):
    """An array of a batch with one entry per sample."""


def is_sparse(value: Any) -> bool:
    """Return whether a value is a sparse tensor, of any layout."""
    return isinstance(value, Tensor) and str(value.layout).startswith("torch.sparse")


def is_sized(value: Any) -> bool:
    """Return whether a value is a list, a tuple that is no named one, or an array with an axis."""
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return is_list or (isinstance(value, np.ndarray) and value.ndim > 0)


def parts_of(batch: Batch) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors with a sample axis, and the lists, tuples and arrays without tensors, each in order."""
    values = _values(batch)
    leaves = [value for value in values if isinstance(value, Tensor) and value.dim()]
    return leaves, list(filter(is_sized, values))


def is_column(value: Any) -> bool:
    """Return whether a value was marked as a column by :class:`~trak_lite.data.column_marks.ColumnMarks`."""
    return isinstance(value, ListColumn | TupleColumn | ArrayColumn)


def columns_of(batch: Batch) -> list[Any]:
    """Return the columns of a batch beside its tensors, in order."""
    return list(filter(is_column, _values(batch)))


def flatten_batch(batch: Batch) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Batch]]:
    """Return the per-sample tensors of a batch and a function that rebuilds the batch from replacements.

    Zero-dimensional tensors are not per sample; they are left out and kept by the rebuild.
    """
    leaves, _ = parts_of(batch)

    def rebuild(tensors: Sequence[Tensor]) -> Batch:
        replacement = iter(tensors)

        def put(tensor: Tensor) -> Tensor:
            leaf = next(replacement, None) if tensor.dim() else tensor
            if leaf is None:  # a copy without the constructor has more tensors than the entries
                raise UnsupportedModelError(
                    f"{type(batch).__name__}, the class of a batch, cannot be made of other tensors: its constructor "
                    "refuses them. Let it take tensors of any values."
                )
            return leaf

        return map_tensors(put, batch)

    return leaves, rebuild


def pads(sample: Tensor, alone: Tensor) -> bool | None:
    """Return whether a sample of a batch is a padded form of the same sample alone; ``None`` if it is neither.

    Both are ``(1, ...)``.
    """
    if sample.shape == alone.shape:
        return False if is_equal(sample, alone) else None
    if sample.dim() != alone.dim() or any(a < b for a, b in zip(sample.shape, alone.shape, strict=True)):
        return None
    sizes = list(zip(sample.shape, alone.shape, strict=True))
    starts = sample[tuple(slice(0, size) for _, size in sizes)]
    ends = sample[tuple(slice(whole - size, whole) for whole, size in sizes)]
    return True if is_equal(starts, alone) or is_equal(ends, alone) else None


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and values; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    same = one == other
    if one.is_floating_point() and other.is_floating_point():
        same |= one.isnan() & other.isnan()
    return bool(same.all())


def _settings_of(function: types.FunctionType) -> tuple[Any, ...]:
    """Return what tells a function from others that the same constructor makes, which may hold the batch itself."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    scalars = [value for value in held if type(value) in _SCALARS]
    return function.__code__, function.__defaults__, function.__kwdefaults__, scalars


def is_same_batch(one: Batch, other: Batch) -> bool:
    """Whether two batches hold the same values in order, beside tensors too; ``False`` if that cannot be known."""
    values, others = _values(one), _values(other)
    return len(values) == len(others) and all(map(_is_same, values, others))


def _values(batch: Batch) -> list[Any]:
    """Return the tensors of a batch and everything else in it, in order.

    Raises:
        InvalidInputError: If the constructor of a container changes a tensor in place, to other values each time.
    """
    values: list[Any] = []
    versions: list[tuple[Tensor, int]] = []

    def note(value: Any) -> Any:
        values.append(value)
        return value

    def note_tensor(tensor: Tensor) -> Tensor:
        if not tensor.is_inference():
            versions.append((tensor, tensor._version))
        values.append(tensor)
        return tensor

    map_tensors(note_tensor, batch, note)
    changed = [tensor for tensor, version in versions if tensor._version != version]
    if changed:
        before = [tensor.clone() for tensor in changed]
        with_own_containers(batch)
        try:
            is_settled = all(map(is_equal, before, changed))
        except RuntimeError as error:  # vmap hides values; the batch was looked at before it
            refuse_machine_failure(error)
            is_settled = True
        if not is_settled:
            raise InvalidInputError(
                f"The constructor of {type(batch).__name__}, the class of a batch, or of a container in it changes a "
                f"tensor of shape {tuple(changed[0].shape)} in place, and would change it again wherever samples are "
                "taken from the batch. Let it make a new tensor (self.x = self.x / 255), or change the tensor in "
                "collate."
            )
    return values


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return is_equal(one, other)
    try:
        if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
            return _settings_of(one) == _settings_of(other)
        if isinstance(one, functools.partial) and isinstance(other, functools.partial):
            return is_same_batch(*((each.func, each.args, each.keywords) for each in (one, other)))
        if type(one).__eq__ is _IDENTITY:
            return type(one) is type(other) and is_same_batch(_attributes(one), _attributes(other))
        return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)
    except Exception as error:  # a list of arrays
        refuse_machine_failure(error)
        return False


def batch_size(batch: Batch) -> int:
    """Return B, the common number of samples of all tensors in the batch."""
    leaves, _ = flatten_batch(batch)
    if not leaves:
        raise InvalidInputError(
            f"The batch ({type(batch).__name__}) holds no tensor with a sample axis. "
            "Expected tensors with the samples on axis 0, alone or in a tuple, list, dict or dataclass."
        )
    sizes = {leaf.shape[0] for leaf in leaves}
    if len(sizes) > 1:
        raise InvalidInputError(
            "The tensors of the batch disagree on the number of samples: shapes "
            f"{[tuple(leaf.shape) for leaf in leaves]}. Axis 0 of every tensor must be the sample axis. If samples "
            "have different numbers of values (boxes, edges), pad them in collate, and leave the padding out in the "
            "model."
        )
    return sizes.pop()


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with every tensor on ``device``; copies from the host to an accelerator are not waited for."""

    def moved(part: Tensor) -> Tensor:
        if part.device != device:
            return to_device(part, device)
        return part.clone() if part.is_inference() else part  # autograd cannot save what inference mode made

    return map_tensors(moved, batch)


def take_rows(batch: Batch, rows: int | slice | Sequence[int]) -> Batch:
    """Return the samples ``rows`` of a batch and of its columns; of an integer one sample without a sample axis."""

    def taken(column: Any) -> Any:
        if not is_column(column):
            return column
        if isinstance(rows, int) or isinstance(column, ArrayColumn):
            return column[rows]
        return type(column)(column[rows] if isinstance(rows, slice) else [column[row] for row in rows])

    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, batch, taken)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return the samples of some batches of the same structure, without differing shapes, in one batch."""
    leaves = map(torch.cat, zip(*(flatten_batch(batch)[0] for batch in batches), strict=True))
    columns = zip(*map(columns_of, batches), strict=True)

    def joined(value: Any) -> Any:
        if not is_column(value):
            return value
        parts = next(columns)
        if isinstance(value, ArrayColumn):
            return np.concatenate(parts).view(ArrayColumn)
        return type(value)(entry for part in parts for entry in part)

    return map_tensors(lambda tensor: next(leaves) if tensor.dim() else tensor, batches[0], joined)
