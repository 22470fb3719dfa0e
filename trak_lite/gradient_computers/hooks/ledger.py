"""Bookkeeping of parameter uses: a block is streamed as soon as all uses of its parameter have contributed.

A value computed from parameters only (a transposed or merged weight) first collects the gradients of its own uses, then
propagates them to its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trak_lite.gradient_computers.hooks.calls import (
    Contribution,
    Factors,
    Lookups,
    Pieces,
    Summed,
    dense_of,
    merged,
    transposed,
)
from trak_lite.types import BlockSink, DenseBlock, FactoredBlock, LookupBlock, SummedBlock

__all__ = ["GradientLedger"]


@dataclass(slots=True)
class _Uses:
    """State of one parameter, or of a value computed from parameters, during a pass."""

    tensor: Tensor
    name: str | None
    """The parameter's name; ``None`` for a value computed from parameters."""
    roots: Sequence[int] = ()
    """``id`` of the parameters that a value is computed from."""
    transpose_of: int | None = None
    pending: int = 0
    """Number of uses whose gradient has not arrived yet."""
    parts: list[Contribution] = field(default_factory=list)


@dataclass(eq=False)
class GradientLedger:
    """Counts the uses of parameters in one forward pass, and collects their gradients in the backward pass."""

    _kept: Mapping[str, nn.Parameter]
    """Parameters to keep gradients for, by name."""
    num_samples: int
    """B."""
    _sink: BlockSink
    _start: int = 0
    """Row in the batch of this pass's sample 0."""
    keep_factors: bool = False
    """Whether to stream the factors of matrices and convolutions even if the gradients are smaller."""

    def __post_init__(self) -> None:
        """Start without uses."""
        self.methods: dict[str, dict[str, None]] = {name: {} for name in self._kept}
        """The rules that computed each parameter's gradient."""
        self._uses = {id(p): _Uses(p, name) for name, p in self._kept.items()}
        self._emitted: set[str] = set()

    def names_of(self, read: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the parameters that these watched tensors are, or are computed from."""
        roots = [root for tensor in read for root in self._uses[tensor].roots or [tensor]]
        return tuple(dict.fromkeys(name for root in roots if (name := self._uses[root].name) is not None))

    def share(self, tensor: Tensor, parents: Sequence[int], *, is_transpose: bool) -> None:
        """Register a value computed only from parameters or other such values."""
        roots = [root for parent in parents for root in self._uses[parent].roots or [parent]]
        uses = _Uses(tensor, None, list(dict.fromkeys(roots)))
        if is_transpose:
            uses.transpose_of = parents[0]
        self._uses[id(tensor)] = uses

    def note(self, target: Tensor, method: str) -> None:
        """Record the method that computed a gradient, for the report."""
        uses = self._uses[id(target)]
        for root in uses.roots or [id(target)]:
            name = self._uses[root].name
            if name is not None:
                self.methods[name][method if not uses.roots else f"{method}, through a value made of it"] = (
                    None
                )

    def expect(self, target: Tensor) -> None:
        """Count one more use; the first use of a shared value counts as one use of each of its parameters."""
        uses = self._uses[id(target)]
        uses.pending += 1
        if uses.name is not None:
            return
        if uses.transpose_of is not None:
            self.expect(self._uses[uses.transpose_of].tensor)
        elif uses.pending == 1:
            for root in uses.roots:
                self.expect(self._uses[root].tensor)

    def deposit(
        self, targets: Sequence[Tensor], parts: Sequence[tuple[Tensor, Contribution]], method: str
    ) -> None:
        """Add the contributions of one use of every target, computed by ``method``."""
        for target, part in parts:
            uses = self._uses[id(target)]
            if len(parts) == len(targets) and self._emits_only_use(uses, part, method):
                continue
            self.note(target, method)
            value = part
            while uses.transpose_of is not None:
                uses, value = self._uses[uses.transpose_of], transposed(value)
            uses.parts.append(_cast(dense_of(value) if isinstance(value, Pieces) else value, target.dtype))
        for target in targets:
            uses = self._uses[id(target)]
            if uses.pending:
                self._arrived(uses)

    def _emits_only_use(self, uses: _Uses, part: Contribution, method: str) -> bool:
        """Emit the block of a parameter with one use; return whether it is one."""
        if uses.pending != 1 or uses.parts or uses.name is None:
            return False
        self.methods[uses.name][method] = None
        uses.pending = 0
        if uses.name not in self._emitted:
            self._emitted.add(uses.name)
            self._emit(uses.name, _cast(part, uses.tensor.dtype))
        return True

    def _arrived(self, uses: _Uses) -> None:
        uses.pending -= 1
        if uses.transpose_of is not None:
            self._arrived(self._uses[uses.transpose_of])
        elif uses.pending == 0:
            self._settle(uses)

    def _settle(self, uses: _Uses) -> None:
        """Emit a parameter's block, or propagate the gradients of a shared value to its parameters."""
        parts, uses.parts = uses.parts, []
        if uses.name is not None:
            if parts and uses.name not in self._emitted:
                self._emitted.add(uses.name)
                self._emit(uses.name, merged(parts, uses.tensor.shape, keep_factors=self.keep_factors))
            return
        roots = [self._uses[root] for root in uses.roots]
        if parts:
            grads = dense_of(merged(parts, uses.tensor.shape))
            grads = grads.reshape(self.num_samples, *uses.tensor.shape)
            for root, part in zip(
                roots, _pulled_back(uses.tensor, [r.tensor for r in roots], grads), strict=True
            ):
                if part is not None:
                    root.parts.append(part)
        for root in roots:
            self._arrived(root)

    def _emit(self, name: str, part: Contribution) -> None:
        if isinstance(part, Tensor):
            shape = self._kept[name].shape
            if part.dim() != len(shape) + 1:
                part = part.reshape(self.num_samples, *shape)
            self._sink(DenseBlock(name, part, self._start))
        elif isinstance(part, Factors):
            self._sink(FactoredBlock(name, *part, self._start))
        elif isinstance(part, Lookups):
            self._sink(LookupBlock(name, *part, self._start))
        elif isinstance(part, Summed):
            lookups = LookupBlock(name, *part.lookups, self._start)
            self._sink(SummedBlock(name, (lookups, FactoredBlock(name, *part.factors, self._start))))
        else:
            for first, grads in part.formed():
                self._sink(DenseBlock(name, grads, self._start + first))

    def finish(self) -> None:
        """Settle uses without a gradient, on which f does not depend, and emit zeros for parameters without a block."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            waiting = [uses for uses in self._uses.values() if uses.name is None and uses.pending > 0]
            for uses in reversed(waiting):
                if uses.transpose_of is None:
                    uses.pending = 0
                    self._settle(uses)
            for uses in self._uses.values():
                if uses.name is not None and uses.name not in self._emitted:
                    uses.pending = 0
                    self._settle(uses)
            for name, parameter in self._kept.items():
                if name not in self._emitted:
                    self._emit(name, parameter.new_zeros(()).expand(self.num_samples, *parameter.shape))


def _cast_factors(part: Factors, dtype: torch.dtype) -> Factors:
    if part.inputs.dtype == dtype == part.output_grads.dtype:
        return part
    return Factors(part.inputs.to(dtype), part.output_grads.to(dtype))


def _cast(part: Contribution, dtype: torch.dtype) -> Contribution:
    if isinstance(part, Tensor):
        # The gradient of a real tensor that was combined with complex ones is the real part.
        part = part.real if part.is_complex() and not dtype.is_complex else part
        return part if part.dtype == dtype else part.to(dtype)
    if isinstance(part, Factors):
        return _cast_factors(part, dtype)
    if isinstance(part, Lookups):
        return part._replace(values=part.values.to(dtype))
    if isinstance(part, Summed):
        return Summed(
            part.lookups._replace(values=part.lookups.values.to(dtype)), _cast_factors(part.factors, dtype)
        )
    return part._replace(form=lambda rows: part.form(rows).to(dtype))


def _pulled_back(value: Tensor, roots: Sequence[Tensor], grads: Tensor) -> tuple[Tensor | None, ...]:
    """Backpropagate per-sample gradients ``(B, *value.shape)`` of a shared value to its parameters."""
    try:
        return torch.autograd.grad(
            value, list(roots), grads, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except RuntimeError:
        # An operation without a batching rule (a sparse gradient); torch raises no narrower type. The loop gives the
        # same gradients, or raises the operation's own error.
        rows = [
            torch.autograd.grad(value, list(roots), grad, retain_graph=True, allow_unused=True)
            for grad in grads
        ]
        return tuple(
            None if column[0] is None else torch.stack([part.to_dense() for part in column])
            for column in zip(*rows, strict=True)
        )
