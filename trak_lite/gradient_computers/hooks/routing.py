"""Operations whose rows may belong to any sample: routed experts, masked, sorted or ragged samples.

The sample of every row is identified from its gradient (:mod:`trak_lite.gradient_computers.hooks.owners`). Rows are
then grouped by sample, and the operation's rule is applied to the groups. An operation without a known row layout is
differentiated once per sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trak_lite._devices import add_at_
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.calls import Contribution, Factors, Lookups, OperationCall, dense_of
from trak_lite.gradient_computers.hooks.owners import Arrangement, SampleCode, sketch
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis
from trak_lite.gradient_computers.hooks.plan.probe import Site, describe, mixed
from trak_lite.gradient_computers.hooks.plan.rearranging import flattened, rebuilt
from trak_lite.gradient_computers.hooks.rules.generic import looped
from trak_lite.gradient_computers.hooks.rules.operations import RULES, matrices_of

__all__ = [
    "RowLayout",
    "RowScales",
    "RowTags",
    "contributions_in_place",
    "expected_axis",
    "routed_contributions",
    "row_layout",
    "summed_by_owner",
]

_FOUND = "rows found by their gradients"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of an operation's result, and the arguments with the same rows."""

    trailing: int
    """Number of last axes of the result that lie within one row."""
    read: tuple[tuple[Tensor, int], ...] = ()
    """Arguments with these rows, each with its number of axes within a row."""
    broadcast: bool = False
    """Whether to broadcast arguments to the result's shape first."""


@dataclass(eq=False)
class RowScales:
    """Caches :meth:`SampleCode.row_scales` during one pass."""

    _code: SampleCode
    _known: dict[Any, list[Tensor]] = field(default_factory=dict)

    def of(self, axis: BatchAxis, lead: torch.Size, like: Tensor) -> list[Tensor]:
        """Return the scales of rows indexed by axes of this shape."""
        key = axis, lead, like.dtype, like.device
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._code.row_scales(axis, lead, like.dtype, like.device)
        return found


@dataclass(slots=True)
class RowTags:
    """Gradients of one operation's results in the weighted backward passes."""

    site: Site
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of the differentiable results."""
    trailing: int = 0
    """Number of axes of a result within one row; 0 if every entry is a row."""
    axis: BatchAxis | None = None
    """Where the rows of the only result probably are; the weighted passes show whether they are there."""
    passes: list[list[Tensor | None]] = field(default_factory=list)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Store sketches of the gradients of one weighted pass; does nothing if the site is not routed."""
        if not self.site.routed:
            return
        self.passes.append([None if grad is None else sketch(self.rows(grad)) for grad in grads])

    def rows(self, grad: Tensor) -> Tensor:
        """Return a gradient as ``(N, d)``."""
        lead = grad.shape[: grad.dim() - self.trailing]
        return grad.reshape(math.prod(lead), math.prod(grad.shape[len(lead) :]))

    def are_in_place(self, grad: Tensor, scales: RowScales) -> bool:
        """Whether the gradient of every row is known to belong to the sample that ``axis`` has there."""
        values = [grads[0] for grads in self.passes]
        if self.axis is None or not values:
            return False
        plain = sketch(self.rows(grad))
        lead = grad.shape[: grad.dim() - self.trailing]
        for tagged, scale in zip(values, scales.of(self.axis, lead, plain), strict=True):
            # A difference that is not finite is not zero either. Rounding is left to the search for owners.
            if tagged is None or bool((tagged * scale - plain).any()):
                return False
        return True

    def owners(self, grads: Sequence[Tensor | None], code: SampleCode) -> list[Tensor | None]:
        """Return the sample of every row of each result, ``(N,)``; -1 if the row's gradient is zero.

        Raises:
            UnsupportedModelError: If a row belongs to several samples, or a gradient is not finite.
        """
        found = [
            None if grad is None else self._owners(place, grad, code) for place, grad in enumerate(grads)
        ]
        self.passes.clear()
        return found

    def _owners(self, place: int, grad: Tensor, code: SampleCode) -> Tensor:
        plain = sketch(self.rows(grad))
        tagged = [grads[place] for grads in self.passes]
        weighted = [values for values in tagged if values is not None]
        if not weighted and code.count > 1:
            raise mixed(self.site, "no weighted backward pass reached its result")
        exact = code.exact_owners(plain, weighted)
        if exact is not None:
            return exact
        if not bool(plain.isfinite().all()):
            raise UnsupportedModelError(
                f"The gradient of the result of {describe(self.site.function)}, which uses "
                f"{list(self.site.names)[:3]}, is not finite, so the samples of its rows cannot be found. Expected "
                "finite gradients; look for the sample that causes this, or use another gradient computer."
            )
        found = code.owners(plain, weighted, grad.dtype)
        if found is None:
            raise mixed(self.site, "f of several samples depends on one row of its result")
        return found


