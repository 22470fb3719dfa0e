"""Recording of a forward pass: the operations that depend on kept parameters, and what is known of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.plan.interception import AbstractInterceptor, Function
from trak_lite.gradient_computers.hooks.plan.rearranging import PACKED, examine
from trak_lite.gradient_computers.hooks.registry import GradientRule
from trak_lite.gradient_computers.recording import leaves_of, tensors_of

__all__ = ["Record", "Recorder", "differentiable", "grows_twice", "is_in_place", "written"]

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
    return args[0] if is_in_place(function) and isinstance(args[0], Tensor) else result


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
        packed = _PACKED_ROWS in self.taints and self.function not in PACKED
        return packed or _MOVED in self.taints


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

    def __init__(self, kept: Mapping[str, nn.Parameter], smaller: Recorder | None = None) -> None:
        """Prepare a forward pass; ``smaller`` recorded a smaller batch, and shows the axes that grow."""
        super().__init__()
        self.watched = {id(parameter): parameter for parameter in kept.values()}
        self.sources: dict[int, Any] = {id(parameter): name for name, parameter in kept.items()}
        self.records: list[Record] = []
        self.taints: dict[int, tuple[Any, frozenset[str]]] = {}
        """Tensors whose rows may belong to any sample, and tensors computed from them, with the reasons; by ``id``, and
        for tensors written in place also by memory key."""
        self.seen: list[_Seen] = []
        self.reads: list[tuple[int, int]] = []
        """One entry per read of tensor values by Python: the number of records so far, and the number of values."""
        self.read_by_model = 0
        """Number of values that Python read while the model ran, not the output function."""
        self.reads_only_quantifiers = True
        """Whether all of these are results of ``all`` or ``any`` over the whole batch, read one at a time."""
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
        """Run a torch operation, and record how it moves rows."""
        kwargs = kwargs or {}
        if self.looks_away:
            return func(*args, **kwargs)
        found = examine(func, args, kwargs, self._is_value_free, bool(self.reads))
        reasons = set(self._taints_of((args, dict(kwargs))))
        result = super().__torch_function__(func, types, args, kwargs)
        tensors = tensors_of(written(func, args, result))
        if found.num_read:
            self.reads.append((len(self.records), found.num_read))
            if self.depth:
                self.read_by_model += found.num_read
                of_quantifier = bool(args) and id(args[0]) in self._quantifiers
                self.reads_only_quantifiers &= of_quantifier and found.num_read == 1
        if getattr(func, "__name__", "") in ("all", "any"):
            self._quantifiers.update((id(t), t) for t in tensors)
        if found.is_value_free:
            self._value_free.update((id(t), (t, t._version)) for t in tensors)
        seen = _Seen(func, found.moved, _shapes(tensors))
        if self._moves(seen, found.is_value_free) or found.chooses_by_value:
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
        return [seen.function for seen in self.seen] == [seen.function for seen in other.seen]

    def renamed(self, old: Tensor, new: Tensor) -> None:
        """Track ``new`` in place of ``old``, an input of a sharded module."""
        if id(old) in self.taints:
            self.taints[id(new)] = (new, self.taints[id(old)][1])
        if id(old) in self.watched:
            self.watched[id(new)] = new
            self.sources[id(new)] = self.sources[id(old)]

    def _moves(self, seen: _Seen, same_in_all: bool) -> bool:
        """Whether an operation moves samples' rows by values, compared with the same operation in the smaller batch."""
        place = len(self.seen)
        self.seen.append(seen)
        if self._smaller is None:
            return False
        other = self._smaller[place] if place < len(self._smaller) else None
        if other is not None and other.function != seen.function:
            self._smaller = self._smaller[:place]  # later operations cannot be compared
            other = None
        if seen.moved and (other is None or seen.moved != other.moved):
            return True
        if other is None or same_in_all or len(seen.shapes) != len(other.shapes):
            return False
        # A matrix product with a result of which two axes grow moves rows according to its values.
        return any(map(grows_twice, seen.shapes, other.shapes))

    def _is_value_free(self, index: Any) -> bool:
        """Whether an index is known to be the same for all batches of equal size."""
        if not isinstance(index, Tensor):
            return not self.reads
        known = self._value_free.get(id(index))
        return known is not None and known[1] == index._version

    def _taint(self, function: Function, tensors: Sequence[Tensor], reasons: frozenset[str]) -> None:
        for place, tensor in enumerate(tensors):
            # The last states of a recurrent layer have a batch axis again.
            own = reasons - {_PACKED_ROWS} if function in PACKED and place else reasons
            if own:
                self.taints[id(tensor)] = (tensor, own)
            if own and is_in_place(function):  # other tensors on this memory hold the same rows
                self.taints[_memory(tensor)] = (tensor, own)

    def _taints_of(self, arguments: Any) -> frozenset[str]:
        leaves = tensors_of(arguments) if self.taints else []
        keys = [key for leaf in leaves for key in (id(leaf), _memory(leaf)) if key in self.taints]
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
        taints = self._taints_of(leaves)
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
            # The module's inputs are not inspected.
            reads = _shapes(read), list[Any](), outputs, _shapes(outputs), self._taints_of((args, kwargs))
            self._record(Record(module, names, *reads, [False] * len(read)))
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
