"""One operation that reads kept parameters, and its contributions to their per-sample gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis, by_sample
from trak_lite.gradient_computers.hooks.plan.probe import describe
from trak_lite.gradient_computers.randomness import RandomState
from trak_lite.gradient_computers.recording import ENTRIES, by_name
from trak_lite.types import FactoredBlock, LookupBlock, SummedBlock


class Pieces(NamedTuple):
    """Dense per-sample gradients, formed for some samples at a time."""

    num_samples: int
    step: int
    """Samples whose gradients fit into the processor's cache."""
    form: Callable[[slice], Tensor]
    """Returns the gradients ``(b, *parameter.shape)`` of some samples."""

    def formed(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first sample of every piece, and the gradients."""
        for first in range(0, self.num_samples, self.step):
            yield first, self.form(slice(first, first + self.step))


Contribution: TypeAlias = Tensor | Pieces | FactoredBlock | LookupBlock | SummedBlock
"""A dense gradient ``(B, *parameter.shape)``, whole or in pieces, or a block that has no name yet."""


@dataclass(slots=True)
class OperationCall:
    """An operation that reads kept parameters and whose result has a batch axis. All tensors are detached."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_samples: int
    targets: dict[int, Tensor]
    """The parameters (or tensors computed from them) to differentiate, by ``id`` of the argument in their place."""
    axes: dict[int, BatchAxis | None] = field(default_factory=dict)
    """Batch axis of every tensor argument, by ``id``."""
    output_axes: tuple[BatchAxis | None, ...] = ()
    """Batch axis of every differentiable result."""
    keep_factors: bool = False
    """Whether to return factors even if the gradients have fewer entries."""
    sliceable: bool = True
    """Whether the operation on one sample's slices is the same operation (no argument counts the samples)."""
    outputs: tuple[Any, ...] = ()
    """Results that a rule needs besides the arguments (the argmax of a max)."""
    random: RandomState | None = None
    """Generator states before the operation, if it drew random numbers."""
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors that the rule reads, with their version counters in the forward pass."""

    @property
    def output_axis(self) -> BatchAxis:
        """Batch axis of the first differentiable result; few operations have more than one."""
        axis = self.output_axes[0]
        assert axis is not None
        return axis

    def bind(self, *names: str) -> list[Any]:
        """Return the arguments under these names, in order; a missing one is ``None``."""
        if not self.kwargs:
            return [*self.args[: len(names)], *[None] * (len(names) - len(self.args))]
        arguments = by_name(names, self.args, self.kwargs)
        return [arguments.get(name) for name in names]

    def wants(self, value: Any) -> bool:
        """Whether gradients are kept for this argument."""
        return isinstance(value, Tensor) and id(value) in self.targets

    def axis_of(self, tensor: Tensor) -> BatchAxis | None:
        """Return the batch axis of an argument."""
        return self.axes.get(id(tensor))

    def samples(self, tensor: Tensor) -> Tensor:
        """Return an argument with a batch axis as ``(B, *sample)``."""
        axis = self.axis_of(tensor)
        assert axis is not None
        return by_sample(tensor, axis, self.num_samples)

    def output_samples(self, tensor: Tensor) -> Tensor:
        """Return a tensor shaped like the result as ``(B, *sample)``."""
        return by_sample(tensor, self.output_axis, self.num_samples)


Parts: TypeAlias = Iterator[tuple[Tensor, Contribution]]
"""Arguments of an operation, each with a contribution to its gradient."""
OperationRule: TypeAlias = Callable[[OperationCall, Tensor], Parts]
"""``rule(call, output_grad)``; it yields nothing if it does not apply."""
_SIZES = frozenset({tuple, list, torch.Size})
_TRANSPOSITIONS = frozenset(
    {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__, Tensor.transpose, torch.transpose}  # type: ignore[attr-defined]
)


def conjugate(value: Any) -> Any:
    """Return the conjugate of a complex factor: autograd's gradient of a product has it for the other factor."""
    if isinstance(value, Tensor):
        return value.conj() if value.is_complex() else value
    return value.conjugate() if isinstance(value, complex) else value


def dense_of(part: Contribution, shape: Sequence[int]) -> Tensor:
    """Return a contribution to a parameter of this shape as one tensor ``(B, *shape)``."""
    if isinstance(part, Pieces):
        part = torch.cat([grads for _, grads in part.formed()])
    rows = part if isinstance(part, Tensor) else part.dense()
    return rows.reshape(rows.shape[0], *shape)


def transposed(part: Contribution, shape: Sequence[int]) -> Contribution:
    """Convert a contribution to a matrix of this shape into one to its transpose."""
    if isinstance(part, FactoredBlock):
        return FactoredBlock("", part.output_grads, part.inputs)
    return dense_of(part, shape).transpose(1, 2)


def is_transpose(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], result: Tensor) -> bool:
    """Whether the result is the transpose of the first argument, a matrix."""
    if function not in _TRANSPOSITIONS or result.dim() != 2:
        return False
    arguments = by_name(("input", "dim0", "dim1"), args, kwargs)
    axes = [axis % 2 for axis in arguments.values() if isinstance(axis, int)]
    return arguments["input"].dim() == 2 and axes in ([], [0, 1], [1, 0])