def row_layout(call: OperationCall, result: Tensor) -> RowLayout | None:
    """Return the row layout of an operation, or ``None`` if it is not known."""
    if call.function is torch._grouped_mm:
        return _of_grouped_matmul(call, result)
    kind, _ = RULES.get(call.function, ("", None))
    find = _LAYOUTS.get(kind)
    return None if find is None else find(call, result)


def routed_contributions(
    call: OperationCall, grads: Sequence[Tensor | None], owners: Sequence[Tensor | None]
) -> tuple[str, list[tuple[Tensor, Contribution]]]:
    """Return the name of the method, and the operation's contribution to each parameter that it read.

    Args:
        call: The operation.
        grads: Gradients of its differentiable results.
        owners: The sample of every row of each result.
    """
    grad, owner = grads[0], owners[0]
    layout = row_layout(call, grad) if grad is not None and len(grads) == 1 else None
    if layout is not None and grad is not None and owner is not None:
        if call.function is torch._grouped_mm:
            return f"grouped matmul, {_FOUND}", _of_groups(call, layout, grad, owner)
        parts = _by_rule(call, layout, grad, Arrangement.of(owner))
        if parts is not None:
            return f"{RULES[call.function][0]}, {_FOUND}", parts
    return f"one backward of the operation per sample ({describe(call.function)})", _one_by_one(
        call, 0 if layout is None else layout.trailing, grads, owners
    )


def expected_axis(site: Site, layout: RowLayout | None, result: Tensor, count: int) -> BatchAxis | None:
    """Return the axis on which a routed site's rows probably are, or ``None`` if it is not known."""
    axis = site.output_axes[0] if layout is not None and len(site.output_axes) == 1 else None
    if layout is None or axis is None or axis.axis >= result.dim() - layout.trailing:
        return None
    return axis.for_shape(result.shape, count)


def contributions_in_place(
    call: OperationCall, grad: Tensor | None, tags: RowTags, scales: RowScales
) -> tuple[str, list[tuple[Tensor, Contribution]]] | None:
    """Return what :func:`routed_contributions` does if rows are where they are expected; ``None`` otherwise.

    ``None`` also if no rule applies.
    """
    if tags.axis is None or grad is None or not tags.are_in_place(grad, scales):
        return None
    layout = row_layout(call, grad)
    if layout is None or call.function not in RULES:
        return None
    axes = dict(call.axes)
    if not layout.broadcast:  # an argument's rows are the result's; rules of broadcast arguments read no axis
        axes.update((id(argument), tags.axis) for argument, _ in layout.read)
    name, rule = RULES[call.function]
    parts = list(rule(replace(call, axes=axes, output_axes=(tags.axis,)), grad))
    if not parts:
        return None
    tags.passes.clear()
    return f"{name}, {_FOUND}", [(call.targets[id(argument)], part) for argument, part in parts]


def summed_by_owner(part: Contribution, owners: Tensor, count: int) -> Contribution:
    """Return per-row gradients ``(N, ...)``, or their factors, summed over the rows of each sample."""
    if not isinstance(part, Factors):
        part, kept = dense_of(part), owners >= 0
        return add_at_(part.new_zeros(count, *part.shape[1:]), 0, owners[kept], part[kept])
    arranged = Arrangement.of(owners)
    if not arranged.length:
        return Factors(*(value.new_zeros(count, 0, value.shape[2]) for value in part))
    by_sample = (-1, arranged.length * part.inputs.shape[1])
    inputs = arranged.take(part.inputs).reshape(*by_sample, part.inputs.shape[2])
    grads = arranged.take_gradients(part.output_grads).reshape(*by_sample, part.output_grads.shape[2])
    return Factors(arranged.placed(inputs, count), arranged.placed(grads, count))


