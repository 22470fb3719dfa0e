"""Model output function of regression. Shapes: B samples."""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from trak_lite._validate import one_of
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, UniformNoise
from trak_lite.modelout_functions._inputs import (
    logits_and_labels,
    nan_unless,
    one_column,
    refuse_invalid,
    shape_texts,
)
from trak_lite.modelout_functions._margins import linear_terms
from trak_lite.modelout_functions._sampling import sampled_values, with_labels
from trak_lite.types import Batch, OutputTerms

__all__ = ["RegressionModelOutput"]


@final
class RegressionModelOutput(AbstractModelOutput):
    r"""The prediction, or minus half its squared error.

    ``output="prediction"``, for one number per sample: f is the prediction and :math:`L = (f - y)^2 / 2`, so
    q = y - f (signed) and w = 1. Predictions and targets are ``(B,)`` or ``(B, 1)`` each.

    ``output="neg_squared_error"``, for targets of any shape: :math:`f = -\|f_\theta(x) - y\|^2 / 2`, L = -f,
    q = 1, w = 0. A vector prediction cannot be f, which is a scalar, and its loss has no scalar q.

    Predictions and targets have the same shape, except that one of them may have an extra last axis of size 1.
    """

    name: ClassVar[str] = "regression"
    _setting_names = ("output",)

    def __init__(self, *, output: Literal["prediction", "neg_squared_error"] = "prediction") -> None:
        """Store the settings.

        Args:
            output: Definition of f.

        Raises:
            InvalidInputError: For any other value.
        """
        self.output = one_of(("prediction", "neg_squared_error"), output=output)
        self.has_curvature = self.output == "prediction"

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        predictions, targets = _aligned(*logits_and_labels(model_call, batch))
        if targets.is_complex() or targets.dtype == torch.bool:
            raise InvalidInputError(f"The targets have dtype {targets.dtype}. Expected real numbers.")
        targets = targets.to(predictions.dtype)
        finite = targets.isfinite()
        refuse_invalid(finite, targets, expected="a finite number", what="targets")
        if self.output == "neg_squared_error":
            squared = (predictions - targets).square() * nan_unless(finite, targets)
            return linear_terms(-0.5 * squared.unsqueeze(-1).flatten(1).sum(1))
        column = one_column(
            predictions,
            "The model gave predictions of shape",
            hint=' for output="prediction"; for vector targets use RegressionModelOutput(output="neg_squared_error").',
        )
        output = column * nan_unless(finite, targets).reshape(-1)
        values = output.detach()
        return OutputTerms(output, targets.reshape(-1) - values, torch.ones_like(values))

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw targets from unit Gaussians around the predictions; see :meth:`AbstractModelOutput.sample_labels`."""
        predictions, _ = _aligned(*logits_and_labels(model_call, batch))
        return with_labels(batch, sampled_values(predictions, noise))


def _aligned(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Remove a last axis of size 1 that only one of both has; raise for other shapes, which would broadcast."""
    if targets.dim() and predictions.shape == (*targets.shape, 1):
        predictions = predictions.squeeze(-1)
    elif predictions.dim() and targets.shape == (*predictions.shape, 1):
        targets = targets.squeeze(-1)
    if predictions.dim() == 0 or targets.shape != predictions.shape:
        seen, given = shape_texts(predictions.shape, targets.shape)
        raise InvalidInputError(
            f"The predictions have shape {seen}, the targets {given}. Expected the same shape with the "
            "samples on axis 0; reshape the targets or squeeze the model's output."
        )
    return predictions, targets
