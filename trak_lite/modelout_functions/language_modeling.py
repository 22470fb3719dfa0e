"""Model output function of causal language models. Shapes: B samples, T positions, V vocabulary."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F

from trak_lite._validate import one_of
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, UniformNoise
from trak_lite.modelout_functions._inputs import (
    class_labels,
    is_transformed,
    logits_of,
    nan_unless,
    shape_texts,
    split_labels,
)
from trak_lite.modelout_functions._margins import class_margins, linear_terms, margin_terms
from trak_lite.modelout_functions._sampling import sampled_classes, with_labels
from trak_lite.types import Batch, OutputTerms

__all__ = ["IGNORED", "CausalLanguageModelingModelOutput"]

IGNORED = -100
"""Label of a position that is not predicted (padding, a prompt), as in PyTorch and Hugging Face."""


@final
class CausalLanguageModelingModelOutput(AbstractModelOutput):
    r"""Sum over the n predicted tokens of a sample of the margin, or of log p.

    ``output="log_prob"``: :math:`f = \sum_t \log p_t`, L = -f is the summed cross-entropy, q = 1, w = 0.

    ``output="margin"``: :math:`f = \sum_t \log(p_t / (1 - p_t))`. Each token has a different q, so the
    gradient of the summed cross-entropy is not a multiple of the gradient of f, and no scalar q exists for
    it. L is therefore n times the loss at the mean margin, :math:`n \log(1 + e^{-f/n})`:
    :math:`q = \sigma(-f/n)`, :math:`w = q (1 - q) / n`. For n = 1 this is cross-entropy.

    Batches: a mapping or dataclass with ``labels`` calls ``model(**others)``; ``(input_ids, labels)`` calls
    ``model(input_ids)``; ``(input_ids, attention_mask, labels)`` calls
    ``model(input_ids, attention_mask=...)``. The model returns ``(B, T, V)`` logits; labels are ``(B, T)``
    integers, -100 at positions that are not predicted.
    """

    name: ClassVar[str] = "causal_language_modeling"

    def __init__(self, *, output: Literal["margin", "log_prob"] = "log_prob", shift: bool = True) -> None:
        """Store the settings.

        Args:
            output: Definition of f.
            shift: Whether position t of the logits predicts ``labels[t + 1]`` (labels are the input ids);
                otherwise it predicts ``labels[t]``.

        Raises:
            InvalidInputError: For any other value.
        """
        self.output = one_of(("margin", "log_prob"), output=output)
        if not isinstance(shift, bool):
            raise InvalidInputError(f"shift must be True or False, got {shift!r}.")
        self.shift = shift
        self.has_curvature = self.output == "margin"

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        logits, labels = self._logits_and_labels(model_call, batch)
        predicted = labels != IGNORED
        count = _counted(predicted)
        # Replace the label of ignored positions by the valid label 0, so that only labels out of range become NaN.
        margins = class_margins(logits, labels.masked_fill(~predicted, 0))
        terms = F.logsigmoid(margins) if self.output == "log_prob" else margins
        some = count > 0
        # A sample without predicted tokens keeps all terms, so that its gradient becomes NaN as well.
        total = terms.masked_fill(~predicted & some.unsqueeze(1), 0.0).sum(1)
        total = total * nan_unless(some, total)
        if self.output == "log_prob":
            return linear_terms(total)
        return margin_terms(total, count.to(total.dtype))

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw the label of every predicted token; see :meth:`AbstractModelOutput.sample_labels`.

        The model's input tokens remain those of the data.
        """
        logits, labels = self._logits_and_labels(model_call, batch)
        drawn = split_labels(batch).labels.clone()
        aligned = drawn[:, 1:] if self.shift else drawn
        aligned.copy_(torch.where(labels == IGNORED, labels, sampled_classes(logits, noise)))
        return with_labels(batch, drawn)

    def log_likelihood(self) -> AbstractModelOutput:
        """Return the sum of log p, whose gradient is that of minus the summed cross-entropy."""
        return CausalLanguageModelingModelOutput(output="log_prob", shift=self.shift)

    def settings(self) -> dict[str, Any]:
        """Return the choice of f and of alignment."""
        return {"output": self.output, "shift": self.shift}

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the model; return logits ``(B, T', V)`` and the labels ``(B, T')`` that they predict."""
        args, kwargs, labels = split_labels(batch)
        if len(args) > 2:
            raise InvalidInputError(
                f"The batch has {len(args)} parts before the labels. Expected input_ids and at most "
                "attention_mask; use dict batches for more."
            )
        if len(args) == 2:
            kwargs = {"attention_mask": args[1]}
        return self._aligned(logits_of(model_call(*args[:1], **kwargs)), labels)

    def _aligned(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``(B, T', V)`` and the int64 labels ``(B, T')`` that they predict, both checked."""
        if logits.dim() != 3 or (self.shift and logits.shape[1] < 2):
            raise InvalidInputError(
                f"The model gave logits of shape {shape_texts(logits.shape)[0]}. Expected (B, T, V)"
                + (" with at least 2 positions, as position t predicts label t + 1." if self.shift else ".")
            )
        labels = class_labels(
            labels,
            shape=logits.shape[:2],
            num_classes=logits.shape[2],
            ignored=(IGNORED,),
            start=int(self.shift),
        )
        return (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)


def _counted(predicted: Tensor) -> Tensor:
    """Return n ``(B,)``, the number of predicted tokens per sample; raise (when run eagerly) if one has none."""
    count = predicted.sum(1)
    if not is_transformed(count) and not bool((count > 0).all()):
        sample = int((count == 0).nonzero()[0])
        raise InvalidInputError(
            f"sample {sample} has no token to predict: all its labels that the logits align with are "
            f"{IGNORED}. Expected at least one label that is not; drop the sample or check the masking."
        )
    return count
