"""Recording of a forward pass: the operations that depend on kept parameters, and what is known of their rows.

Some operations select, sort or move rows by values, and shapes cannot identify the samples of such rows. Two kinds of
indices move no sample's rows: an index that does not depend on sample values (``arange(B)``), and an index into an axis
that does not grow with the batch (the label's logit, the last token, a word's row of a table). A comparison of two
batch sizes shows whether the axes along which rows move grow with the batch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.plan.interception import AbstractInterceptor, Function
from trak_lite.gradient_computers.hooks.registry import GradientRule
from trak_lite.gradient_computers.parameters import Kept
from trak_lite.gradient_computers.recording import by_name, leaves_of, tensors_of

RECURRENT: dict[Any, str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
}
"""Kind of recurrence by operation. It may read the rows of a packed sequence, whose order shapes do not show."""
_MOVED, _PACKED_ROWS = "chosen or moved by value", "packed"


def differentiable(result: Any) -> list[Tensor]:
    """Return the real and complex floating-point tensors of a result, in order."""
    tensors = [result] if isinstance(result, Tensor) else tensors_of(result)
    return [t for t in tensors if t.is_floating_point() or t.is_complex()]


def is_in_place(function: Function) -> bool:
    """Whether the operation writes into its first argument."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def written(function: Function, args: Sequence[Any], result: Any) -> Any:
    """Return an operation's output: its result, or its first argument if it works in place."""
    return args[0] if args and is_in_place(function) and isinstance(args[0], Tensor) else result


@dataclass(slots=True)
class Record:
    """One operation that depends on a kept parameter."""

    function: Any
    sources: list[Any]
    """Per tensor argument: the index of the record that computed it, a parameter name, or None."""
    shapes: list[tuple[int, ...]]
    others: list[Any]
    outputs: list[Tensor]
    output_shapes: list[tuple[int, ...]]
    taints: frozenset[str]
    """Reasons why the rows of its arguments may belong to any sample."""
    value_free: list[bool]
    """Per tensor argument: whether it is the same for all batches of equal size."""
    in_model: bool = False
    """Whether it ran while the model did, not in the output function."""

    @property
    def has_unknown_rows(self) -> bool:
        """Whether the probe's equal samples cannot show which samples' rows it reads in other batches."""
        packed = _PACKED_ROWS in self.taints and self.function not in RECURRENT
        return packed or _MOVED in self.taints

    @property
    def has_index(self) -> bool:
        """Whether tensor arguments may be indices."""
        return _name_of(self.function) in _FINDERS


class _Seen(NamedTuple):
    """Data of one operation, with or without parameters, for the comparison of two batch sizes."""

    function: Any
    moved: tuple[int, ...]
    """Sizes of the axes along which it moves entries by values."""
    shapes: list[tuple[int, ...]]
    """Shapes of its results."""


def grows_twice(two: Sequence[int], three: Sequence[int]) -> bool:
    """Whether more than one axis of a shape grows with the batch."""
    return len(two) == len(three) and sum(a != b for a, b in zip(two, three, strict=True)) > 1


