"""Detection of operations that select, sort or move rows by values; shapes cannot identify such rows' samples.

Two kinds of indices move no sample's rows: an index that does not depend on sample values (``arange(B)``), and an index
into an axis that does not grow with the batch (the label's logit, the last token, a word's row of a table). For other
operations, :attr:`Examined.moved` has the sizes of the axes along which rows move. A comparison of two batch sizes
shows whether these axes grow with the batch.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = [
    "PACKED",
    "RECURRENT",
    "Examined",
    "ValueFree",
    "examine",
    "flattened",
    "leaves_of",
    "rebuilt",
]

RECURRENT: dict[Any, str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
}
"""Kind of recurrence by operation."""
PACKED = frozenset(RECURRENT)
"""Operations that may read the rows of a packed sequence, whose order shapes do not show."""


ValueFree = Callable[[Any], bool]
"""Predicate: whether an index is the same for all batches of equal size."""


class Examined(NamedTuple):
    """What one operation does to the order of samples' rows."""

    moved: tuple[int, ...]
    """Sizes of the axes along which it sorts or moves entries by values; empty if there are none."""
    chooses_by_value: bool
    """Whether the result's shape depends on values, so that its rows may belong to any sample."""
    num_read: int
    """Number of tensor values that it passes to Python, which may slice samples by them."""
    is_value_free: bool
    """Whether the result is the same for all batches of equal size."""


def examine(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    value_free: ValueFree,
    read: bool,
) -> Examined:
    """Examine an operation before it runs.

    Args:
        function: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        value_free: Whether an argument is the same for all batches of equal size.
        read: Whether Python has read tensor values, which arguments that are no tensors may contain.
    """
    name = _name(function)
    return Examined(
        _moved_sizes(function, name, args, kwargs, value_free),
        _chooses_by_value(function, name, args),
        _num_read(function, name, args, kwargs),
        _is_made_of_sizes(name, args, kwargs, value_free, read),
    )


_ENTRIES = frozenset({int, float, bool, str, type(None), type(...), torch.dtype, torch.device})
"""Types of arguments that are leaves."""


def leaves_of(values: Any) -> list[Any]:
    """Return the leaves of nested containers, like ``tree_flatten`` but ten times as fast."""
    kind = type(values)
    if kind is tuple or kind is list:
        return [leaf for value in values for leaf in leaves_of(value)]
    if kind is dict:
        return [leaf for value in values.values() for leaf in leaves_of(value)]
    return [values] if kind in _ENTRIES or isinstance(values, Tensor) else tree_flatten(values)[0]


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec | None]:
    """Return the leaves of the arguments, like ``tree_flatten``; sizes count as one leaf if all are positional.

    The structure is ``None`` then.
    """
    if kwargs or not all(
        [type(arg) in _ENTRIES or isinstance(arg, Tensor) or _are_sizes(arg) for arg in args]
    ):
        return tree_flatten((args, dict(kwargs)))
    return list(args), None


def _are_sizes(value: Any) -> bool:
    return type(value) in (tuple, list, torch.Size) and all([type(entry) is int for entry in value])


def rebuilt(leaves: list[Any], spec: TreeSpec | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with these leaves: the inverse of :func:`flattened`."""
    if spec is None:
        return tuple(leaves), {}
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def _name(function: Callable[..., Any]) -> str:
    """Return an operation's name; ``torch.f``, ``Tensor.f``, ``Tensor.f_`` and ``aten.f`` have the same name."""
    return _plain(getattr(function, "__name__", ""))


@functools.lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    name = name.partition(".")[0]
    return name if name.startswith("__") else name.rstrip("_")


_BY_VALUE = frozenset(
    {
        "nonzero",
        "nonzero_static",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "unique_dim",
        "bincount",
    }
)


def _chooses_by_value(function: Callable[..., Any], name: str, args: tuple[Any, ...]) -> bool:
    if name == "__getitem__" and len(args) == 2:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)
    if name == "where" and len(args) == 1:
        return True
    if name == "repeat_interleave":
        alone = function is torch.repeat_interleave and len(args) == 1
        return alone or any(isinstance(part, Tensor) for part in args[1:])
    return name in _BY_VALUE


_ORDERING = frozenset({"sort", "argsort", "msort", "topk"})
_READING_AT = frozenset({"gather", "index_select", "take_along_dim"})
_WRITING_AT = frozenset(
    {
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    }
)


def _moved_sizes(
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    value_free: ValueFree,
) -> tuple[int, ...]:
    find = _FINDERS.get(name)
    if name == "embedding" and function is not torch.embedding:
        return ()  # torch.nn.functional.embedding wraps torch.embedding, with its arguments in the other order
    # Torch's recurrent layers restore the order of what they sort.
    if find is None or _called_by("torch.nn.utils.rnn", "torch.nn.modules.rnn"):
        return ()
    return find(name, args, kwargs, value_free)


def _ordered(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value_free: ValueFree
) -> tuple[int, ...]:
    values = args[0] if args else kwargs["input"]
    place = 2 if name == "topk" else 1
    dim = kwargs.get("dim", args[place] if len(args) > place and not isinstance(args[place], bool) else -1)
    return (_size(values, 0 if name == "msort" else dim),)


