"""Operations whose rows may belong to any sample: routed experts, masked, sorted or ragged samples.

The sample of every row is identified from its gradient (:mod:`trak_lite.gradient_computers.hooks.owners`). Rows are
then grouped by sample, and the operation's rule is applied to the groups. An operation without a known row layout is
differentiated once per sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trak_lite.core.devices import add_at_
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.calls import Contribution, OperationCall, dense_of, flattened, rebuilt
from trak_lite.gradient_computers.hooks.owners import Arrangement, SampleCode, sketch
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis
from trak_lite.gradient_computers.hooks.plan.probe import Site, describe, mixed
from trak_lite.gradient_computers.hooks.rules.generic import looped
from trak_lite.gradient_computers.hooks.rules.operations import RULES, matrices_of
from trak_lite.types import FactoredBlock, LookupBlock

_FOUND, _GROUPED = "rows found by their gradients", "grouped matmul"
_OF_IMAGES = ("convolution", "transposed convolution", "group norm", "batch norm", "instance norm")


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of an operation's result, and the arguments with the same rows."""

    trailing: int
    """Number of last axes of the result that lie within one row."""
    read: tuple[tuple[Tensor, int], ...] = ()
    """Arguments with these rows, each with its number of axes within a row."""
    broadcast: bool = False
    """Whether to broadcast arguments to the result's shape first."""


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

    @classmethod
    def of(
        cls, site: Site, outputs: Sequence[Tensor], call: OperationCall | None, trailing: int, count: int
    ) -> RowTags:
        """Return the tags of a site; ``trailing`` is used if its rows are not known from the operation."""
        layout = row_layout(call, outputs[0]) if call is not None and len(outputs) == 1 else None
        axis = site.output_axes[0] if layout is not None and len(site.output_axes) == 1 else None
        trailing = trailing if layout is None else layout.trailing
        shape = outputs[0].shape
        axis = None if axis is None or axis.axis >= len(shape) - trailing else axis.for_shape(shape, count)
        return cls(site, tuple(tensor.dtype for tensor in outputs), trailing, axis)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Store sketches of the gradients of one weighted pass."""
        self.passes.append([None if grad is None else sketch(self.rows(grad)) for grad in grads])

    def rows(self, grad: Tensor) -> Tensor:
        """Return a gradient as ``(N, d)``."""
        lead = grad.shape[: grad.dim() - self.trailing]
        return grad.reshape(math.prod(lead), math.prod(grad.shape[len(lead) :]))

    def are_in_place(self, grad: Tensor, code: SampleCode) -> bool:
        """Whether the gradient of every row is known to belong to the sample that ``axis`` has there."""
        values = [grads[0] for grads in self.passes]
        if self.axis is None or not values or len(values) < code.num_digits:
            return False
        plain = sketch(self.rows(grad))
        scales = code.row_scales(self.axis, grad.shape[: grad.dim() - self.trailing], plain)
        for tagged, scale in zip(values, scales, strict=True):
            # A difference that is not finite is not zero either. Rounding is left to the search for owners.
            if tagged is None or bool((tagged * scale - plain).any()):
                return False
        return True

    def owners(self, grads: Sequence[Tensor | None], code: SampleCode) -> list[Tensor | None]:
        """Return the sample of every row of each result, ``(N,)``; -1 if the row's gradient is zero.

        Raises:
            UnsupportedModelError: If a row belongs to several samples, or a gradient is not finite.
        """
        owners = [
            None if grad is None else self._owners(index, grad, code) for index, grad in enumerate(grads)
        ]
        self.passes.clear()
        return owners

    def _owners(self, index: int, grad: Tensor, code: SampleCode) -> Tensor:
        plain = sketch(self.rows(grad))
        tagged = [grads[index] for grads in self.passes]
        weighted = [values for values in tagged if values is not None]
        if len(weighted) < code.num_digits:
            raise mixed(self.site, "not every weighted backward pass reached its result")
        exact = code.exact_owners(plain, weighted)
        if exact is not None:
            return exact
        if not bool(plain.isfinite().all()):
            raise UnsupportedModelError(
                f"The gradient of the result of {describe(self.site.function)}, which uses "
                f"{list(self.site.names)[:3]}, is not finite, so the samples of its rows cannot be found. Expected "
                "finite gradients; look for the sample that causes this, or use gradient_computer='functional' or "
                "'iterative'."
            )
        owners = code.owners(plain, weighted, grad.dtype)
        if owners is None:
            raise mixed(self.site, "f of several samples depends on one row of its result")
        return owners


def row_layout(call: OperationCall, result: Tensor) -> RowLayout | None:
    """Return the row layout of an operation, or ``None`` if it is not known."""
    kind, _ = RULES.get(call.function, (_GROUPED if call.function is torch._grouped_mm else "", None))
    trailing, valid = 1, True
    if kind in ("elementwise", "expansion"):
        return _of_elementwise(call, result)
    if kind == "embedding":
        _, ids = call.bind("weight", "indices")
        return RowLayout(1, ((ids, 0),))
    if kind == "linear":
        x = call.bind("input", "mat1")[call.function in (torch.addmm, Tensor.addmm)]
    elif kind == "matmul":
        x, right = matrices_of(call)
        valid = right.dim() == 2 and x.dim() >= 2
    elif kind in _OF_IMAGES:
        x, weight = call.bind("input", "weight")
        trailing = result.dim() - 1
        valid = x.dim() == result.dim() and len(x) == len(result)
        valid = valid and ("convolution" not in kind or weight.dim() == result.dim())
    elif kind in ("layer norm", "RMS norm"):
        x, shape = call.bind("input", "normalized_shape")
        trailing = len(shape)
    elif kind == _GROUPED:
        # Each group of rows times its own matrix of a stack: experts that rows are sorted by.
        x, weight, offsets, bias = call.bind("input", "mat2", "offs", "bias")
        valid = isinstance(x, Tensor) and isinstance(weight, Tensor) and offsets is not None and bias is None
        valid = valid and x.dim() == 2 and weight.dim() == 3 and x.dtype == result.dtype
    else:
        return None
    return RowLayout(trailing, ((x, trailing),)) if valid and not call.wants(x) else None


def _of_elementwise(call: OperationCall, result: Tensor) -> RowLayout | None:
    """Rows are indexed by the leading axes along which all parameters are broadcast."""
    tensors = [leaf for leaf in flattened(call.args, call.kwargs)[0] if isinstance(leaf, Tensor)]
    shapes = [leaf.shape for leaf in tensors if call.wants(leaf)]
    # An axis of size 1 in front of all others is one of these.
    trailing = max(
        (len(shape) - next((i for i, size in enumerate(shape) if size != 1), len(shape)) for shape in shapes),
        default=0,
    )
    others = [leaf for leaf in tensors if not call.wants(leaf)]
    if trailing == result.dim() or len(others) == len(tensors):
        return None
    return RowLayout(trailing, tuple((leaf, trailing) for leaf in others), broadcast=True)


def routed_contributions(
    call: OperationCall, grads: Sequence[Tensor | None], tags: RowTags, code: SampleCode
) -> tuple[str, list[tuple[Tensor, Contribution]]]:
    """Return the name of the method, and the operation's contribution to each parameter that it read.

    ``tags`` are from the weighted passes with the weights of ``code``.
    """
    grad = grads[0]
    layout = row_layout(call, grad) if grad is not None and len(grads) == 1 else None
    name, rule = RULES.get(call.function, (_GROUPED, None))
    if layout is not None and grad is not None and rule is not None and tags.are_in_place(grad, code):
        # An argument's rows are the result's; rules of broadcast arguments read no axis.
        axes = {} if layout.broadcast else {id(argument): tags.axis for argument, _ in layout.read}
        parts = list(rule(replace(call, axes={**call.axes, **axes}, output_axes=(tags.axis,)), grad))
        if parts:
            tags.passes.clear()
            return f"{name}, {_FOUND}", [(call.targets[id(argument)], part) for argument, part in parts]
    owners = tags.owners(grads, code)
    if layout is not None and grad is not None and owners[0] is not None:
        if rule is None:
            return f"{name}, {_FOUND}", _of_groups(call, grad, owners[0])
        contributions = _by_rule(call, layout, grad, Arrangement.of(owners[0]))
        if contributions is not None:
            return f"{name}, {_FOUND}", contributions
    return f"one backward of the operation per sample ({describe(call.function)})", _one_by_one(
        call, 0 if layout is None else layout.trailing, grads, owners
    )


def summed_by_sample(
    parts: Sequence[Tensor | FactoredBlock], grad: Tensor, tags: RowTags | None, code: SampleCode
) -> Sequence[Tensor | FactoredBlock]:
    """Return per-row gradients ``(N, ...)``, or their factors, summed over the rows of each sample.

    Without ``tags`` they are those of samples already. ``grad`` is the gradient of the rows.
    """
    if tags is None:
        return parts
    (owners,) = tags.owners([grad], code)
    assert owners is not None
    kept, arranged, count = owners >= 0, Arrangement.of(owners), code.count

    def summed(part: Tensor | FactoredBlock) -> Tensor | FactoredBlock:
        if isinstance(part, Tensor):
            return add_at_(part.new_zeros(count, *part.shape[1:]), 0, owners[kept], part[kept])
        taken = arranged.take(part.inputs), arranged.take_gradients(part.output_grads)
        positions = arranged.length * part.inputs.shape[1]
        inputs, grads = (value.reshape(len(arranged.samples), positions, value.shape[2]) for value in taken)
        return FactoredBlock("", arranged.placed(inputs, count), arranged.placed(grads, count))

    return list(map(summed, parts))


def _one_by_one(
    call: OperationCall, trailing: int, grads: Sequence[Tensor | None], owners: Sequence[Tensor | None]
) -> list[tuple[Tensor, Contribution]]:
    """Differentiate the operation once per sample that has a row, with the other samples' gradients set to zero."""
    samples = torch.unique(torch.cat([owner for owner in owners if owner is not None])).tolist()

    def of(sample: int, grad: Tensor, owner: Tensor) -> Tensor:
        lead = grad.shape[: grad.dim() - trailing]
        return grad * (owner == sample).view(*lead, *(1,) * trailing)

    def alone(sample: int) -> list[Tensor | None]:
        pairs = zip(grads, owners, strict=True)
        return [None if grad is None or owner is None else of(sample, grad, owner) for grad, owner in pairs]

    parts = looped(call, [sample for sample in samples if sample >= 0], alone)
    return [(call.targets[id(argument)], part) for argument, part in parts]