def merged(parts: Sequence[Contribution], shape: torch.Size, *, keep_factors: bool = False) -> Contribution:
    """Return the sum of the contributions to one parameter; factors and rows are concatenated, not summed."""
    if len(parts) == 1:
        return parts[0]
    tables = [part for part in parts if isinstance(part, LookupBlock)]
    products = [part for part in parts if isinstance(part, FactoredBlock)]
    summands: list[Contribution] = []
    if tables:
        rows, values = torch.cat([t.rows for t in tables], 1), torch.cat([t.values for t in tables], 1)
        summands.append(LookupBlock("", rows, values, tables[0].num_rows))
    if products:
        summands.append(_one_product(products, shape, keep_factors))
    summands += [part for part in parts if not isinstance(part, LookupBlock | FactoredBlock)]
    if len(summands) == 1:
        return summands[0]
    blocks = [part for part in summands if isinstance(part, LookupBlock | FactoredBlock)]
    if len(blocks) == len(summands):
        return SummedBlock("", tuple(blocks))
    return functools.reduce(torch.add, [dense_of(part, shape) for part in summands])


def _one_product(parts: Sequence[FactoredBlock], shape: torch.Size, keep_factors: bool) -> Contribution:
    """Concatenate all factors; contract them if that is smaller, unless ``keep_factors``."""
    if len(parts) == 1:
        return parts[0]
    inputs, grads = [part.inputs for part in parts], [part.output_grads for part in parts]
    positions = sum(x.shape[1] for x in inputs)
    if keep_factors or positions * (inputs[0].shape[2] + grads[0].shape[2]) <= 4 * shape.numel():
        return FactoredBlock("", torch.cat(inputs, 1), torch.cat(grads, 1))
    return functools.reduce(torch.add, [dense_of(part, shape) for part in parts])


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec | None]:
    """Return the leaves of the arguments, like ``tree_flatten``; sizes count as one leaf if all are positional.

    The structure is ``None`` then.
    """
    if not kwargs:
        for arg in args:
            is_leaf = type(arg) in ENTRIES or isinstance(arg, Tensor)
            if not is_leaf and not (type(arg) in _SIZES and all([type(entry) is int for entry in arg])):
                break
        else:
            return list(args), None
    return tree_flatten((args, dict(kwargs)))


def rebuilt(leaves: list[Any], spec: TreeSpec | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with these leaves: the inverse of :func:`flattened`."""
    if spec is None:
        return tuple(leaves), {}
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def refuse_changes(function: Any, versions: Sequence[tuple[Tensor, int]]) -> None:
    """Raise if a tensor that a rule reads has another version than in the forward pass."""
    for tensor, version in versions:
        if tensor._version != version:
            raise UnsupportedModelError(
                f"An input of {describe(function)} was changed in place after the operation read it, so its "
                "gradient cannot be formed. Make the later operation out of place (x = x + y, inplace=False)."
            )
