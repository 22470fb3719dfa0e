"""Sums over the labelled positions of a sample: tokens of a text, pixels of an image, queries of a detector.

:class:`CausalLanguageModelingModelOutput` says what f, q and w are.

Shapes: B samples, ``*P`` positions (T of tokens), C classes (V tokens of a vocabulary).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trak_lite.core.validate import flag, integer, integer_at_least, one_of, optional
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall
from trak_lite.modelout_functions._inputs import (
    class_labels,
    fields_of,
    is_unread,
    nan_unless,
    shape_texts,
    split_labels,
    tensor_of,
)
from trak_lite.modelout_functions._margins import (
    UniformNoise,
    class_margins,
    linear_terms,
    margin_terms,
    sampled_classes,
    with_labels,
)
from trak_lite.types import Batch, OutputTerms

IGNORED = -100
"""Label of a position that is not predicted (padding, a prompt), as in PyTorch and Hugging Face."""


@dataclass(eq=False, kw_only=True)
class PositionwiseModelOutput(AbstractModelOutput):
    """Sum over the labelled positions of a sample of log p, or of the margin."""

    ignore_index = IGNORED

    output: Literal["margin", "log_prob"] = "log_prob"
    """Definition of f."""
    _checks: ClassVar = {"output": partial(one_of, ("margin", "log_prob"))}

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """Return log p, or the margin, of every label ``(B, *P)``, 0 where it is ignored, and how many are not, ``(B,)``.

    Logits are ``(B, *P, C)``, labels int64. A sample without labels raises InvalidInputError when run eagerly; under
    transforms its entries are NaN, and so is its gradient.
    """
    predicted = labels != ignored
    count = predicted.flatten(1).sum(1)
    if not is_unread(count) and not bool((count > 0).all()):
        sample = int((count == 0).nonzero()[0])
        raise InvalidInputError(
            f"sample {sample} has no position to predict (token or pixel): all its labels that the logits align with "
            f"are {ignored}. Expected at least one label that is not. Leave such rows out (torch.utils.data.Subset), "
            "or check the masking."
        )
    # Replace ignored labels by the valid label 0, so that only labels out of range become NaN.
    margins = class_margins(logits, labels.masked_fill(~predicted, 0), unused=~predicted)
    some = (count > 0).reshape(-1, *[1] * (labels.dim() - 1))
    terms = F.logsigmoid(margins) if output == "log_prob" else margins
    # A sample without labelled positions keeps all terms, so that its gradient becomes NaN as well.
    terms = terms.masked_fill(~predicted & some, 0.0)
    return terms * nan_unless(some, terms), count


def pooled(states: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """Return the ``"mean"``, ``"sum"``, ``"first"`` or ``"last"`` of states ``(B, T, d)`` over positions, ``(B, d)``.

    The positions are those where the mask ``(B, T)`` is not 0; ``None`` for all.
    """
    kept = torch.ones_like(states[..., 0]) if mask is None else (mask != 0).to(states.dtype)
    if how in ("mean", "sum"):
        total = (states * kept.unsqueeze(-1)).sum(1)
        return total if how == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1.0)
    positions = torch.arange(1, states.shape[1] + 1, device=states.device)
    ranks = kept * (positions if how == "last" else positions.flip(0))
    index = ranks.argmax(1).reshape(-1, 1, 1).expand(-1, 1, states.shape[2])
    return states.gather(1, index).squeeze(1)


def _token_logits(model_call: ModelCall, batch: Batch, *, shift: bool) -> tuple[Tensor, Tensor]:
    """Call the model with a batch of token sequences; return logits and labels, see :func:`aligned_tokens`."""
    args, kwargs, labels = split_labels(batch)
    if len(args) > 2:
        raise InvalidInputError(
            f"The batch has {len(args)} parts before the labels. Expected input_ids and at most "
            "attention_mask; use dict batches for more."
        )
    if len(args) == 2:
        kwargs = {"attention_mask": args[1]}
    return aligned_tokens(model_call(*args[:1], **kwargs), labels, shift=shift)


def aligned_tokens(
    answer: Any, labels: Tensor, *, shift: bool, what: str = "labels"
) -> tuple[Tensor, Tensor]:
    """Return logits ``(B, T', V)`` and the int64 labels ``(B, T')`` that they predict, both checked.

    With ``shift`` position t of the model's logits predicts label t + 1, otherwise label t. The labels ``(B, T)``,
    named ``what`` in messages, are -100 at positions that are not predicted.
    """
    logits = tensor_of(answer, "logits")
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


@final
@dataclass(eq=False, kw_only=True)
class CausalLanguageModelingModelOutput(PositionwiseModelOutput):
    r"""Sum over the n predicted tokens of a sample of the margin, or of log p.

    ``output="log_prob"``: :math:`f = \sum_t \log p_t`, L = -f is the summed cross-entropy, q = 1, w = 0.

    ``output="margin"``: :math:`f = \sum_t \log(p_t / (1 - p_t))`. Each token has a different q, so the
    gradient of the summed cross-entropy is not a multiple of the gradient of f, and no scalar q exists for
    it. L is therefore n times the loss at the mean margin, :math:`n \log(1 + e^{-f/n})`:
    :math:`q = \sigma(-f/n)`, :math:`w = q (1 - q) / n`. For n = 1 this is cross-entropy.

    Batches: a mapping or dataclass with ``labels`` calls ``model(**others)``; ``(input_ids, labels)`` calls
    ``model(input_ids)``; ``(input_ids, attention_mask, labels)`` calls
    ``model(input_ids, attention_mask=...)``. The model returns ``(B, T, V)`` logits; labels are ``(B, T)``
    integers, -100 at positions that are not predicted. For supervised fine-tuning these are all positions outside the
    assistant's answers: :func:`response_labels` makes such labels with a chat template.
    """

    name: ClassVar[str] = "causal_language_modeling"

    shift: bool = True
    """Whether position t of the logits predicts ``labels[t + 1]`` (labels are the input ids); otherwise it predicts
    ``labels[t]``."""
    _checks: ClassVar = {**PositionwiseModelOutput._checks, "shift": flag}

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        return _token_logits(model_call, batch, shift=self.shift)

    def _relabelled(self, model_call: ModelCall, batch: Batch, labels: Tensor) -> Batch:
        drawn = split_labels(batch).labels.clone()
        (drawn[:, 1:] if self.shift else drawn).copy_(labels)
        return with_labels(batch, drawn)


@final
class MaskedLanguageModelingModelOutput(PositionwiseModelOutput):
    r"""Sum over the masked tokens of a sample of log p of the original token, or of the margin.

    f, q and w are those of :class:`CausalLanguageModelingModelOutput`, but position t of the logits predicts
    ``labels[t]``. Labels are -100 at positions that are not masked. Mask each row once beforehand, because a row must
    not be random: most masking collators draw new masks for every batch.

    Batches: as for :class:`CausalLanguageModelingModelOutput`. The model returns ``(B, T, V)`` logits.
    """

    name: ClassVar[str] = "masked_language_modeling"

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        return _token_logits(model_call, batch, shift=False)


@final
@dataclass(eq=False, kw_only=True)
class SequenceToSequenceModelOutput(PositionwiseModelOutput):
    r"""Sum over the tokens of the answer of an encoder-decoder of log p, or of the margin.

    f, q and w are those of :class:`CausalLanguageModelingModelOutput`, with position t of the decoder predicting
    ``labels[t]``; labels are -100 at positions that are not predicted.

    Batches: a mapping or dataclass with ``labels``; the other entries are keyword arguments of the model. Without
    ``decoder_input_ids`` they are the labels shifted right by one, after the start token and with the padding token in
    place of -100, as Hugging Face does. The two tokens are those of the settings, or of ``model.config``.
    """

    name: ClassVar[str] = "sequence_to_sequence"

    decoder_start_token_id: int | None = None
    """First token of the decoder's input; ``None`` uses ``model.config``."""
    pad_token_id: int | None = None
    """Token in the decoder's input for labels of -100; ``None`` uses ``model.config``."""
    _checks: ClassVar = {
        **PositionwiseModelOutput._checks,
        "decoder_start_token_id": optional(partial(integer_at_least, 0)),
        "pad_token_id": optional(partial(integer_at_least, 0)),
    }

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        kwargs, labels = self._inputs(model_call.model, batch)
        return aligned_tokens(model_call(**kwargs), labels, shift=False)

    def _relabelled(self, model_call: ModelCall, batch: Batch, labels: Tensor) -> Batch:
        # Without explicit inputs, the decoder would read the drawn labels.
        kwargs, _ = self._inputs(model_call.model, batch)
        return {**kwargs, "labels": labels}

    def _inputs(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Any], Tensor]:
        """Return the model's keyword arguments, with ``decoder_input_ids``, and the labels."""
        if fields_of(batch) is None:
            raise InvalidInputError(
                f"The batch is a {type(batch).__name__}. Expected a dict or dataclass with labels and the model's "
                "keyword arguments (input_ids, attention_mask, ...)."
            )
        _, kwargs, labels = split_labels(batch)
        if "decoder_input_ids" not in kwargs and "decoder_inputs_embeds" not in kwargs:
            start = self._token(model, "decoder_start_token_id")
            if labels.dim() != 2 or labels.is_floating_point():
                raise InvalidInputError(
                    f"The labels have shape {tuple(labels.shape)} and dtype {labels.dtype}. Expected (B, T) integers."
                )
            shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
            pad = self._token(model, "pad_token_id")
            kwargs["decoder_input_ids"] = shifted.masked_fill(shifted == IGNORED, pad)
        return kwargs, labels

    def _token(self, model: nn.Module, name: str) -> int:
        token = getattr(self, name)
        if token is None:
            token = getattr(getattr(model, "config", None), name, None)
        if not isinstance(token, int):
            raise InvalidInputError(
                f"The batch has no decoder_input_ids, and model.config has no {name} to make them with. Add "
                f"decoder_input_ids to the batch, or pass SequenceToSequenceModelOutput({name}=...)."
            )
        return token