def _by_rule(
    call: OperationCall, layout: RowLayout, grad: Tensor, arranged: Arrangement
) -> list[tuple[Tensor, Contribution]] | None:
    """Apply the operation's rule to its rows, grouped by sample."""
    if not arranged.length:
        return []
    count = call.num_samples
    rows = grad.reshape(-1, *grad.shape[grad.dim() - layout.trailing :])
    row_call = _arranged_call(call, layout, grad.shape, arranged)
    parts = list(RULES[call.function][1](row_call, arranged.take_gradients(rows)))
    if not parts:
        return None
    contributions: list[tuple[Tensor, Contribution]] = []
    for argument, part in parts:
        target, placed = row_call.targets[id(argument)], partial(arranged.placed, count=count)
        if isinstance(part, FactoredBlock):
            part = FactoredBlock("", placed(part.inputs), placed(part.output_grads))
        elif isinstance(part, LookupBlock):
            part = LookupBlock("", placed(part.rows), placed(part.values), part.num_rows)
        else:
            part = placed(dense_of(part, target.shape))
        contributions.append((target, part))
    return contributions


def _of_groups(call: OperationCall, grad: Tensor, owners: Tensor) -> list[tuple[Tensor, Contribution]]:
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
    row_call = replace(call, args=args, kwargs=kwargs, num_samples=count, targets=targets, keep_factors=False)
    return replace(row_call, axes=axes, output_axes=(axis,))
