"""One operation that reads kept parameters, and its contributions to their per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis, by_sample
from trak_lite.gradient_computers.randomness import RandomState
from trak_lite.types import LookupBlock

__all__ = [
    "Contribution",
    "Factors",
    "Lookups",
    "OperationCall",
    "OperationRule",
    "Pieces",
    "conjugate",
    "dense_of",
    "merged",
    "transposed",
]


class Factors(NamedTuple):
    """Per-sample gradients of a matrix ``(d_out, d_in)`` as ``sum_t output_grads[t] (x) inputs[t]``."""

    inputs: Tensor
    """``(B, T, d_in)``."""
    output_grads: Tensor
    """``(B, T, d_out)``."""


class Lookups(NamedTuple):
    """Per-sample gradients of an embedding table ``(V, d)``, as the rows that each sample reads."""

    rows: Tensor
    """``(B, T)`` int64."""
    values: Tensor
    """``(B, T, d)``."""
    num_rows: int
    """V."""


class Summed(NamedTuple):
    """Per-sample gradients of a matrix used as a table and in a product: a tied embedding and head."""

    lookups: Lookups
    factors: Factors


class Pieces(NamedTuple):
    """Dense per-sample gradients, formed for some samples at a time."""

    num_samples: int
    """B."""
    step: int
    """Samples whose gradients fit into the processor's cache."""
    form: Callable[[slice], Tensor]
    """Returns the gradients ``(b, *parameter.shape)`` of some samples."""

    def formed(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first sample of every piece, and the gradients."""
        for first in range(0, self.num_samples, self.step):
            yield first, self.form(slice(first, first + self.step))


Contribution: TypeAlias = Tensor | Factors | Lookups | Summed | Pieces
"""A dense gradient ``(B, *parameter.shape)``, whole or in pieces, factors, rows of a table, or rows and factors."""


@dataclass(slots=True)
class OperationCall:
    """An operation that reads kept parameters and whose result has a batch axis. All tensors are detached."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_samples: int
    """B."""
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
    in_place: bool = False
    random: RandomState | None = None
    """Generator states before the operation, if it drew random numbers."""
    method: str = ""
    """How the gradients were computed, for the report."""
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
        given = dict(zip(names, self.args, strict=False))
        given.update(self.kwargs)
        return [given.get(name) for name in names]

    def wants(self, value: Any) -> bool:
        """Whether gradients are kept for this argument."""
        return isinstance(value, Tensor) and id(value) in self.targets

    def axis_of(self, tensor: Tensor) -> BatchAxis | None:
        """Return the batch axis of an argument."""
        return self.axes.get(id(tensor))

    def samples(self, tensor: Tensor) -> Tensor:
        """Return an argument as ``(B, *sample)``."""
        axis = self.axis_of(tensor)
        if axis is None:
            return tensor.unsqueeze(0).expand(self.num_samples, *tensor.shape)
        return by_sample(tensor, axis, self.num_samples)

    def output_samples(self, tensor: Tensor) -> Tensor:
        """Return a tensor shaped like the result as ``(B, *sample)``."""
        return by_sample(tensor, self.output_axis, self.num_samples)


OperationRule: TypeAlias = Callable[[OperationCall, Tensor], Iterator[tuple[Tensor, Contribution]]]
"""``rule(call, output_grad)`` yields pairs of argument and contribution; nothing if it does not apply."""


def conjugate(value: Any) -> Any:
    """Return the conjugate of a complex factor: autograd's gradient of a product has it for the other factor."""
    is_complex = value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)
    return (
        value.conj()
        if isinstance(value, Tensor) and is_complex
        else value.conjugate()
        if is_complex
        else value
    )


def dense_of(part: Contribution) -> Tensor:
    """Return a contribution as one tensor ``(B, ...)``; factors give ``(B, d_out, d_in)``."""
    if isinstance(part, Tensor):
        return part
    if isinstance(part, Lookups):
        return LookupBlock("", *part).grad
    if isinstance(part, Summed):
        return dense_of(part.lookups) + dense_of(part.factors)
    if isinstance(part, Pieces):
        return torch.cat([grads for _, grads in part.formed()])
    return part.output_grads.transpose(1, 2) @ part.inputs


def transposed(part: Contribution) -> Contribution:
    """Convert a contribution to a matrix's transpose into one to the matrix."""
    if not isinstance(part, Factors):
        return dense_of(part).transpose(1, 2)
    return Factors(part.output_grads, part.inputs)


def merged(parts: list[Contribution], shape: torch.Size, *, keep_factors: bool = False) -> Contribution:
    """Return the sum of the contributions to one parameter; factors and rows are concatenated, not summed."""
    if len(parts) == 1:
        return parts[0]
    lookups = _one_lookup([part for part in parts if isinstance(part, Lookups)])
    factors = _one_product([part for part in parts if isinstance(part, Factors)], shape, keep_factors)
    others = [part for part in parts if not isinstance(part, Lookups | Factors)]
    if not others and isinstance(factors, Factors):
        return factors if lookups is None else Summed(lookups, factors)
    if not others and factors is None and lookups is not None:
        return lookups
    found = [part for part in (lookups, factors, *others) if part is not None]
    total = dense_of(found[0]).reshape(-1, *shape)
    for part in found[1:]:
        total = total + dense_of(part).reshape(total.shape)
    return total


def _one_lookup(parts: list[Lookups]) -> Lookups | None:
    """Concatenate the rows of all look-ups."""
    if not parts:
        return None
    rows, values, num_rows = zip(*parts, strict=True)
    return Lookups(torch.cat(rows, 1), torch.cat(values, 1), num_rows[0])


def _one_product(parts: list[Factors], shape: torch.Size, keep_factors: bool) -> Factors | Tensor | None:
    """Concatenate all factors; contract them if that is smaller, unless ``keep_factors``."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    inputs, grads = zip(*parts, strict=True)
    positions = sum(x.shape[1] for x in inputs)
    if keep_factors or positions * (inputs[0].shape[2] + grads[0].shape[2]) <= 4 * shape.numel():
        return Factors(torch.cat(inputs, 1), torch.cat(grads, 1))
    total = dense_of(parts[0])
    for part in parts[1:]:
        total = total + dense_of(part)
    return total
