"""Detection of operations that select, sort or move rows by values; shapes cannot identify such rows' samples.

Two kinds of indices move no sample's rows: an index that does not depend on sample values (``arange(B)``), and an index
into an axis that does not grow with the batch (the label's logit, the last token, a word's row of a table). For other
operations, :attr:`Examined.moved` has the sizes of the axes along which rows move. A comparison of two batch sizes
shows whether these axes grow with the batch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from trak_lite.gradient_computers.recording import ENTRIES, tensors_of

__all__ = ["PACKED", "RECURRENT", "Examined", "examine", "flattened", "rebuilt"]

RECURRENT: dict[Any, str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
}
"""Kind of recurrence by operation."""
PACKED = frozenset(RECURRENT)
"""Operations that may read the rows of a packed sequence, whose order shapes do not show."""


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


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation before it runs."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value_free: Callable[[Any], bool]
    """Whether an index is the same for all batches of equal size."""

    @property
    def name(self) -> str:
        """The operation's name; ``torch.f``, ``Tensor.f``, ``Tensor.f_`` and ``aten.f`` have the same name."""
        name: str = getattr(self.function, "__name__", "").partition(".")[0]
        return name if name.startswith("__") else name.rstrip("_")

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts of a subscript."""
        return self.args[1] if isinstance(self.args[1], tuple) else self.args[1:2]


def examine(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    value_free: Callable[[Any], bool],
    read: bool,
) -> Examined:
    """Examine an operation before it runs.

    ``value_free`` tells whether an argument is the same for all batches of equal size, and ``read`` whether Python has
    read tensor values, which arguments that are no tensors may contain.
    """
    call = _Call(function, args, kwargs, value_free)
    return Examined(
        _moved_sizes(call), _chooses_by_value(call), _num_read(call), _is_made_of_sizes(call, read)
    )


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec | None]:
    """Return the leaves of the arguments, like ``tree_flatten``; sizes count as one leaf if all are positional.

    The structure is ``None`` then.
    """
    if kwargs or not all(
        [type(arg) in ENTRIES or isinstance(arg, Tensor) or _are_sizes(arg) for arg in args]
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


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Results whose shape depends on values

_BY_VALUE = _names(
    "nonzero nonzero_static argwhere masked_select unique unique_consecutive unique_dim bincount"
)


def _chooses_by_value(call: _Call) -> bool:
    name, args = call.name, call.args
    if name == "__getitem__" and len(args) == 2:
        return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in call.parts)
    if name == "repeat_interleave":
        alone = call.function is torch.repeat_interleave and len(args) == 1
        return alone or any(isinstance(part, Tensor) for part in args[1:])
    return name in _BY_VALUE or (name == "where" and len(args) == 1)


# Entries that move by values

_READING_AT = _names("gather index_select take_along_dim")
_WRITING_AT = _names("index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce")


def _moved_sizes(call: _Call) -> tuple[int, ...]:
    find = _FINDERS.get(call.name)
    # Torch's recurrent layers restore the order of what they sort.
    if find is None or _called_by("torch.nn.utils.rnn", "torch.nn.modules.rnn"):
        return ()
    return find(call)


def _ordered(call: _Call) -> tuple[int, ...]:
    args = call.args
    values = args[0] if args else call.kwargs["input"]
    place = 2 if call.name == "topk" else 1
    by_position = len(args) > place and not isinstance(args[place], bool)
    dim = call.kwargs.get("dim", args[place] if by_position else -1)
    return (_size(values, 0 if call.name == "msort" else dim),)


def _along_one_axis(call: _Call) -> tuple[int, ...]:
    names = ("input", "indices", "dim") if call.name == "take_along_dim" else ("input", "dim", "index")
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    values, dim, index = given["input"], given.get("dim"), given.get("indices", given.get("index"))
    if not isinstance(index, Tensor) or call.value_free(index):
        return ()
    if dim is None:  # take_along_dim without dim: all axes flattened
        return (int(values.numel()),)
    read = (_size(values, dim),)
    return (*read, _size(index, dim if index.dim() > 1 else 0)) if call.name in _WRITING_AT else read


def _anywhere(call: _Call) -> tuple[int, ...]:
    index = call.args[1] if len(call.args) > 1 else call.kwargs.get("index")
    return () if call.value_free(index) else (int(call.args[0].numel()),)


def _rows_of_a_table(call: _Call) -> tuple[int, ...]:
    if call.function is not torch.embedding:  # torch.nn.functional.embedding wraps it, with the other order
        return ()
    table, ids = (*call.args, *call.kwargs.values())[:2]
    return () if call.value_free(ids) else (len(table),)


def _by_subscript(call: _Call) -> tuple[int, ...]:
    values, by_name = call.args[0], not call.name.startswith("__")
    named: Sequence[Any] = call.kwargs.get("indices", ())
    parts = named if by_name and len(call.args) < 2 else call.args[1] if by_name else call.parts
    axis, moved, fixed = 0, list[int](), False
    taken = sum(_axes_of(part, by_name) for part in parts)
    for part in parts:
        if part is Ellipsis:
            axis += values.dim() - taken
            continue
        if _is_index(part):
            if call.value_free(part):
                fixed = True
            else:
                moved.append(_size(values, axis))
        axis += _axes_of(part, by_name)
    if moved and not fixed and call.name in ("__setitem__", "index_put"):
        moved += [
            part.numel() if isinstance(part, Tensor) else len(part) for part in filter(_is_index, parts)
        ]
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


def _size(values: Tensor, dim: int) -> int:
    return int(values.shape[dim]) if values.dim() else 1


_FINDERS: dict[str, Callable[[_Call], tuple[int, ...]]] = {
    **dict.fromkeys(("sort", "argsort", "msort", "topk"), _ordered),
    **dict.fromkeys(_READING_AT | _WRITING_AT, _along_one_axis),
    **dict.fromkeys(("take", "put"), _anywhere),
    **dict.fromkeys(("__getitem__", "__setitem__", "index_put", "index"), _by_subscript),
    "embedding": _rows_of_a_table,
}

# Values that Python reads

_READING_METHODS = ("item", "tolist", "numpy", "__array__", "__int__", "__float__", "__bool__", "__index__")
_READING_OUT = frozenset(getattr(Tensor, name) for name in _READING_METHODS)
_FACTORIES = _names("arange zeros ones empty full eye tril_indices triu_indices rand randn")
_TAKING_SIZES = _names(
    "narrow expand repeat tile view reshape unflatten split split_with_sizes tensor_split chunk "
    "select roll new_zeros new_ones new_empty new_full"
)


def _num_read(call: _Call) -> int:
    name, args = call.name, call.args
    if call.function in _READING_OUT:
        return int(args[0].numel())
    sizes: Any = ()  # the operation reads the values of tensors that are slice bounds or sizes
    if name in ("__getitem__", "__setitem__"):
        sizes = [(part.start, part.stop, part.step) for part in call.parts if isinstance(part, slice)]
    elif name in _FACTORIES or name in _TAKING_SIZES:
        sizes = (args[name in _TAKING_SIZES :], dict(call.kwargs))
    return sum(int(leaf.numel()) for leaf in tensors_of(sizes) if not leaf.is_floating_point())


# Results that do not depend on values

_LIKE = _names("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty")
_RANDOM = _names("rand randn randint randperm bernoulli multinomial normal rand_like randint_like")


def _is_made_of_sizes(call: _Call, read: bool) -> bool:
    if call.name in _RANDOM or call.name in _LIKE:
        return call.name in _LIKE
    tensors = tensors_of((call.args, dict(call.kwargs)))
    if not tensors:
        return call.name in _FACTORIES or not read
    return all(map(call.value_free, tensors))


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
