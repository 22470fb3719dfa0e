"""Model output functions of language models. Shapes: B samples, T positions, V vocabulary."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import ModelCall
from trak_lite.modelout_functions._inputs import fields_of, split_labels
from trak_lite.modelout_functions._positions import (
    IGNORED,
    PositionOutput,
    PositionwiseModelOutput,
    aligned_tokens,
    token_inputs,
)
from trak_lite.modelout_functions._sampling import with_labels
from trak_lite.types import Batch

__all__ = [
    "IGNORED",
    "CausalLanguageModelingModelOutput",
    "MaskedLanguageModelingModelOutput",
    "SequenceToSequenceModelOutput",
]


@final
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
    _setting_names = ("output", "shift")

    def __init__(self, *, output: PositionOutput = "log_prob", shift: bool = True) -> None:
        """Store the settings.

        Args:
            output: Definition of f.
            shift: Whether position t of the logits predicts ``labels[t + 1]`` (labels are the input ids);
                otherwise it predicts ``labels[t]``.

        Raises:
            InvalidInputError: For any other value.
        """
        super().__init__(output=output)
        if not isinstance(shift, bool):
            raise InvalidInputError(f"shift must be True or False, got {shift!r}.")
        self.shift = shift

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        args, kwargs, labels = token_inputs(batch)
        return aligned_tokens(model_call(*args, **kwargs), labels, shift=self.shift)

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
        args, kwargs, labels = token_inputs(batch)
        return aligned_tokens(model_call(*args, **kwargs), labels, shift=False)


@final
class SequenceToSequenceModelOutput(PositionwiseModelOutput):
    r"""Sum over the tokens of the answer of an encoder-decoder of log p, or of the margin.

    f, q and w are those of :class:`CausalLanguageModelingModelOutput`, with position t of the decoder predicting
    ``labels[t]``; labels are -100 at positions that are not predicted.

    Batches: a mapping or dataclass with ``labels``; the other entries are keyword arguments of the model. Without
    ``decoder_input_ids`` they are the labels shifted right by one, after the start token and with the padding token in
    place of -100, as Hugging Face does. The two tokens are those of the settings, or of ``model.config``.
    """

    name: ClassVar[str] = "sequence_to_sequence"
    _setting_names = ("output", "decoder_start_token_id", "pad_token_id")

    def __init__(
        self,
        *,
        output: PositionOutput = "log_prob",
        decoder_start_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        """Store the settings.

        Args:
            output: Definition of f.
            decoder_start_token_id: First token of the decoder's input; ``None`` uses ``model.config``.
            pad_token_id: Token in the decoder's input for labels of -100; ``None`` uses ``model.config``.

        Raises:
            InvalidInputError: For an unknown definition of f, or a token that is not a whole number.
        """
        super().__init__(output=output)
        for name, token in (
            ("decoder_start_token_id", decoder_start_token_id),
            ("pad_token_id", pad_token_id),
        ):
            if token is not None and (isinstance(token, bool) or not isinstance(token, int) or token < 0):
                raise InvalidInputError(f"{name} must be a token id (0 or more) or None, got {token!r}.")
        self.decoder_start_token_id = decoder_start_token_id
        self.pad_token_id = pad_token_id

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