def _along_one_axis(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value_free: ValueFree
) -> tuple[int, ...]:
    names = ("input", "indices", "dim") if name == "take_along_dim" else ("input", "dim", "index")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    values, dim, index = given["input"], given.get("dim"), given.get("indices", given.get("index"))
    if not isinstance(index, Tensor) or value_free(index):
        return ()
    if dim is None:  # take_along_dim without dim: all axes flattened
        return (int(values.numel()),)
    read = (_size(values, dim),)
    return (*read, _size(index, dim if index.dim() > 1 else 0)) if name in _WRITING_AT else read


def _anywhere(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value_free: ValueFree
) -> tuple[int, ...]:
    index = args[1] if len(args) > 1 else kwargs.get("index")
    return () if value_free(index) else (int(args[0].numel()),)


def _rows_of_a_table(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value_free: ValueFree
) -> tuple[int, ...]:
    table, ids = (*args, *kwargs.values())[:2]
    return () if value_free(ids) else (len(table),)


def _by_subscript(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value_free: ValueFree
) -> tuple[int, ...]:
    values, index = args[0], args[1] if len(args) > 1 else kwargs["indices"]
    by_name = not name.startswith("__")
    parts: list[Any] = [*index] if by_name or isinstance(index, tuple) else [index]
    axis, moved, fixed = 0, list[int](), False
    taken = sum(_axes_of(part, by_name) for part in parts)
    for part in parts:
        if part is Ellipsis:
            axis += values.dim() - taken
            continue
        if _is_index(part):
            if value_free(part):
                fixed = True
            else:
                moved.append(_size(values, axis))
        axis += _axes_of(part, by_name)
    if moved and not fixed and name in ("__setitem__", "index_put"):
        moved += [_count(part) for part in parts if _is_index(part)]
    return tuple(moved)


def _axes_of(part: Any, by_name: bool) -> int:
    """Return how many axes one part of a subscript consumes."""
    if part is Ellipsis or isinstance(part, bool) or (part is None and not by_name):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def _is_index(part: Any) -> bool:
    """Whether a part of a subscript is an integer index of several entries."""
    if isinstance(part, Tensor):
        return part.dtype not in (torch.bool, torch.uint8)
    return isinstance(part, Sequence) or bool(getattr(part, "ndim", 0))


def _count(part: Any) -> int:
    return int(part.numel()) if isinstance(part, Tensor) else len(part)


def _size(values: Tensor, dim: int) -> int:
    return int(values.shape[dim]) if values.dim() else 1


_FINDERS: dict[str, Callable[[str, tuple[Any, ...], Mapping[str, Any], ValueFree], tuple[int, ...]]] = {
    **dict.fromkeys(_ORDERING, _ordered),
    **dict.fromkeys(_READING_AT | _WRITING_AT, _along_one_axis),
    **dict.fromkeys(("take", "put"), _anywhere),
    **dict.fromkeys(("__getitem__", "__setitem__", "index_put", "index"), _by_subscript),
    "embedding": _rows_of_a_table,
}

# Values that Python reads

_READING_OUT = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__bool__,
        Tensor.__index__,
    }
)
_FACTORIES = frozenset(
    {
        "arange",
        "zeros",
        "ones",
        "empty",
        "full",
        "eye",
        "tril_indices",
        "triu_indices",
        "rand",
        "randn",
    }
)
_TAKING_SIZES = frozenset(
    {
        "narrow",
        "expand",
        "repeat",
        "tile",
        "view",
        "reshape",
        "unflatten",
        "split",
        "split_with_sizes",
        "tensor_split",
        "chunk",
        "select",
        "roll",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
    }
)


def _num_read(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int:
    if function in _READING_OUT:
        return int(args[0].numel())
    sizes: Any = ()  # the operation reads the values of tensors that are slice bounds or sizes
    if name in ("__getitem__", "__setitem__"):
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        sizes = [(part.start, part.stop, part.step) for part in parts if isinstance(part, slice)]
    elif name in _FACTORIES or name in _TAKING_SIZES:
        sizes = (args[name in _TAKING_SIZES :], dict(kwargs))
    return sum(
        int(leaf.numel())
        for leaf in leaves_of(sizes)
        if isinstance(leaf, Tensor) and not leaf.is_floating_point()
    )


# Results that do not depend on values

_LIKE = frozenset(
    {
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
    }
)
_RANDOM = frozenset(
    {
        "rand",
        "randn",
        "randint",
        "randperm",
        "bernoulli",
        "multinomial",
        "normal",
        "rand_like",
        "randint_like",
    }
)


def _is_made_of_sizes(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value_free: ValueFree, read: bool
) -> bool:
    if name in _RANDOM:
        return False
    if name in _LIKE:
        return True
    tensors = [leaf for leaf in leaves_of((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    if not tensors:
        return name in _FACTORIES or not read
    return all(value_free(tensor) for tensor in tensors)


def _called_by(*modules: str) -> bool:
    """Whether one of the nearest eight stack frames belongs to these modules."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False
