"""Model output function of models with one label per position. Shapes: B samples, ``*P`` positions, C classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

from torch import Tensor
from torch.nn import functional as F

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import ModelCall
from trak_lite.modelout_functions._inputs import class_labels, logits_of, shape_texts, split_labels
from trak_lite.modelout_functions._positions import IGNORED, PositionOutput, PositionwiseModelOutput
from trak_lite.types import Batch

__all__ = ["DenseClassificationModelOutput"]


@final
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
    _setting_names = ("output", "class_axis", "ignore_index", "upsample")

    def __init__(
        self,
        *,
        output: PositionOutput = "log_prob",
        class_axis: Literal[1, -1] = 1,
        ignore_index: int = IGNORED,
        upsample: bool = False,
    ) -> None:
        """Store the settings.

        Args:
            output: Definition of f.
            class_axis: Axis of the classes in the logits: 1 for ``(B, C, *P)``, -1 for ``(B, *P, C)``.
            ignore_index: Label of positions without a label.
            upsample: Resize logits ``(B, C, h, w)`` to the size of the labels by bilinear interpolation, as
                Hugging Face does for segmentation.

        Raises:
            InvalidInputError: If a setting is out of range.
        """
        super().__init__(output=output)
        if class_axis not in (1, -1):
            raise InvalidInputError(
                f"class_axis must be 1 (images) or -1 (tokens, queries), got {class_axis!r}."
            )
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise InvalidInputError(f"ignore_index must be an integer, got {ignore_index!r}.")
        if not isinstance(upsample, bool) or (upsample and class_axis != 1):
            raise InvalidInputError(
                f"upsample must be True or False, and True only with class_axis=1, got {upsample!r}."
            )
        self.class_axis, self.ignore_index, self.upsample = class_axis, ignore_index, upsample

    def _logits_and_labels(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor]:
        args, kwargs, labels = split_labels(batch)
        answer = model_call(*args, **kwargs)
        if isinstance(answer, Mapping) and "logits" not in answer:
            answer = answer.get("out", answer)
        logits = logits_of(answer)
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
