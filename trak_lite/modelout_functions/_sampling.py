r"""Labels drawn from a model's predictive distribution, and outputs whose gradient is that of the loss.

The Fisher information of a model is :math:`E[\nabla \log p(y')\,\nabla \log p(y')^\top]` with :math:`y'` drawn from the
model, which for these losses is the Gauss-Newton matrix (Martens, arXiv:1412.1193, section 9).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from trak_lite._devices import float64_device, in_float64
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, UniformNoise
from trak_lite.modelout_functions._inputs import LABEL_KEYS, fields_of
from trak_lite.modelout_functions._margins import linear_terms
from trak_lite.types import Batch, OutputTerms

__all__ = [
    "LossModelOutput",
    "fisher_task",
    "sampled_answers",
    "sampled_classes",
    "sampled_values",
    "with_labels",
]

LossWeight: TypeAlias = Literal["out_to_loss_grad", "loss_curvature"]


@final
class LossModelOutput(AbstractModelOutput):
    r"""Another task's output f, weighted so that the outer product of its gradient is a curvature term.

    ``"out_to_loss_grad"``: :math:`q f` with q held constant, whose gradient is :math:`-\nabla L`; if the task defines
    :meth:`AbstractModelOutput.log_likelihood`, that task's :math:`q f`.
    ``"loss_curvature"``: :math:`\sqrt{w} f`; the outer product of its gradient is a sample's term of the Gauss-Newton
    matrix of L as a function of f.

    The caller must call ``prepare`` of the wrapped task.
    """

    def __init__(self, task: AbstractModelOutput, *, weight: LossWeight = "out_to_loss_grad") -> None:
        likelihood = task.log_likelihood() if weight == "out_to_loss_grad" else None
        self.task = task if likelihood is None else likelihood
        self.weight = weight

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return the weighted f, with q = 1 and w = 0; see :meth:`AbstractModelOutput.evaluate`."""
        terms = self.task.evaluate(model_call, batch)
        weight = terms.out_to_loss_grad if self.weight == "out_to_loss_grad" else terms.loss_curvature.sqrt()
        return linear_terms(terms.output * weight.detach())


def with_labels(batch: Batch, labels: Tensor) -> Batch:
    """Return the batch with its labels, as found by :func:`split_labels`, replaced."""
    fields = fields_of(batch)
    if fields is None:
        *inputs, _ = batch
        return (*inputs, labels)
    key = next(key for key in LABEL_KEYS if key in fields)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{key: labels})
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
    """Return values drawn from unit Gaussians around ``means``, both ``(B, ...)``."""
    drawn = noise(means.shape[1:]).to(float64_device(means.device))
    # Cast first, then move: the means' device may not support float64.
    values: Tensor = means + torch.special.ndtri(drawn).to(means.dtype).to(means.device)
    return values


def fisher_task(task: AbstractModelOutput) -> AbstractModelOutput:
    """Return a task whose output has the gradient of the log-likelihood.

    Raises:
        InvalidInputError: If the task cannot draw labels.
    """
    if not task.can_sample:
        raise InvalidInputError(
            f"method='Fisher' draws labels from the model, and {type(task).__name__} does not define their "
            "distribution. Use method='GaussNewton' or 'TRAK', or define sample_labels."
        )
    return LossModelOutput(task)
