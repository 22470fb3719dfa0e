"""Sums over the labelled positions of a sample: tokens of a text, pixels of an image, queries of a detector.

:class:`CausalLanguageModelingModelOutput` says what f, q and w are.

Shapes: B samples, ``*P`` positions, C classes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from trak_lite._validate import one_of
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, UniformNoise
from trak_lite.modelout_functions._inputs import (
    class_labels,
    is_unread,
    logits_of,
    nan_unless,
    shape_texts,
    split_labels,
)
from trak_lite.modelout_functions._margins import class_margins, linear_terms, margin_terms
from trak_lite.modelout_functions._sampling import sampled_classes, with_labels
from trak_lite.types import Batch, OutputTerms

__all__ = [
    "IGNORED",
    "PositionOutput",
    "PositionwiseModelOutput",
    "aligned_tokens",
    "label_terms",
    "pooled",
    "token_inputs",
]

IGNORED = -100
"""Label of a position that is not predicted (padding, a prompt), as in PyTorch and Hugging Face."""

PositionOutput: TypeAlias = Literal["margin", "log_prob"]


class PositionwiseModelOutput(AbstractModelOutput):
    """Sum over the labelled positions of a sample of log p, or of the margin."""

    ignore_index: int = IGNORED
    _setting_names: ClassVar[tuple[str, ...]] = ("output",)

    def __init__(self, *, output: PositionOutput = "log_prob") -> None:
        """Store the definition of f.

        Raises:
            InvalidInputError: For any other value.
        """
        self.output = one_of(("margin", "log_prob"), output=output)
        self.has_curvature = self.output == "margin"

    @abstractmethod
    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the model; return logits ``(B, *P, C)`` and the int64 labels ``(B, *P)`` that they predict."""

    def _relabelled(self, model_call: ModelCall, batch: Batch, labels: Tensor) -> Batch:
        """Return the batch with labels ``(B, *P)`` in place of those of :meth:`_logits_and_labels`."""
        return with_labels(batch, labels)

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        logits, labels = self._logits_and_labels(model_call, batch)
        terms, count = label_terms(logits, labels, ignored=self.ignore_index, output=self.output)
        total = terms.flatten(1).sum(1)
        if self.output == "log_prob":
            return linear_terms(total)
        return margin_terms(total, count.to(total.dtype))

    def position_outputs(self, model_call: ModelCall, batch: Batch) -> Tensor:
        """Return the term of f of every position ``(B, *P)``, 0 where nothing is predicted."""
        logits, labels = self._logits_and_labels(model_call, batch)
        return label_terms(logits, labels, ignored=self.ignore_index, output=self.output)[0]

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw the label of every labelled position; see :meth:`AbstractModelOutput.sample_labels`.

        The model's inputs remain those of the data.
        """
        logits, labels = self._logits_and_labels(model_call, batch)
        drawn = torch.where(labels == self.ignore_index, labels, sampled_classes(logits, noise))
        return self._relabelled(model_call, batch, drawn)

    def log_likelihood(self) -> Self:
        """Return the sum of log p, whose gradient is that of minus the summed cross-entropy."""
        return type(self)(**{**self.settings(), "output": "log_prob"})


def label_terms(
    logits: Tensor, labels: Tensor, *, ignored: int = IGNORED, output: str = "log_prob"
) -> tuple[Tensor, Tensor]:
    """Return log p, or the margin, of every label and the number of labelled positions.

    Args:
        logits: ``(B, *P, C)``.
        labels: ``(B, *P)`` int64.
        ignored: Label of positions that are not predicted.
        output: ``"log_prob"`` or ``"margin"``.

    Returns:
        ``(B, *P)``, 0 where the label is ignored; and ``(B,)``. In a sample without labels every entry is NaN, also its
        gradient.

    Raises:
        InvalidInputError: If a sample has no labelled position (when run eagerly).
    """
    predicted = labels != ignored
    count = predicted.flatten(1).sum(1)
    if not is_unread(count) and not bool((count > 0).all()):
        sample = int((count == 0).nonzero()[0])
        raise InvalidInputError(
            f"sample {sample} has no token to predict: all its labels that the logits align with are "
            f"{ignored}. Expected at least one label that is not; drop the sample or check the masking."
        )
    # Replace ignored labels by the valid label 0, so that only labels out of range become NaN.
    margins = class_margins(logits, labels.masked_fill(~predicted, 0))
    some = (count > 0).reshape(-1, *[1] * (labels.dim() - 1))
    terms = F.logsigmoid(margins) if output == "log_prob" else margins
    # A sample without labelled positions keeps all terms, so that its gradient becomes NaN as well.
    terms = terms.masked_fill(~predicted & some, 0.0)
    return terms * nan_unless(some, terms), count


def pooled(states: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """Return the mean, the sum, the first or the last of states over the positions that count.

    Args:
        states: ``(B, T, d)``.
        mask: ``(B, T)``, not 0 at positions that count; ``None`` if all do.
        how: ``"mean"``, ``"sum"``, ``"first"`` or ``"last"``.

    Returns:
        ``(B, d)``.
    """
    kept = torch.ones_like(states[..., 0]) if mask is None else (mask != 0).to(states.dtype)
    if how in ("mean", "sum"):
        total = (states * kept.unsqueeze(-1)).sum(1)
        return total if how == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1.0)
    places = torch.arange(1, states.shape[1] + 1, device=states.device)
    ranks = kept * (places if how == "last" else places.flip(0))
    place = ranks.argmax(1).reshape(-1, 1, 1).expand(-1, 1, states.shape[2])
    return states.gather(1, place).squeeze(1)


def token_inputs(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Return positional inputs, keyword inputs and labels of a batch of token sequences.

    Raises:
        InvalidInputError: If the batch has no labels, or more than two positional inputs.
    """
    args, kwargs, labels = split_labels(batch)
    if len(args) > 2:
        raise InvalidInputError(
            f"The batch has {len(args)} parts before the labels. Expected input_ids and at most "
            "attention_mask; use dict batches for more."
        )
    if len(args) == 2:
        kwargs = {"attention_mask": args[1]}
    return args[:1], kwargs, labels


def aligned_tokens(
    answer: Any, labels: Tensor, *, shift: bool, what: str = "labels"
) -> tuple[Tensor, Tensor]:
    """Return logits ``(B, T', V)`` and the int64 labels ``(B, T')`` that they predict, both checked.

    Args:
        answer: The model's output for ``(B, T)`` tokens.
        labels: ``(B, T)`` integers, -100 at positions that are not predicted.
        shift: Whether position t of the logits predicts label t + 1, otherwise label t.
        what: Name of the labels in messages.

    Raises:
        InvalidInputError: If logits or labels have a wrong shape or dtype, or a label is out of range.
    """
    logits = logits_of(answer)
    if logits.dim() != 3 or (shift and logits.shape[1] < 2):
        raise InvalidInputError(
            f"The model gave logits of shape {shape_texts(logits.shape)[0]}. Expected (B, T, V)"
            + (" with at least 2 positions, as position t predicts label t + 1." if shift else ".")
        )
    labels = class_labels(
        labels,
        shape=logits.shape[:2],
        num_classes=logits.shape[2],
        ignored=(IGNORED,),
        start=int(shift),
        what=what,
    )
    return (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