@final
@dataclass(eq=False, kw_only=True)
class DenseClassificationModelOutput(PositionwiseModelOutput):
    """Sum over the labelled positions of a sample of log p, or of the margin.

    For semantic segmentation (one label per pixel: ``class_axis=1``), token classification and the classes of
    detections (one label per token, query or anchor: ``class_axis=-1``). For a detector that matches its queries to
    objects, the labels are the matched class of every query: match once beforehand.

    f, q and w are those of :class:`CausalLanguageModelingModelOutput`, with positions in place of tokens.

    Batches: ``(*inputs, labels)`` calls ``model(*inputs)``; a mapping or dataclass calls ``model(**others)``. The model
    returns logits, a mapping or object with ``logits``, or a mapping with ``out`` (torchvision). Labels are ``(B, *P)``
    integers, ``ignore_index`` at positions without a label.
    """

    name: ClassVar[str] = "dense_classification"

    class_axis: Literal[1, -1] = 1
    """Axis of the classes in the logits: 1 for ``(B, C, *P)``, -1 for ``(B, *P, C)``."""
    ignore_index: int = IGNORED
    """Label of positions without a label."""
    upsample: bool = False
    """Resize logits ``(B, C, h, w)`` to the size of the labels by bilinear interpolation, as Hugging Face does for
    segmentation."""
    _checks: ClassVar = {
        **PositionwiseModelOutput._checks,
        "class_axis": None,
        "ignore_index": integer,
        "upsample": None,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_axis not in (1, -1):
            raise InvalidInputError(
                f"class_axis must be 1 (images) or -1 (tokens, queries), got {self.class_axis!r}."
            )
        if not isinstance(self.upsample, bool) or (self.upsample and self.class_axis != 1):
            raise InvalidInputError(
                f"upsample must be True or False, and True only with class_axis=1, got {self.upsample!r}."
            )

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        args, kwargs, labels = split_labels(batch)
        answer = model_call(*args, **kwargs)
        if isinstance(answer, Mapping) and "logits" not in answer:
            answer = answer.get("out", answer)
        logits = tensor_of(answer, "logits")
        if logits.dim() < 3:
            raise InvalidInputError(
                f"The model gave logits of shape {shape_texts(logits.shape)[0]}. Expected "
                f"{'(B, C, *positions)' if self.class_axis == 1 else '(B, *positions, C)'}; for one label per sample "
                "use 'image_classification'."
            )
        if self.upsample and logits.dim() == 4 and labels.dim() == 3:
            logits = F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
        logits = logits.movedim(self.class_axis, -1)
        labels = class_labels(
            labels, shape=logits.shape[:-1], num_classes=logits.shape[-1], ignored=(self.ignore_index,)
        )
        return logits, labels
