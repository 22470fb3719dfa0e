r"""Normalising and clipping per-sample gradients, as a wrapper around any gradient computer.

A feature row is linear in the gradient, so scaling the gradient's blocks by one number per sample scales the row.
Source of clipping: Abadi et al., "Deep Learning with Differential Privacy" (arXiv:1607.00133), section 3; of norms that
need no gradient: Goodfellow (arXiv:1510.01799).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trak_lite._batches import batch_size
from trak_lite._validate import one_of
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers._base import AbstractGradientComputer, collect_gradients
from trak_lite.gradient_computers.reductions import squared_norms
from trak_lite.types import Batch, BlockSink, DenseBlock, GradientBlock, OutputTerms

__all__ = ["Normalization", "NormalizedGradientComputer", "clipping_threshold"]


@dataclass(frozen=True, slots=True)
class Normalization:
    """What every sample's gradient is divided by."""

    kind: Literal["none", "unit", "clip"] = "none"
    """``unit``: by its norm; ``clip``: by what brings its norm down to the threshold, if it is above."""
    threshold: float | None = None
    """C, the largest norm that ``clip`` leaves; in the units of f per unit of the parameters."""
    scope: Literal["global", "module"] = "global"
    """Whether the norm is that of the whole gradient or, module by module, of the parameters that it owns."""

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            InvalidInputError: If a setting is not allowed, or ``clip`` has no positive threshold.
        """
        one_of(("none", "unit", "clip"), kind=self.kind)
        one_of(("global", "module"), scope=self.scope)
        if self.kind != "clip":
            if self.threshold is not None:
                raise InvalidInputError(
                    f"threshold={self.threshold!r} was given with kind={self.kind!r}, which has none. "
                    "Expected kind='clip'."
                )
            return
        threshold = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            raise InvalidInputError(
                f"kind='clip' needs a threshold, got {threshold!r}. Expected a positive number; "
                "clipping_threshold(norms) finds one."
            )
        if not (math.isfinite(threshold) and threshold > 0):
            raise InvalidInputError(f"threshold must be a finite number above 0, got {threshold!r}.")

    def group(self, name: str) -> str:
        """Return what a parameter shares its norm with: everything, or its module.

        Example:
            >>> Normalization("unit", scope="module").group("layers.0.weight")
            'layers.0'
        """
        return "" if self.scope == "global" else name.rpartition(".")[0]

    def scales(self, squared_norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the factor of every sample's gradient, ``(B,)``, by parameter name.

        Where a squared norm is zero, ``unit`` gives the factor 0: the gradient stays zero. Where one is not finite
        the factor is NaN, so that such a row cannot be taken for a short one.

        Args:
            squared_norms: Squared norms ``(B,)`` of every parameter's part of the gradient, by parameter name.

        Example:
            >>> Normalization("clip", 2.0).scales({"w": torch.tensor([16.0, 1.0, 0.0])})["w"]
            tensor([0.5000, 1.0000, 1.0000])
        """
        totals: dict[str, Tensor] = {}
        for name, squares in squared_norms.items():
            group = self.group(name)
            totals[group] = totals[group] + squares if group in totals else squares
        factors = {group: self._factor(total) for group, total in totals.items()}
        return {name: factors[self.group(name)] for name in squared_norms}

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest says of it: nothing where gradients stay as they are."""
        if self.kind == "none":
            return {}
        threshold = {} if self.threshold is None else {"threshold": float(self.threshold)}
        return {"normalization": {"kind": self.kind, "scope": self.scope, **threshold}}

    def _factor(self, squared_norm: Tensor) -> Tensor:
        if self.kind == "none":
            return torch.ones_like(squared_norm)
        norm = squared_norm.sqrt()
        ratio = (1.0 if self.threshold is None else self.threshold) / norm
        # C / 0 is infinite, and cut to 1 like that of every short gradient, whose bits so stay as they are.
        factor = ratio.clamp(max=1) if self.kind == "clip" else torch.where(norm > 0, ratio, 0)
        return torch.where(squared_norm.isfinite(), factor, torch.nan)


class NormalizedGradientComputer(AbstractGradientComputer):
    """Streams the blocks of another gradient computer, scaled sample by sample.

    With the scope ``global`` no block can be scaled before all norms are known, so every batch is streamed twice: two
    forward and two backward passes; no block is held, and no gradient is formed for its norm where the factors are
    cheaper. With the scope ``module`` one pass is enough, and the blocks of a module wait for each other.
    """

    def __init__(self, computer: AbstractGradientComputer, normalization: Normalization) -> None:
        """Wrap a computer.

        Args:
            computer: Gives the gradients; its model, task and kept parameters are this one's.
            normalization: What they are divided by.
        """
        super().__init__(
            computer.model,
            computer.modelout_fn,
            computer.grad_dim,
            computer.dtype,
            computer.device,
            computer.grad_wrt,
        )
        self.computer = computer
        self.normalization = normalization

    def load_model_params(self, model: nn.Module) -> None:
        """Differentiate this model's parameters from now on."""
        self.computer.load_model_params(model)
        self.model = model

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Return the scaled gradients ``(B, *parameter.shape)`` by parameter name, in model order."""
        return collect_gradients(self, batch)

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Return q = -dL/df of every sample, ``(B, 1)``; it is not scaled."""
        return self.computer.compute_loss_grad(batch)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings of the wrapped computer, and the normalisation if there is one."""
        return {**self.computer.fingerprint(), **self.normalization.to_json()}

    def stream_gradients(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass the scaled blocks of a batch to ``sink``.

        Args:
            batch: B samples, on the model's device.
            sink: Called with every block; the block is freed when the call returns.

        Returns:
            f, q and w of the batch, each ``(B,)``, detached and not scaled.

        Raises:
            InvalidInputError: If the batch or the output function's result has the wrong form.
            UnsupportedModelError: If the wrapped computer cannot differentiate the model, or two passes over one
                batch give different f.
        """
        self.computer.grad_wrt = self.grad_wrt  # which a caller may have set on this object
        if self.normalization.kind == "none":
            return self.computer.stream_gradients(batch, sink)
        if self.normalization.scope == "module":
            return self._stream_by_module(batch, sink)
        return self._stream_twice(batch, sink)

    def _stream_twice(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        count = batch_size(batch)
        squares: dict[str, Tensor] = {}

        def measure(block: GradientBlock) -> None:
            part = squared_norms(block)
            whole = squares.setdefault(block.name, part.new_zeros(count))
            whole[block.start : block.start + len(part)] = part

        first = self.computer.stream_gradients(batch, measure)
        scales = self.normalization.scales(squares)
        second = self.computer.stream_gradients(
            batch, lambda block: sink(_scaled(block, scales[block.name][block.start :]))
        )
        _refuse_two_outputs(first.output, second.output)
        return second

    def _stream_by_module(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        groups: dict[str, int] = {}
        for name in self.parameters:
            group = self.normalization.group(name)
            groups[group] = groups.get(group, 0) + 1
        waiting: dict[tuple[str, int], _Waiting] = {}

        def take(block: GradientBlock) -> None:
            key = (self.normalization.group(block.name), block.start)
            held = waiting.setdefault(key, _Waiting())
            held.blocks.append(block)
            held.squares[block.name] = squared_norms(block)
            if len(held.blocks) < groups[key[0]]:
                return
            del waiting[key]
            scales = self.normalization.scales(held.squares)
            while held.blocks:
                ready = held.blocks.pop(0)
                sink(_scaled(ready, scales[ready.name]))

        return self.computer.stream_gradients(batch, take)


@dataclass(slots=True)
class _Waiting:
    """The blocks of a module, for one chunk of samples, that have come so far."""

    blocks: list[GradientBlock] = field(default_factory=list)
    squares: dict[str, Tensor] = field(default_factory=dict)


def _scaled(block: GradientBlock, factors: Tensor) -> GradientBlock:
    """Return a block with the gradient of sample i times ``factors[i]``."""
    if isinstance(block, DenseBlock):
        return DenseBlock(block.name, _times(block.grad, factors), block.start)
    return type(block)(block.name, block.inputs, _times(block.output_grads, factors), block.start)


def _times(rows: Tensor, factors: Tensor) -> Tensor:
    # The product is formed in the factors' dtype: 1 / norm may be out of reach for a half-precision gradient.
    shaped = factors[: len(rows)].to(rows.device).view(-1, *[1] * (rows.dim() - 1))
    return (rows * shaped).to(rows.dtype)


def _refuse_two_outputs(first: Tensor, second: Tensor) -> None:
    """Raise if the pass that found the norms is not the pass whose gradients they scale."""
    gaps = (first.double() - second.double()).abs()
    # As far apart as half precision and atomic sums on a GPU bring two runs of one pass; NaN is for others to refuse.
    allowed = 1e-2 * second.double().abs() + 1e-3 * second.double().abs().mean()
    if not bool((gaps > allowed).any()):
        return
    gap = float(gaps.max())
    raise UnsupportedModelError(
        f"Two passes over one batch gave f that differ by up to {gap:.3g}, so the norms found by the first do not "
        "belong to the gradients of the second. The model draws random numbers: call model.eval(), or normalise by "
        "module (scope='module'), which takes one pass."
    )


def clipping_threshold(norms: Tensor, *, quantile: float = 0.9) -> float:
    """Return the C that leaves this share of the gradients as they are.

    Source: Andrew et al., "Differentially Private Learning with Adaptive Clipping" (arXiv:1905.03871).

    Args:
        norms: ``(N,)`` norms of gradients, by :func:`gradient_norms`.
        quantile: The share, above 0 and at most 1.

    Raises:
        InvalidInputError: If there are no finite norms, the share is out of range, or C would be zero.

    Example:
        >>> clipping_threshold(torch.tensor([1.0, 2.0, 3.0]), quantile=0.5)
        2.0
    """
    if not 0 < quantile <= 1:
        raise InvalidInputError(f"quantile must be above 0 and at most 1, got {quantile!r}.")
    values = norms.detach().double().cpu().numpy()
    if not values.size or not np.isfinite(values).all():
        raise InvalidInputError(
            f"norms has {values.size} entries, of which {int(np.isfinite(values).sum())} are finite. "
            "Expected at least one, and all of them finite."
        )
    # Not torch.quantile, which refuses more than 16 million entries.
    threshold = float(np.quantile(values, quantile))
    if threshold <= 0:
        raise InvalidInputError(
            f"The {quantile} quantile of the norms is {threshold}, and a threshold must be above 0. "
            "Most gradients are zero: check grad_wrt and the output function, or take a larger quantile."
        )
    return threshold
