"""Bookkeeping of parameter uses: a block is streamed as soon as all uses of its parameter have contributed.

A value computed from parameters only (a transposed or merged weight) first collects the gradients of its own uses, then
propagates them to its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trak_lite.gradient_computers.hooks.calls import Contribution, Pieces, dense_of, merged, transposed
from trak_lite.gradient_computers.parameters import Kept
from trak_lite.types import BlockSink, DenseBlock, FactoredBlock, LookupBlock, SummedBlock


@dataclass(slots=True, eq=False)
class _Uses:
    """State of one parameter, or of a value computed from parameters, during a pass."""

    tensor: Tensor
    names: Sequence[str]
    """The parameter's name, or those of all parameters that a value is computed from."""
    roots: Sequence[_Uses] = ()
    """The parameters that a value is computed from; empty for a parameter."""
    transpose_of: _Uses | None = None
    pending: int = 0
    """Number of uses whose gradient has not arrived yet."""
    parts: list[Contribution] = field(default_factory=list)
    is_emitted: bool = False

    def expect(self) -> None:
        """Count one more use; the first use of a shared value counts as one use of each of its parameters."""
        self.pending += 1
        if self.transpose_of is not None:
            self.transpose_of.expect()
        elif self.pending == 1:
            for root in self.roots:
                root.expect()


@dataclass(eq=False)
class GradientLedger:
    """Counts the uses of parameters in one forward pass, and collects their gradients in the backward pass."""

    _kept: Kept
    """Parameters to keep gradients for, by name."""
    num_samples: int
    _sink: BlockSink
    _start: int = 0
    """Row in the batch of this pass's sample 0."""
    keep_factors: bool = False
    """Whether to stream the factors of matrices and convolutions even if the gradients are smaller."""

    def __post_init__(self) -> None:
        self.methods: dict[str, dict[str, None]] = {name: {} for name in self._kept}
        """The rules that computed each parameter's gradient."""
        self._uses = {id(p): _Uses(p, (name,)) for name, p in self._kept.items()}

    def names_of(self, read: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the parameters that these watched tensors are, or are computed from."""
        return tuple(dict.fromkeys(name for tensor in read for name in self._uses[tensor].names))

    def share(self, tensor: Tensor, parents: Sequence[int], *, is_transpose: bool) -> None:
        """Register a value computed only from parameters or other such values, or written again in place."""
        above = [self._uses[parent] for parent in parents]
        roots = list(dict.fromkeys(root for uses in above for root in uses.roots or [uses]))
        known = self._uses.setdefault(
            id(tensor), _Uses(tensor, (), transpose_of=above[0] if is_transpose else None)
        )
        known.names, known.roots = self.names_of(parents), roots

    def note(self, target: Tensor, method: str) -> None:
        """Record the method that computed a gradient, for the report."""
        uses = self._uses[id(target)]
        for name in uses.names:
            self.methods[name][f"{method}, through a value made of it" if uses.roots else method] = None

    def expect(self, target: Tensor) -> None:
        """Count one more use of a parameter or a shared value."""
        self._uses[id(target)].expect()

    def deposit(
        self, targets: Sequence[Tensor], parts: Sequence[tuple[Tensor, Contribution]], method: str
    ) -> None:
        """Add the contributions of one use of every target, computed by ``method``."""
        for target, part in parts:
            self.note(target, method)
            uses = self._uses[id(target)]
            while uses.transpose_of is not None:
                part, uses = transposed(part, uses.tensor.shape), uses.transpose_of
            uses.parts.append(_cast(part, target.dtype))
        for target in targets:
            uses = self._uses[id(target)]
            if uses.pending:
                self._arrived(uses)

    def _arrived(self, uses: _Uses) -> None:
        uses.pending -= 1
        if uses.transpose_of is not None:
            self._arrived(uses.transpose_of)
        elif uses.pending == 0:
            self._settle(uses)

    def _settle(self, uses: _Uses) -> None:
        """Emit a parameter's block, or propagate the gradients of a shared value to its parameters."""
        parts, uses.parts, shape = uses.parts, [], uses.tensor.shape
        if parts and not uses.roots:
            self._emit(uses, merged(parts, shape, keep_factors=self.keep_factors))
        elif parts:
            grads = dense_of(merged(parts, shape), shape)
            pulled = _pulled_back(uses.tensor, [root.tensor for root in uses.roots], grads)
            for root, part in zip(uses.roots, pulled, strict=True):
                if part is not None:
                    root.parts.append(part)
        for root in uses.roots:
            self._arrived(root)

    def _emit(self, uses: _Uses, part: Contribution) -> None:
        if uses.is_emitted:
            return
        uses.is_emitted = True
        (name,) = uses.names
        if isinstance(part, Pieces):
            for first, grads in part.formed():
                self._sink(DenseBlock(name, grads, self._start + first))
        elif isinstance(part, Tensor):
            self._sink(DenseBlock(name, dense_of(part, uses.tensor.shape), self._start))
        else:
            blocks = tuple(replace(block, name=name, start=self._start) for block in part.parts)
            self._sink(blocks[0] if len(blocks) == 1 else SummedBlock(name, blocks))

    def finish(self) -> None:
        """Settle uses without a gradient, on which f does not depend, and emit zeros for parameters without a block."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            waiting = [uses for uses in self._uses.values() if uses.roots and uses.transpose_of is None]
            for uses in reversed(waiting):
                if uses.pending:
                    uses.pending = 0
                    self._settle(uses)
            for uses in self._uses.values():
                if not (uses.roots or uses.is_emitted):
                    uses.pending = 0
                    self._settle(uses)
                    zero = uses.tensor.new_zeros(())
                    self._emit(uses, zero.expand(self.num_samples, *uses.tensor.shape))


def _cast(part: Contribution, dtype: torch.dtype) -> Contribution:
    if isinstance(part, Tensor):
        # The gradient of a real tensor that was combined with complex ones is the real part.
        return (part.real if part.is_complex() and not dtype.is_complex else part).to(dtype)
    if isinstance(part, Pieces):
        return part._replace(form=lambda rows: part.form(rows).to(dtype))
    if isinstance(part, FactoredBlock):
        return FactoredBlock("", part.inputs.to(dtype), part.output_grads.to(dtype))
    assert isinstance(part, LookupBlock)
    return replace(part, values=part.values.to(dtype))


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