class Recorder(AbstractInterceptor):
    """Records every operation that depends on a kept parameter, and runs it unchanged."""

    tries_branches = True

    def __init__(self, kept: Kept, smaller: Recorder | None = None) -> None:
        """Prepare a forward pass; ``smaller`` recorded a smaller batch, and shows the axes that grow."""
        super().__init__()
        self.watched = {id(parameter): parameter for parameter in kept.values()}
        self.sources: dict[int, Any] = {id(parameter): name for name, parameter in kept.items()}
        self.records: list[Record] = []
        self.taints: dict[int, tuple[Any, frozenset[str]]] = {}
        """Tensors whose rows may belong to any sample, and tensors computed from them, with the reasons; by ``id``, and
        for tensors written in place also by memory key."""
        self.seen: list[_Seen] = []
        self.reads: list[tuple[int, int, bool, bool]] = []
        """One entry per read of tensor values by Python: the number of records so far, the number of values, whether
        the model read them, not the output function, and whether it is one result of ``all`` or ``any``."""
        self._quantifiers: dict[int, Tensor] = {}
        """Results of ``all`` and ``any``."""
        self._smaller = smaller.seen if smaller is not None else None
        self.moves_rows = False
        """Whether some operation selected or moved rows by values."""
        self._value_free: dict[int, tuple[Tensor, int]] = {}
        """Tensors that do not depend on values, with the version counters for which this holds."""

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.looks_away:
            return func(*args, **kwargs)
        name = _name_of(func)
        inputs = tensors_of((args, kwargs))
        moved, chooses = tuple[int, ...](), name in _BY_VALUE
        if name in _FINDERS or name in _CHOOSING_BY_ARGUMENTS:
            call = _Call(name, func, by_name(_POSITIONS.get(name, _USUAL), args, kwargs), self._is_value_free)
            moved, chooses = self._moved_sizes(call), _chooses_by_value(call)
        num_read = _num_read(name, func, args, kwargs)
        value_free = self._is_made_of_sizes(name, inputs)
        reasons = set(self._taints_of(inputs))
        result = super().__torch_function__(func, types, args, kwargs)
        output = written(func, args, result)
        tensors = [output] if isinstance(output, Tensor) else tensors_of(output)
        if num_read:
            of_quantifier = num_read == 1 and bool(args) and id(args[0]) in self._quantifiers
            self.reads.append((len(self.records), num_read, self.depth > 0, of_quantifier))
        if getattr(func, "__name__", "") in ("all", "any"):
            self._quantifiers.update((id(t), t) for t in tensors)
        if value_free:
            self._value_free.update((id(t), (t, t._version)) for t in tensors)
        if self._moves(_Seen(func, moved, _shapes(tensors)), value_free) or chooses:
            reasons.add(_MOVED)
            self.moves_rows = True
        if func is torch._pack_padded_sequence:
            reasons.add(_PACKED_ROWS)
        if func is torch._pad_packed_sequence:
            reasons.discard(_PACKED_ROWS)
        self._taint(func, tensors, frozenset(reasons))
        return result

    def ran_like(self, other: Recorder) -> bool:
        """Whether both forward passes ran the same functions in the same order."""
        return [op.function for op in self.seen] == [op.function for op in other.seen]

    def renamed(self, old: Tensor, new: Tensor) -> None:
        """Track ``new`` in place of ``old``, an input of a sharded module."""
        if id(old) in self.taints:
            self.taints[id(new)] = (new, self.taints[id(old)][1])
        if id(old) in self.watched:
            self.watched[id(new)] = new
            self.sources[id(new)] = self.sources[id(old)]

    def _moves(self, operation: _Seen, same_in_all: bool) -> bool:
        """Whether an operation moves samples' rows by values, compared with the same operation in the smaller batch."""
        index = len(self.seen)
        self.seen.append(operation)
        if self._smaller is None:
            return False
        other = self._smaller[index] if index < len(self._smaller) else None
        if other is not None and other.function != operation.function:
            self._smaller = self._smaller[:index]  # later operations cannot be compared
            other = None
        if operation.moved and (other is None or operation.moved != other.moved):
            return True
        if other is None or same_in_all or len(operation.shapes) != len(other.shapes):
            return False
        # A matrix product with a result of which two axes grow moves rows according to its values.
        return any(map(grows_twice, operation.shapes, other.shapes))

    def _is_value_free(self, index: Any) -> bool:
        """Whether an index is known to be the same for all batches of equal size."""
        if not isinstance(index, Tensor):
            return not self.reads
        entry = self._value_free.get(id(index))
        return entry is not None and entry[1] == index._version

    def _is_made_of_sizes(self, name: str, inputs: Sequence[Tensor]) -> bool:
        """Whether a result does not depend on values; Python may have passed on values that it read."""
        if name in _RANDOM or name in _LIKE:
            return name in _LIKE
        if not inputs:
            return name in _FACTORIES or not self.reads
        return all(map(self._is_value_free, inputs))

    def _moved_sizes(self, call: _Call) -> tuple[int, ...]:
        """Return the sizes of the axes along which an operation sorts or moves entries by values."""
        find = _FINDERS.get(call.name)
        # Torch's recurrent layers restore the order of what they sort.
        if find is None or _called_by("torch.nn.utils.rnn", "torch.nn.modules.rnn"):
            return ()
        return find(call)

    def _taint(self, function: Function, tensors: Sequence[Tensor], reasons: frozenset[str]) -> None:
        for index, tensor in enumerate(tensors):
            # The last states of a recurrent layer have a batch axis again.
            taints = reasons - {_PACKED_ROWS} if function in RECURRENT and index else reasons
            if taints:
                self.taints[id(tensor)] = (tensor, taints)
            if taints and is_in_place(function):  # other tensors on this memory hold the same rows
                self.taints[_memory(tensor)] = (tensor, taints)

    def _taints_of(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        if not self.taints:
            return frozenset()
        keys = [key for leaf in tensors for key in (id(leaf), _memory(leaf)) if key in self.taints]
        return frozenset().union(*(self.taints[key][1] for key in keys))

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record an operation if its result requires grad."""
        if self.inside:
            return function(*args, **kwargs)
        leaves = leaves_of((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        _refuse_nested(function, tensors)
        shapes = _shapes(tensors)
        sources = [self.sources.get(id(leaf)) for leaf in tensors]
        value_free = [self._is_value_free(leaf) for leaf in tensors]
        taints = self._taints_of(tensors)
        result = function(*args, **kwargs)
        outputs = differentiable(written(function, args, result))
        if not any(tensor.requires_grad for tensor in outputs):  # a shape, a device, a detached value
            return result
        _refuse_nested(function, outputs)
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self._record(Record(function, sources, shapes, others, outputs, _shapes(outputs), taints, value_free))
        return result

    def ruled_module(
        self, module: nn.Module, rule: GradientRule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Record a module with a rule as one operation."""
        read = [p for p in module.parameters() if id(p) in self.sources]
        if read:
            names, outputs = [self.sources[id(p)] for p in read], differentiable(out)
            taints, free = self._taints_of(tensors_of((args, kwargs))), [False] * len(read)
            # The module's inputs are not inspected.
            self._record(Record(module, names, _shapes(read), [], outputs, _shapes(outputs), taints, free))
        return out

    def _record(self, record: Record) -> None:
        record.in_model = self.depth > 0
        self.records.append(record)
        for tensor in record.outputs:
            if tensor.requires_grad:
                self.watched[id(tensor)] = tensor
                self.sources[id(tensor)] = len(self.records) - 1


def _refuse_nested(function: Function, tensors: Sequence[Tensor]) -> None:
    """Raise for nested tensors, because neither shapes nor gradients identify the samples of their rows."""
    if any(tensor.is_nested for tensor in tensors):
        raise UnsupportedModelError(
            f"{getattr(function, '__name__', function)} works with a nested tensor (torch.nested), whose rows hooks "
            "cannot assign to samples. Pad the samples, or put their rows into one tensor and sum them by sample "
            "(index_add), or use gradient_computer='iterative'."
        )


def _shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


def _memory(tensor: Tensor) -> int:
    """Return a key for a tensor's memory; it is negative, so that it differs from every ``id``."""
    return -1 - tensor.untyped_storage().data_ptr()


def _name_of(function: Function) -> str:
    """Return an operation's name; ``torch.f``, ``Tensor.f``, ``Tensor.f_`` and ``aten.f`` have the same name."""
    name: str = getattr(function, "__name__", "").partition(".")[0]
    return name if name.startswith("__") else name.rstrip("_")


def _parts_of(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BY_VALUE = _names(
    "nonzero nonzero_static argwhere masked_select unique unique_consecutive unique_dim bincount"
)
_CHOOSING_BY_ARGUMENTS = _names("__getitem__ repeat_interleave where")
_READING_METHODS = ("item", "tolist", "numpy", "__array__", "__int__", "__float__", "__bool__", "__index__")
_READING_OUT = frozenset(getattr(Tensor, name) for name in _READING_METHODS)
_FACTORIES = _names("arange zeros ones empty full eye tril_indices triu_indices rand randn")
_TAKING_SIZES = _names(
    "narrow expand repeat tile view reshape unflatten split split_with_sizes tensor_split chunk "
    "select roll new_zeros new_ones new_empty new_full"
)
_LIKE = _names("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty")
_RANDOM = _names("rand randn randint randperm bernoulli multinomial normal rand_like randint_like")
_READING_AT = _names("gather index_select take_along_dim")
_WRITING_AT = _names("index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce")


def _chooses_by_value(call: _Call) -> bool:
    """Whether the arguments let the shape of a result depend on values, so that its rows may belong to any sample."""
    args = call.args
    if call.name == "__getitem__":
        parts = _parts_of(args["indices"])
        return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)
    if call.name == "repeat_interleave":  # of an input, or of the numbers of repetitions alone
        return isinstance(args.get("repeats", args.get("input")), Tensor)
    return call.name == "where" and len(args) == 1


def _num_read(name: str, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of tensor values that an operation passes to Python, which may slice samples by them."""
    if function in _READING_OUT:
        return int(args[0].numel())
    sizes: Any = ()  # the operation reads the values of tensors that are slice bounds or sizes
    if name in ("__getitem__", "__setitem__"):
        sizes = [(part.start, part.stop, part.step) for part in _parts_of(args[1]) if isinstance(part, slice)]
    elif name in _FACTORIES or name in _TAKING_SIZES:
        named = [value for key, value in kwargs.items() if key != "input"]
        sizes = (args[name in _TAKING_SIZES :], named)
    if not sizes:
        return 0
    return sum(int(leaf.numel()) for leaf in tensors_of(sizes) if not leaf.is_floating_point())


class _Call(NamedTuple):
    """An operation that may move entries by values, before it runs."""

    name: str
    function: Function
    args: Mapping[str, Any]
    """The arguments by name, also the positional ones."""
    value_free: Callable[[Any], bool]
    """Whether an index is the same for all batches of equal size."""


def _ordered(call: _Call) -> tuple[int, ...]:
    dim = call.args.get("dim", 0 if call.name == "msort" else -1)
    return (_size(call.args["input"], dim),)


def _along_one_axis(call: _Call) -> tuple[int, ...]:
    values, dim = call.args["input"], call.args.get("dim")
    index = call.args.get("indices", call.args.get("index"))
    if not isinstance(index, Tensor) or call.value_free(index):
        return ()
    if dim is None:  # take_along_dim without dim: all axes flattened
        return (int(values.numel()),)
    read = (_size(values, dim),)
    return (*read, _size(index, dim if index.dim() > 1 else 0)) if call.name in _WRITING_AT else read


def _anywhere(call: _Call) -> tuple[int, ...]:
    return () if call.value_free(call.args["index"]) else (int(call.args["input"].numel()),)


def _rows_of_a_table(call: _Call) -> tuple[int, ...]:
    if call.function is not torch.embedding:  # torch.nn.functional.embedding wraps it, with the other order
        return ()
    return () if call.value_free(call.args["indices"]) else (len(call.args["weight"]),)


def _by_subscript(call: _Call) -> tuple[int, ...]:
    values, has_brackets = call.args["input"], call.name.startswith("__")
    parts = _parts_of(call.args["indices"]) if has_brackets else call.args["indices"]
    axis, moved, fixed = 0, list[int](), False
    taken = sum(_axes_of(part, has_brackets) for part in parts)
    for part in parts:
        if part is Ellipsis:
            axis += values.dim() - taken
            continue
        if _is_index(part):
            if call.value_free(part):
                fixed = True
            else:
                moved.append(_size(values, axis))
        axis += _axes_of(part, has_brackets)
    if moved and not fixed and call.name in ("__setitem__", "index_put"):
        moved += [p.numel() if isinstance(p, Tensor) else len(p) for p in filter(_is_index, parts)]
    return tuple(moved)


def _axes_of(part: Any, has_brackets: bool) -> int:
    """Return how many axes one part of a subscript consumes."""
    if part is Ellipsis or isinstance(part, bool) or (part is None and has_brackets):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def _is_index(part: Any) -> bool:
    """Whether a part of a subscript is an integer index of several entries."""
    if isinstance(part, Tensor):
        return part.dtype not in (torch.bool, torch.uint8)
    return isinstance(part, Sequence) or bool(getattr(part, "ndim", 0))


def _size(values: Tensor, dim: int) -> int:
    return int(values.shape[dim]) if values.dim() else 1


_USUAL = ("input", "dim", "index")
_POSITIONS = {
    **dict.fromkeys(("take", "put"), ("input", "index")),
    "take_along_dim": ("input", "indices", "dim"),
    **dict.fromkeys(("__getitem__", "__setitem__", "index_put", "index"), ("input", "indices")),
    "topk": ("input", "k", "dim"),
    "repeat_interleave": ("input", "repeats"),
    "embedding": ("weight", "indices"),
}
"""Names of the positional arguments by name of the operation, if not the usual ones."""
_FINDERS: dict[str, Callable[[_Call], tuple[int, ...]]] = {
    **dict.fromkeys(("sort", "argsort", "msort", "topk"), _ordered),
    **dict.fromkeys(_READING_AT | _WRITING_AT, _along_one_axis),
    **dict.fromkeys(("take", "put"), _anywhere),
    **dict.fromkeys(("__getitem__", "__setitem__", "index_put", "index"), _by_subscript),
    "embedding": _rows_of_a_table,
}


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