def _one_by_one(
    call: OperationCall, trailing: int, grads: Sequence[Tensor | None], owners: Sequence[Tensor | None]
) -> list[tuple[Tensor, Contribution]]:
    """Differentiate the operation once per sample that has a row, with the other samples' gradients set to zero."""
    every = torch.cat([owner for owner in owners if owner is not None])
    found = torch.unique(every).tolist()

    def alone(sample: int) -> list[Tensor | None]:
        masked: list[Tensor | None] = []
        for grad, owner in zip(grads, owners, strict=True):
            if grad is None or owner is None:
                masked.append(None)
                continue
            lead = grad.shape[: grad.dim() - trailing]
            masked.append(grad * (owner == sample).view(*lead, *(1,) * trailing))
        return masked

    parts = looped(call, [sample for sample in found if sample >= 0], alone)
    return [(call.targets[id(argument)], part) for argument, part in parts]


def _by_rule(
    call: OperationCall, layout: RowLayout, grad: Tensor, arranged: Arrangement
) -> list[tuple[Tensor, Contribution]] | None:
    """Apply the operation's rule to its rows, grouped by sample."""
    if not arranged.length:
        return []
    count = call.num_samples
    rows = grad.reshape(-1, *grad.shape[grad.dim() - layout.trailing :])
    own = _arranged_call(call, layout, grad.shape, arranged)
    parts = list(RULES[call.function][1](own, arranged.take_gradients(rows)))
    if not parts:
        return None
    found: list[tuple[Tensor, Contribution]] = []
    for argument, part in parts:
        target = own.targets[id(argument)]
        if isinstance(part, Factors):
            found.append((target, Factors(*(arranged.placed(value, count) for value in part))))
        elif isinstance(part, Lookups):
            rows, values = (arranged.placed(value, count) for value in part[:2])
            found.append((target, Lookups(rows, values, part.num_rows)))
        else:
            rows = dense_of(part)
            found.append((target, arranged.placed(rows.reshape(len(rows), *target.shape), count)))
    return found


def _of_groups(
    call: OperationCall, layout: RowLayout, grad: Tensor, owners: Tensor
) -> list[tuple[Tensor, Contribution]]:
    """Return the gradients of the stacked matrices ``(E, d_in, d_out)`` that a grouped product reads."""
    x, weight, offsets = call.bind("input", "mat2", "offs")
    num_groups = len(weight)
    group = torch.searchsorted(
        offsets, torch.arange(len(x), device=x.device, dtype=offsets.dtype), right=True
    )
    # Rows beyond the last offset are in no group; torch leaves them undefined.
    keys = torch.where((owners >= 0) & (group < num_groups), owners * num_groups + group, -1)
    arranged = Arrangement.of(keys)
    total = grad.new_zeros(call.num_samples * num_groups, *weight.shape[1:])
    if arranged.length:
        inputs, grads = arranged.take(x), arranged.take_gradients(grad)
        padded = (len(arranged.samples), arranged.length)
        products = inputs.view(*padded, -1).transpose(1, 2) @ grads.view(*padded, -1)
        total.index_copy_(0, arranged.samples, products.to(total.dtype))
    return [(call.targets[id(weight)], total.view(call.num_samples, *weight.shape))]


