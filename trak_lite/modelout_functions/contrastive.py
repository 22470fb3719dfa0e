"""Model output function of embedding models that are trained on queries, positives and negatives.

Shapes: B samples, n negatives of a row, d embedding width.
"""

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
    columns_of,
    fields_of,
    labels_tensor,
    positive_real,
    prefixed,
    shape_texts,
    tensor_of,
)
from trak_lite.modelout_functions._margins import multiclass_terms
from trak_lite.modelout_functions._positions import pooled
from trak_lite.modelout_functions._sampling import sampled_classes
from trak_lite.types import Batch, OutputTerms

__all__ = ["ContrastiveModelOutput"]

_QUERY, _POSITIVE, _NEGATIVE, _LABELS = "query_", "positive_", "negative_", "labels"
_PREFIXES = (_QUERY, _POSITIVE, _NEGATIVE)
_STATES = ("sentence_embedding", "embeddings", "last_hidden_state")


@final
class ContrastiveModelOutput(AbstractModelOutput):
    r"""Margin of the positive over the negatives of the same row, as in InfoNCE without negatives from the batch.

    With the similarity s of two embeddings, a temperature T, a query u, its positive p and its negatives
    :math:`n_1, \dots`: :math:`f = s(u, p)/T - \log \sum_j e^{s(u, n_j)/T}`. L is the cross-entropy of the positive
    among these candidates, :math:`L = \log(1 + e^{-f})`, so :math:`q = \sigma(-f)` and :math:`w = q (1 - q)`.

    Other rows of a batch are no negatives, because f of a row must not depend on its batch. For image-text pairs with
    negatives from the train set see :class:`CLIPModelOutput`.

    Batches: a mapping or dataclass whose columns begin with ``query_``, ``positive_`` and ``negative_``: the inputs of
    the model with these prefixes. Columns of negatives are ``(B, n, ...)``. Columns without prefix are inputs of all
    calls. Or a tuple ``(query, positive, negatives)``. The model is called once for queries, positives and each of the
    n negatives. It returns ``(B, d)`` embeddings; a mapping or object with ``sentence_embedding`` or ``embeddings``; or
    ``last_hidden_state`` ``(B, T, d)`` (also as a tensor), which is pooled. ``labels`` (optional, ``(B,)``) numbers the
    candidate that is the positive: 0 is that of ``positive_``, j the j-th negative.

    Source: van den Oord et al. (arXiv:1807.03748), equation 4.
    """

    name: ClassVar[str] = "contrastive"
    _setting_names = ("temperature", "similarity", "pooling")

    def __init__(
        self,
        *,
        temperature: float = 0.05,
        similarity: Literal["cosine", "dot"] = "cosine",
        pooling: Literal["mean", "first", "last"] = "mean",
    ) -> None:
        """Store the settings.

        Args:
            temperature: T.
            similarity: Cosine or inner product of two embeddings.
            pooling: How states of tokens become an embedding: their mean, or the state of the first or the last token,
                over positions where ``attention_mask`` is not 0.

        Raises:
            InvalidInputError: If a setting is unknown, or the temperature is not a finite number above 0.
        """
        self.temperature = positive_real(temperature=temperature)
        self.similarity = one_of(("cosine", "dot"), similarity=similarity)
        self.pooling = one_of(("mean", "first", "last"), pooling=pooling)

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        fields, labels = _parts(batch)
        logits = self._similarities(model_call, fields)
        if labels is None:
            labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        labels = class_labels(
            labels_tensor(labels, "(B,)"), shape=logits.shape[:1], num_classes=logits.shape[1]
        )
        return multiclass_terms(logits, labels, temperature=1.0)

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw which candidate is the positive; see :meth:`AbstractModelOutput.sample_labels`."""
        fields, _ = _parts(batch)
        return {**fields, _LABELS: sampled_classes(self._similarities(model_call, fields), noise)}

    def _similarities(self, model_call: ModelCall, fields: dict[str, Any]) -> Tensor:
        """Return the similarities of query and candidates over the temperature, ``(B, 1 + n)``."""
        query, positive, negatives = (
            prefixed(fields, prefix, [other for other in _PREFIXES if other != prefix])
            for prefix in _PREFIXES
        )
        own = {name.removeprefix(_NEGATIVE) for name in fields if name.startswith(_NEGATIVE)}
        candidates = [positive]
        counts = {
            value.shape[1] if isinstance(value, Tensor) and value.dim() >= 2 else 0
            for name, value in negatives.items()
            if name in own
        }
        if len(counts) != 1 or 0 in counts:
            raise InvalidInputError(
                "The columns of negatives do not have the same number of negatives. Expected tensors of shape "
                "(B, n, ...), with n of at least 1."
            )
        # One call for each: rows of a batch of B n texts would not be the samples of the batch.
        for place in range(counts.pop()):
            candidates.append(
                {name: value[:, place] if name in own else value for name, value in negatives.items()}
            )
        anchor = self._embedding(model_call, query)
        similar = [(anchor * self._embedding(model_call, inputs)).sum(1) for inputs in candidates]
        return torch.stack(similar, dim=1) / self.temperature

    def _embedding(self, model_call: ModelCall, inputs: dict[str, Any]) -> Tensor:
        """Return embeddings ``(B, d)``, of length 1 for cosines."""
        given = dict(inputs)
        args = (given.pop(""),) if "" in given else ()
        states = tensor_of(model_call(*args, **given), *_STATES)
        if states.dim() == 3:
            states = pooled(states, given.get("attention_mask"), self.pooling)
        if states.dim() != 2:
            raise InvalidInputError(
                f"The model gave embeddings of shape {shape_texts(states.shape)[0]}. Expected (B, d), or states "
                "(B, T, d)."
            )
        return F.normalize(states, dim=1) if self.similarity == "cosine" else states


def _parts(batch: Batch) -> tuple[dict[str, Any], Any]:
    """Return the columns without labels, and the labels or ``None``."""
    if fields_of(batch) is None and isinstance(batch, tuple | list) and len(batch) == 3:
        return dict(zip(_PREFIXES, batch, strict=True)), None
    fields = columns_of(batch, [])
    for prefix in _PREFIXES:
        if not any(name.startswith(prefix) for name in fields):
            raise InvalidInputError(
                f"The batch has the columns {list(fields)}, none of which begins with {prefix!r}. Expected the inputs "
                f"of the model with the prefixes {list(_PREFIXES)}."
            )
    return fields, fields.pop(_LABELS, None)
