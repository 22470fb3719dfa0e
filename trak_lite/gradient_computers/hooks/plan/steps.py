"""Steps: planned operations with what every pass over the same shapes would otherwise find again."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis
from trak_lite.gradient_computers.hooks.plan.interception import Function
from trak_lite.gradient_computers.hooks.plan.probe import Site

__all__ = ["Step"]


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One use of kept parameters by an operation with a rule, bound to the shapes of its arguments and its result.

    Only an operation on positional arguments that gives one new tensor can be bound. :meth:`fits` decides whether a
    later call is the same in all that the binding relies on.
    """

    site: Site
    function: Function
    key: Any
    """The signature by which a recomputation of the operation finds the site."""
    tensors: tuple[tuple[int, torch.Size, bool], ...]
    """Position and shape of every tensor argument, and whether it is one of ``targets``."""
    others: tuple[int, ...]
    """Positions of the other arguments."""
    targets: tuple[int, ...]
    """Positions of the arguments that are kept parameters, or values computed from them."""
    inputs: tuple[tuple[int, BatchAxis | None], ...]
    """Positions of the other tensors, with their batch axes."""
    shape: torch.Size
    """Of the result."""
    output_axes: tuple[BatchAxis | None, ...]
    """Batch axis of the result."""
    lean: bool
    """Whether the rule reads no input."""
    covers_base: bool
    """Whether the result is a view of all of a tensor that the operation allocates."""
    is_view: bool
    """Whether the result is a view."""
    num_bytes: int
    """Size of the result."""
    positions: tuple[int, int] | None
    """``(B, T)`` of ``x W^T + b`` with the samples on axis 0 of x, if x is no parameter; otherwise ``None``."""
    trailing: int = 0
    """Number of axes of the result within one row, if rows are routed."""
    row_axis: BatchAxis | None = None
    """Where routed rows probably are."""

    @classmethod
    def bound(
        cls,
        site: Site,
        key: Any,
        args: Sequence[Any],
        watched: Container[int],
        axes: Sequence[BatchAxis | None],
        result: Tensor,
        output_axes: tuple[BatchAxis | None, ...],
        lean: bool,
        covers_base: bool,
        num_samples: int,
        trailing: int = 0,
        row_axis: BatchAxis | None = None,
    ) -> Step:
        """Bind a call.

        Args:
            site: The plan's site of the operation.
            key: See the field.
            args: The positional arguments; there are no others.
            watched: The ``id`` of all kept parameters and values computed from them.
            axes: Batch axes of the tensors that are not watched, in order; empty for a lean operation.
            result: The operation's result.
            output_axes: Its batch axis.
            lean: See the field.
            covers_base: See the field.
            num_samples: B.
            trailing: See the field.
            row_axis: See the field.
        """
        tensors = {place: value for place, value in enumerate(args) if isinstance(value, Tensor)}
        targets = tuple(place for place, value in tensors.items() if id(value) in watched)
        inputs = [place for place in tensors if place not in targets]
        return cls(
            site,
            site.function,
            key,
            tuple((place, value.shape, place in targets) for place, value in tensors.items()),
            tuple(place for place in range(len(args)) if place not in tensors),
            targets,
            tuple(zip(inputs, [None] * len(inputs) if lean else axes, strict=True)),
            result.shape,
            output_axes,
            lean,
            covers_base,
            result._is_view(),
            result.numel() * result.element_size(),
            (num_samples, result.shape[:-1].numel() // num_samples)
            if _is_linear(site, args, targets, axes)
            else None,
            trailing,
            row_axis,
        )

    def fits(self, args: Sequence[Any], watched: Container[int]) -> bool:
        """Whether a call of the function without keyword arguments has the shapes and parameters of the bound one."""
        if len(args) != len(self.tensors) + len(self.others):
            return False
        for place, shape, is_target in self.tensors:
            value = args[place]
            if (id(value) in watched) is not is_target or getattr(value, "shape", None) != shape:
                return False
        return not any([isinstance(args[place], Tensor) for place in self.others])  # a list is faster here


def _is_linear(
    site: Site, args: Sequence[Any], targets: tuple[int, ...], axes: Sequence[BatchAxis | None]
) -> bool:
    if site.function is not torch._C._nn.linear or site.routed or 0 in targets or args[0].is_complex():
        return False
    x, weight, *bias = args
    axis = axes[0]
    return (
        axis is not None
        and (axis.axis, axis.sample_major) == (0, True)
        and (weight.dim(), x.dim() > 1, x.numel() > 0) == (2, True, True)
        and all(b is None or b.dim() == 1 for b in bias)
    )
