r"""Margins and the losses that belong to them.

For a class probability p the margin is :math:`f = \log(p / (1 - p))` and cross-entropy is
:math:`L = \log(1 + e^{-f})`, so :math:`q = -dL/df = 1 - p` and :math:`w = d^2L/df^2 = p (1 - p)`.

A sum of n margins has no scalar q for the summed loss: each margin has a different q, so :math:`\nabla L`
is not a multiple of :math:`\nabla f`. The loss used instead is n times the loss at the mean margin,
:math:`L = n \log(1 + e^{-f/n})`. By convexity it is a lower bound of the summed loss; the two are equal
if all margins are equal, and for n = 1. :math:`q = \sigma(-f/n)` is the error at the mean margin.

The functions at the end draw labels from a model's predictive distribution: the Fisher information is
:math:`E[\nabla \log p(y')\,\nabla \log p(y')^\top]` with :math:`y'` drawn from the model, which for these losses is the
Gauss-Newton matrix (Martens, arXiv:1412.1193, section 9).

Source: TRAK (arXiv:2303.14186), section 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from trak_lite.core.devices import float64_device, in_float64
from trak_lite.data.batches import with_fields
from trak_lite.modelout_functions._inputs import LABEL_KEYS, fields_of, nan_unless, refuse_invalid
from trak_lite.types import Batch, OutputTerms

UniformNoise: TypeAlias = Callable[[Sequence[int]], Tensor]
"""``noise(shape)`` returns float64 numbers in (0, 1), ``(B, *shape)``; those of a sample depend only on its row."""


def class_margins(logits: Tensor, labels: Tensor, *, unused: Tensor | None = None) -> Tensor:
    r"""Return :math:`l_y - \log\sum_{j \neq y} e^{l_j}` over the last axis of logits ``(..., C)``, for int64 labels.

    A label out of range gives NaN in the margin and in its gradient. Where ``unused``, of the labels' shape, is true,
    the result is some number, finite also if the label's logit is minus infinity.

    Example:
        >>> class_margins(torch.tensor([[1e4, 9998.0]]), torch.tensor([0]))
        tensor([2.])
    """
    count = logits.shape[-1]
    # An index out of range is a fatal CUDA error, so clamp it here and set the result to NaN below.
    inside = labels.clamp(0, count - 1)
    index = inside.unsqueeze(-1)
    # Subtract the label's logit before logsumexp, not after: a large common offset then costs no precision.
    l_y = logits.gather(-1, index)
    if unused is not None:
        # A zero gradient times that of a margin that is not finite would be NaN.
        l_y, index = l_y.masked_fill(unused.unsqueeze(-1), 0.0), index.masked_fill(unused.unsqueeze(-1), -1)
    rivals = logits - l_y
    is_label = torch.arange(count, device=logits.device) == index
    margins = -rivals.masked_fill(is_label, -torch.inf).logsumexp(-1)
    return margins * nan_unless(labels == inside, margins)


def two_class_margins(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Return :math:`\log(p / (1 - p))` of labels 0 or 1, given logits of class 1; any other label gives NaN."""
    signs = 2 * labels.to(logits.dtype) - 1
    return logits * signs * nan_unless((labels == 0) | (labels == 1), logits)


def margin_terms(margins: Tensor, count: Tensor | float | None = None) -> OutputTerms:
    r"""Return the terms of :math:`L = n \log(1 + e^{-f/n})` for sums f ``(B,)`` of n margins, by default of one."""
    mean = margins.detach() if count is None else margins.detach() / count
    # Two sigmoids instead of 1 - p: both p and 1 - p keep full precision close to 0.
    wrong, right = torch.sigmoid(-mean), torch.sigmoid(mean)
    return OutputTerms(margins, wrong, wrong * right if count is None else wrong * right / count)


def multiclass_terms(logits: Tensor, labels: Tensor, *, temperature: float) -> OutputTerms:
    r"""Return the terms of a margin with :math:`q = 1 - \mathrm{softmax}(l / T)_y` (f does not use T).

    Logits are ``(B, C)``, labels int64. The terms are consistent with one loss, cross-entropy, only for T = 1.
    """
    margins = class_margins(logits, labels)
    if temperature == 1.0:
        return margin_terms(margins)
    cooled = margin_terms(class_margins(logits.detach() / temperature, labels))
    return cooled._replace(output=margins)


def linear_terms(output: Tensor) -> OutputTerms:
    """Return the terms of L = -f: q is 1, w is 0."""
    value = output.detach()
    return OutputTerms(output, torch.ones_like(value), torch.zeros_like(value))


# Labels


def with_labels(batch: Batch, labels: Tensor) -> Batch:
    """Return the batch with its labels, as found by :func:`split_labels`, replaced."""
    fields = fields_of(batch)
    if fields is None:
        *inputs, _ = batch
        return (*inputs, labels)
    key = next(key for key in LABEL_KEYS if key in fields)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return with_fields(batch, **{key: labels})
    return {**fields, key: labels}


@torch.no_grad()
def sampled_classes(logits: Tensor, noise: UniformNoise) -> Tensor:
    """Return one class per position, int64 ``(B, ...)``, drawn from the softmax of logits ``(B, ..., C)``."""
    drawn = noise(logits.shape[1:-1]).to(float64_device(logits.device))
    if logits.dim() == 2:
        return _classes_of(logits, drawn)
    # One sample at a time: with a large vocabulary the cumulative sums in float64 dominate memory.
    return torch.stack([_classes_of(row, u) for row, u in zip(logits, drawn, strict=True)])


def _classes_of(logits: Tensor, uniform: Tensor) -> Tensor:
    sums = in_float64(logits.softmax(-1)).cumsum(-1).contiguous()
    classes = torch.searchsorted(sums, uniform.unsqueeze(-1) * sums[..., -1:]).squeeze(-1)
    return classes.clamp_(max=logits.shape[-1] - 1).to(logits.device)  # NaN is after every class


@torch.no_grad()
def sampled_answers(logits: Tensor, noise: UniformNoise) -> Tensor:
    """Return a label of 0 or 1 per logit of class 1, both ``(B, ...)``, in the dtype of the logits."""
    likely = in_float64(logits.sigmoid())
    return (noise(logits.shape[1:]).to(likely.device) < likely).to(logits)


@torch.no_grad()
def sampled_values(means: Tensor, noise: UniformNoise) -> Tensor:
    """Return values drawn from unit Gaussians around ``means``, both ``(B, ...)``.

    Means so large that their dtype would round the noise to steps raise InvalidInputError, or give NaN where values
    are not read.
    """
    largest = 0.5 / torch.finfo(means.dtype).eps
    valid = (means.abs() <= largest) | ~means.isfinite()
    refuse_invalid(
        valid,
        means,
        what="predictions",
        expected=f"at most {largest:.2g} in size: a label is drawn around it with a variance of 1, and {means.dtype} "
        "rounds a larger one to steps. Standardise the targets, use a model in float64, or a method that draws no "
        "labels (GaussNewton, EKFAC(fisher='curvature') or EKFAC(fisher='empirical'))",
    )
    drawn = noise(means.shape[1:]).to(float64_device(means.device))
    # Cast first, then move: the means' device may not support float64.
    values: Tensor = means + torch.special.ndtri(drawn).to(means.dtype).to(means.device)
    return values * nan_unless(valid, values)
