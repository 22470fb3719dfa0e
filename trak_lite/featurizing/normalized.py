"""Normalised feature rows in one pass.

A feature row is linear in the gradient. If one factor scales a sample's whole gradient, the finished feature row is
scaled instead, so no gradient is held until its norm is known. What Adam does to a gradient differs from entry to
entry: the dense gradient of one parameter is formed at a time, for as many samples as fit into a fixed number of
entries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import Tensor

from trak_lite.core.normalization import Normalization
from trak_lite.featurizing.gradient_norms import GradientNorms, squared_norms
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.models.optimizers import AdamStates
from trak_lite.types import Batch, BlockSink, DenseBlock, GradientBlock, OutputTerms, scaled_rows

_MOST_ENTRIES: Final = 1 << 24
"""Entries of the dense gradients of one parameter that are held at a time."""


@final
class RowNormalizer:
    """Computes the feature rows of one batch's normalised gradients, and the gradient norms, in one pass.

    With the scope ``global`` the blocks pass unchanged, and :meth:`scale` scales the finished rows. With the scope
    ``module`` the blocks of a module are held until all of them are there, then scaled and passed on; :meth:`scale`
    returns the rows unchanged. So it does for the kinds ``adam`` and ``adam_update``, which change each block.
    """

    def __init__(
        self, normalization: Normalization, num_samples: int, adam: AdamStates | None = None
    ) -> None:
        """Start a batch; ``kind="none"`` only computes the norms, and some kinds need the states of Adam."""
        self._normalization = normalization
        self._num_samples = num_samples
        self._adam = {} if adam is None else adam.of
        self._adam_digest = "" if adam is None else adam.digest
        self._by_module = normalization.kind != "none" and normalization.scope == "module"
        self._norms = GradientNorms(num_samples)

    @property
    def setting(self) -> tuple[str, str]:
        """What the normalised rows depend on besides the gradients: the setting, and the digest of Adam's states."""
        return repr(self._normalization), self._adam_digest

    def stream(self, computer: AbstractGradientComputer, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass the blocks of the batch to ``sink``; see :meth:`AbstractGradientComputer.stream_gradients`.

        The batch may be streamed again, after a pass that failed or for a comparison.
        """
        self._norms = GradientNorms(self._num_samples)
        if self._normalization.kind == "adam":
            return computer.stream_gradients(batch, lambda block: self._pass_scaled(block, sink))
        if self._normalization.kind == "adam_update":
            return self._stream_updates(computer, batch, sink)
        if not self._by_module:

            def measure(block: GradientBlock) -> None:
                self._norms.add(block)
                sink(block)

            return computer.stream_gradients(batch, measure)
        groups = Counter(map(self._normalization.group, computer.parameters))
        waiting = {group: _Waiting(GradientNorms(self._num_samples)) for group in groups}

        def take(block: GradientBlock) -> None:
            group = self._normalization.group(block.name)
            held = waiting[group]
            held.blocks.append(block)
            squares = squared_norms(block)
            held.norms.add_squares(squares, block.start)
            self._norms.add_squares(squares, block.start)
            held.arrived += block.num_samples
            # Blocks of one parameter may hold fewer samples than those of another.
            if held.arrived == groups[group] * len(
                {b.start + i for b in held.blocks for i in range(b.num_samples)}
            ):
                self._release(held, sink)

        terms = computer.stream_gradients(batch, take)
        for held in waiting.values():  # modules of which a block is missing; its gradient counts as zero
            self._release(held, sink)
        return terms

    def scale(self, features: Tensor) -> Tensor:
        """Return the feature rows ``(B, K)`` of the normalised gradients, given those of the streamed blocks."""
        if self._by_module or self._normalization.kind not in ("unit", "clip"):
            return features
        return scaled_rows(features, self._normalization.factors(self._norms.squared()))

    def norms(self) -> Tensor:
        """Return the norms ``(B,)`` of the gradients before normalisation."""
        return self._norms.squared().sqrt()

    def _pass_scaled(self, block: GradientBlock, sink: BlockSink) -> None:
        scale = self._adam[block.name].scale()
        scaled = block.by_entry(scale)
        if scaled is None:
            self._pass_dense(block, sink, lambda grads, _: grads * scale)
            return
        self._norms.add(block)
        sink(scaled)

    def _stream_updates(
        self, computer: AbstractGradientComputer, batch: Batch, sink: BlockSink
    ) -> OutputTerms:
        """Pass the change of the weights by an Adam step on each sample's loss, per learning rate."""
        # An update is not linear in the loss gradient -q grad f, so q is needed before the gradients.
        q = computer.compute_loss_grad(batch).detach().reshape(-1)
        lacking = {name: set(range(self._num_samples)) for name in computer.parameters}

        def take(block: GradientBlock) -> None:
            lacking[block.name] -= set(range(block.start, block.start + block.num_samples))
            updates = self._adam[block.name].updates
            self._pass_dense(
                block, sink, lambda grads, rows: updates(scaled_rows(grads, -q[rows].to(grads))).neg_()
            )

        terms = computer.stream_gradients(batch, take)
        for name, samples in lacking.items():  # a gradient of zero; the update is then that of the momentum
            if samples:
                state = self._adam[name]
                change = state.updates(torch.zeros_like(state.exp_avg).unsqueeze(0)).neg_()
                for sample in sorted(samples):
                    sink(DenseBlock(name, change, sample))
        return terms

    def _pass_dense(
        self, block: GradientBlock, sink: BlockSink, change: Callable[[Tensor, slice], Tensor]
    ) -> None:
        """Pass a block on as dense blocks that ``change`` returns, given the gradients and their rows in the batch."""
        shape = self._adam[block.name].exp_avg.shape
        step = max(1, _MOST_ENTRIES // max(math.prod(shape), 1))
        for first in range(0, block.num_samples, step):
            part = block.samples(slice(first, first + step))
            start = block.start + first
            grads = part.dense()
            grads = grads.to(torch.promote_types(grads.dtype, torch.float32))
            self._norms.add_squares(grads.square().sum(1), start)
            rows = slice(start, start + len(grads))
            sink(DenseBlock(block.name, change(grads.view(-1, *shape), rows), start))

    def _release(self, held: _Waiting, sink: BlockSink) -> None:
        factors = self._normalization.factors(held.norms.squared())
        held.arrived = 0
        while held.blocks:  # each block is freed after the sink took it
            block = held.blocks.pop(0)
            scales = factors[block.start : block.start + block.num_samples]
            sink(block.scaled(scales))


@dataclass(slots=True)
class _Waiting:
    """The blocks of a module that wait for others of the same samples."""

    norms: GradientNorms
    """Of all blocks so far."""
    blocks: list[GradientBlock] = field(default_factory=list)
    arrived: int = 0
    """Samples of ``blocks``, counted once per block."""
