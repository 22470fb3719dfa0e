"""Model output functions of one label or number per sample: classifiers and regression.

Shapes: B samples; C classes, or C binary labels per sample, whose logit is that of class 1.
Source of the classifiers: TRAK (arXiv:2303.14186), section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trak_lite.core.validate import one_of, positive_real
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall
from trak_lite.modelout_functions._inputs import (
    class_labels,
    distinct_names,
    finite_factor,
    logits_and_labels,
    one_column,
    refuse_invalid,
    shape_texts,
    split_labels,
    tensor_of,
)
from trak_lite.modelout_functions._margins import (
    UniformNoise,
    linear_terms,
    margin_terms,
    multiclass_terms,
    sampled_answers,
    sampled_classes,
    sampled_values,
    two_class_margins,
    with_labels,
)
from trak_lite.types import Batch, OutputTerms


@dataclass(eq=False)
class _Classifier(AbstractModelOutput):
    """Margin of the label; a subclass says how the model is called with a batch."""

    temperature: float = 1.0
    """T of the softmax in q, a finite number above 0; f does not use it."""
    _checks: ClassVar = {"temperature": positive_real}

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        logits, labels = self._logits_and_labels(model_call, batch)
        if logits.dim() != 2:
            raise InvalidInputError(
                f"The model gave logits of shape {shape_texts(logits.shape)[0]}. Expected (B, C): one logit per class "
                "and sample."
            )
        labels = class_labels(labels, shape=logits.shape[:1], num_classes=logits.shape[1])
        return multiclass_terms(logits, labels, temperature=self.temperature)

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        logits, _ = self._logits_and_labels(model_call, batch)
        return with_labels(batch, sampled_classes(logits / self.temperature, noise))

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        return logits_and_labels(model_call, batch)


@final
class ImageClassificationModelOutput(_Classifier):
    r"""Margin of the label, :math:`f = l_y - \log\sum_{j \neq y} e^{l_j}`; L is cross-entropy.

    q is :math:`1 - \mathrm{softmax}(l/T)_y` and w is :math:`q (1 - q)`. As in the original TRAK, f does not
    use the temperature T; :math:`\nabla L = -q \nabla f` is exact for T = 1.

    Batches: ``(*inputs, labels)`` calls ``model(*inputs)``; a mapping or dataclass calls ``model(**others)``.
    The model returns ``(B, C)`` logits; labels are ``(B,)`` integers.
    """

    name: ClassVar[str] = "image_classification"


@final
class IterativeImageClassificationModelOutput(_Classifier):
    """:class:`ImageClassificationModelOutput` whose ``get_output`` takes a batch, as in the original TRAK.

    It exists for code written for the original's iterative gradient computer. The gradient computers of
    trak_lite accept either class.
    """

    name: ClassVar[str] = "iterative_image_classification"
    # Named here, because get_output alone would select the original's interface.
    evaluate = _Classifier.evaluate

    def get_output(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        *batch: Any,
    ) -> Tensor:
        """Return f of a whole batch of images and labels, ``(B,)``; see :meth:`AbstractModelOutput.get_output`."""
        return self.evaluate(ModelCall(model, weights, buffers), batch).output


@final
@dataclass(eq=False)
class TextClassificationModelOutput(_Classifier):
    """Margin of the label for models with keyword inputs; f, q and w as in image classification.

    Batches: the parts of a positional batch, ``(input_ids, token_type_ids, attention_mask, labels)`` as in the
    original TRAK, are passed under ``input_names``. From a mapping or dataclass ``labels`` or ``label`` is removed
    and all other entries are passed by name, as in Hugging Face.
    """

    name: ClassVar[str] = "text_classification"

    input_names: Sequence[str] = field(
        default=("input_ids", "token_type_ids", "attention_mask"), kw_only=True
    )
    """Keywords of a positional batch's parts before the labels, in order."""
    _checks: ClassVar = {**_Classifier._checks, "input_names": distinct_names}

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        args, kwargs, labels = split_labels(batch)
        if args:
            if len(args) != len(self.input_names):
                raise InvalidInputError(
                    f"The batch has {len(args)} part(s) before the labels. Expected "
                    f"{list(self.input_names)}. Use dict batches, "
                    "task=trak_lite.modelout_functions.TextClassificationModelOutput(input_names=[...]), or, for a "
                    "model that is called as model(x), task='image_classification'."
                )
            kwargs = dict(zip(self.input_names, args, strict=True))
        return tensor_of(model_call(**kwargs), "logits"), labels


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
        _check_zero_one(logits, labels, expected="0 or 1")
        return margin_terms(two_class_margins(logits, labels))

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw labels from the sigmoid; see :meth:`AbstractModelOutput.sample_labels`."""
        logits, _ = logits_and_labels(model_call, batch)
        logits = one_column(logits, "The logits have shape", hint=_OTHERS)
        return with_labels(batch, sampled_answers(logits, noise))


@final
@dataclass(eq=False, kw_only=True)
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

    output: Literal["margin", "log_prob"] = "margin"
    """Definition of f."""
    _checks: ClassVar = {"output": partial(one_of, ("margin", "log_prob"))}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_curvature = self.output == "margin"

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        logits, labels = logits_and_labels(model_call, batch)
        if logits.dim() != 2 or logits.shape[1] == 0:
            raise InvalidInputError(
                f"The model gave logits of shape {shape_texts(logits.shape)[0]}. Expected (B, C): one logit per "
                "label and sample."
            )
        _check_zero_one(
            logits,
            labels,
            expected="0 or 1. If labels are missing, pass a task f(model_call, batch) that masks them, such as the sum "
            "of log p over the labels that are there, or leave these rows out (torch.utils.data.Subset)",
        )
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


def _check_zero_one(logits: Tensor, labels: Tensor, *, expected: str) -> None:
    """Raise if the labels' shape differs from the logits', or (when run eagerly) a label is not what is expected."""
    if labels.shape != logits.shape:
        actual, expected = shape_texts(labels.shape, logits.shape)
        raise InvalidInputError(
            f"The labels have shape {actual}, the logits {expected}. Expected one label per logit."
        )
    refuse_invalid((labels == 0) | (labels == 1), labels, expected=expected)


@final
@dataclass(eq=False, kw_only=True)
class RegressionModelOutput(AbstractModelOutput):
    r"""The prediction, or minus half its squared error.

    ``output="prediction"``, for one number per sample: f is the prediction and :math:`L = (f - y)^2 / 2`, so
    q = y - f (signed) and w = 1. Predictions and targets are ``(B,)`` or ``(B, 1)`` each.

    ``output="neg_squared_error"``, for targets of any shape: :math:`f = -\|f_\theta(x) - y\|^2 / 2`, L = -f,
    q = 1, w = 0. A vector prediction cannot be f, which is a scalar, and its loss has no scalar q.

    Predictions and targets have the same shape, except that one of them may have an extra last axis of size 1.
    """

    name: ClassVar[str] = "regression"

    output: Literal["prediction", "neg_squared_error"] = "prediction"
    """Definition of f."""
    _checks: ClassVar = {"output": partial(one_of, ("prediction", "neg_squared_error"))}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_curvature = self.output == "prediction"

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        predictions, targets = _aligned(*logits_and_labels(model_call, batch))
        if targets.is_complex() or targets.dtype == torch.bool:
            raise InvalidInputError(f"The targets have dtype {targets.dtype}. Expected real numbers.")
        raw_targets, targets = targets, targets.to(predictions.dtype)
        finite = finite_factor(targets, raw_targets, what="targets")
        if self.output == "neg_squared_error":
            squared = (predictions - targets).square() * finite
            return linear_terms(-0.5 * squared.unsqueeze(-1).flatten(1).sum(1))
        column = one_column(
            predictions,
            "The model gave predictions of shape",
            hint=' for output="prediction"; for vector targets use RegressionModelOutput(output="neg_squared_error").',
        )
        output = column * finite.reshape(-1)
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
        actual, expected = shape_texts(predictions.shape, targets.shape)
        raise InvalidInputError(
            f"The predictions have shape {actual}, the targets {expected}. Expected the same shape with the "
            "samples on axis 0; reshape the targets or squeeze the model's output."
        )
    return predictions, targets
