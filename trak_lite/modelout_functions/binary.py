"""Model output functions of binary and multi-label classifiers, with one independent logit per binary label.

Shapes: B samples, C binary labels per sample. A logit is that of class 1.
"""

from __future__ import annotations

from typing import ClassVar, Literal, final

from torch import Tensor
from torch.nn import functional as F

from trak_lite._validate import one_of
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, UniformNoise
from trak_lite.modelout_functions._inputs import (
    logits_and_labels,
    one_column,
    refuse_invalid,
    shape_texts,
)
from trak_lite.modelout_functions._margins import linear_terms, margin_terms, two_class_margins
from trak_lite.modelout_functions._sampling import sampled_answers, with_labels
from trak_lite.types import Batch, OutputTerms

__all__ = ["BinaryClassificationModelOutput", "MultiLabelModelOutput"]

_OTHERS = (
    "; for several classes use 'image_classification' or 'text_classification', for several labels "
    "'multilabel_classification'."
)


@final
class BinaryClassificationModelOutput(AbstractModelOutput):
    r"""Margin of a single logit, :math:`f = (2y - 1) l = \log(p_y / (1 - p_y))`; L is binary cross-entropy.

    q is :math:`1 - p_y`, w is :math:`p_y (1 - p_y)`. The model returns ``(B,)`` or ``(B, 1)`` logits; labels
    are ``(B,)`` or ``(B, 1)``, each 0 or 1, of any real dtype or bool.
    """

    name: ClassVar[str] = "binary_classification"

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        logits, labels = logits_and_labels(model_call, batch)
        logits = one_column(logits, "The logits have shape", hint=_OTHERS)
        labels = one_column(labels, "The labels have shape", hint=_OTHERS)
        _check_zero_one(logits, labels)
        return margin_terms(two_class_margins(logits, labels))

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw labels from the sigmoid; see :meth:`AbstractModelOutput.sample_labels`."""
        logits, _ = logits_and_labels(model_call, batch)
        logits = one_column(logits, "The logits have shape", hint=_OTHERS)
        return with_labels(batch, sampled_answers(logits, noise))


@final
class MultiLabelModelOutput(AbstractModelOutput):
    r"""Sum over C binary labels of the margin, or of log p; logits and labels are ``(B, C)``, labels 0 or 1.

    ``output="log_prob"``: :math:`f = \sum_c \log p_c`, L = -f is the summed binary cross-entropy,
    q = 1, w = 0.

    ``output="margin"``: :math:`f = \sum_c (2 y_c - 1) l_c`. Each margin has a different q, so the gradient
    of the summed cross-entropy is not a multiple of the gradient of f, and no scalar q exists for it. L is
    therefore C times the loss at the mean margin, :math:`C \log(1 + e^{-f/C})`: :math:`q = \sigma(-f/C)`,
    :math:`w = q (1 - q) / C`. For C = 1 this is binary cross-entropy.
    """

    name: ClassVar[str] = "multilabel_classification"
    _setting_names = ("output",)

    def __init__(self, *, output: Literal["margin", "log_prob"] = "margin") -> None:
        """Store the settings.

        Args:
            output: Definition of f.

        Raises:
            InvalidInputError: For any other value.
        """
        self.output = one_of(("margin", "log_prob"), output=output)
        self.has_curvature = self.output == "margin"

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        logits, labels = logits_and_labels(model_call, batch)
        if logits.dim() != 2 or logits.shape[1] == 0:
            raise InvalidInputError(
                f"The model gave logits of shape {shape_texts(logits.shape)[0]}. Expected (B, C): one logit per "
                "label and sample."
            )
        _check_zero_one(logits, labels)
        margins = two_class_margins(logits, labels)
        if self.output == "log_prob":
            return linear_terms(F.logsigmoid(margins).sum(1))
        return margin_terms(margins.sum(1), float(logits.shape[1]))

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw each label from its sigmoid; see :meth:`AbstractModelOutput.sample_labels`."""
        logits, _ = logits_and_labels(model_call, batch)
        return with_labels(batch, sampled_answers(logits, noise))

    def log_likelihood(self) -> AbstractModelOutput:
        """Return the sum of log p, whose gradient is that of minus the summed cross-entropy."""
        return MultiLabelModelOutput(output="log_prob")


def _check_zero_one(logits: Tensor, labels: Tensor) -> None:
    """Raise if the labels' shape differs from the logits', or (when run eagerly) a label is not 0 or 1."""
    if labels.shape != logits.shape:
        seen, expected = shape_texts(labels.shape, logits.shape)
        raise InvalidInputError(
            f"The labels have shape {seen}, the logits {expected}. Expected one label per logit."
        )
    refuse_invalid((labels == 0) | (labels == 1), labels, expected="0 or 1")