def _arranged_call(
    call: OperationCall, layout: RowLayout, shape: torch.Size, arranged: Arrangement
) -> OperationCall:
    """Return the call on the rows of the K samples that have rows, with ``length`` rows each on axis 0."""
    axis = BatchAxis(0, arranged.length)
    trailing = {id(argument): number for argument, number in layout.read}
    axes: dict[int, BatchAxis | None] = {}
    targets: dict[int, Tensor] = {}

    def changed(leaf: Any) -> Any:
        new = leaf
        if id(leaf) in trailing:
            full = leaf.expand(shape) if layout.broadcast else leaf
            new = arranged.take(full.reshape(-1, *full.shape[full.dim() - trailing[id(leaf)] :]))
            axes[id(new)] = axis
        elif id(leaf) in call.targets:
            if layout.broadcast:  # the axes before those of a row have size 1
                new = leaf.reshape(leaf.shape[max(leaf.dim() - layout.trailing, 0) :])
            targets[id(new)] = call.targets[id(leaf)]
        return new

    leaves, spec = flattened(call.args, call.kwargs)
    args, kwargs = rebuilt([changed(leaf) for leaf in leaves], spec)
    count = len(arranged.samples)
    own = replace(call, args=args, kwargs=kwargs, num_samples=count, targets=targets, keep_factors=False)
    return replace(own, axes=axes, output_axes=(axis,))


# Rows by kind of operation

_Find = Callable[[OperationCall, Tensor], RowLayout | None]


def _of_linear(call: OperationCall, result: Tensor) -> RowLayout | None:
    first, second = call.bind("input", "mat1")
    x = second if call.function in (torch.addmm, Tensor.addmm) else first
    return None if call.wants(x) else RowLayout(1, ((x, 1),))


def _of_matmul(call: OperationCall, result: Tensor) -> RowLayout | None:
    left, right = matrices_of(call)
    if call.wants(left) or right.dim() != 2 or left.dim() < 2:
        return None
    return RowLayout(1, ((left, 1),))


def _of_images(call: OperationCall, result: Tensor) -> RowLayout | None:
    (x,) = call.bind("input")
    if call.wants(x) or x.dim() != result.dim() or len(x) != len(result):
        return None
    return RowLayout(result.dim() - 1, ((x, x.dim() - 1),))


def _of_convolution(call: OperationCall, result: Tensor) -> RowLayout | None:
    _, weight = call.bind("input", "weight")
    return _of_images(call, result) if weight.dim() == result.dim() else None


def _of_norm(call: OperationCall, result: Tensor) -> RowLayout | None:
    x, shape = call.bind("input", "normalized_shape")
    return None if call.wants(x) else RowLayout(len(shape), ((x, len(shape)),))


def _of_grouped_matmul(call: OperationCall, result: Tensor) -> RowLayout | None:
    """Rows of a product of each group of rows with its own matrix of a stack: experts that rows are sorted by."""
    x, weight, offsets, bias = call.bind("input", "mat2", "offs", "bias")
    known = isinstance(x, Tensor) and isinstance(weight, Tensor) and offsets is not None and bias is None
    if not known or x.dim() != 2 or weight.dim() != 3 or call.wants(x) or x.dtype != result.dtype:
        return None
    return RowLayout(1, ((x, 1),))


def _of_embedding(call: OperationCall, result: Tensor) -> RowLayout | None:
    _, ids = call.bind("weight", "indices")
    return RowLayout(1, ((ids, 0),))


def _of_elementwise(call: OperationCall, result: Tensor) -> RowLayout | None:
    """Rows are indexed by the leading axes along which all parameters are broadcast."""
    tensors = [leaf for leaf in flattened(call.args, call.kwargs)[0] if isinstance(leaf, Tensor)]
    trailing = max(
        (leaf.dim() - _leading_ones(leaf.shape) for leaf in tensors if call.wants(leaf)), default=0
    )
    others = [leaf for leaf in tensors if not call.wants(leaf)]
    if trailing == result.dim() or len(others) == len(tensors):
        return None
    return RowLayout(trailing, tuple((leaf, trailing) for leaf in others), broadcast=True)


def _leading_ones(shape: Sequence[int]) -> int:
    return next((place for place, size in enumerate(shape) if size != 1), len(shape))


_LAYOUTS: dict[str, _Find] = {
    "linear": _of_linear,
    "matmul": _of_matmul,
    "convolution": _of_convolution,
    "transposed convolution": _of_convolution,
    "embedding": _of_embedding,
    "layer norm": _of_norm,
    "RMS norm": _of_norm,
    "group norm": _of_images,
    "batch norm": _of_images,
    "instance norm": _of_images,
    "elementwise": _of_elementwise,
    "expansion": _of_elementwise,
}
"""Functions that find the row layout, by the name of the operation's rule."""
