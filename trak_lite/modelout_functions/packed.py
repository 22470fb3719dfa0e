"""A check that a model keeps the documents of a packed row apart.

Shapes: T tokens of a packed row, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.data.batches import move_batch
from trak_lite.data.packed import BORDERS, Documents, token_columns
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import ModelCall, evaluating
from trak_lite.modelout_functions._inputs import columns_of, fields_of, tensor_of
from trak_lite.types import Batch

_ANYWHERE: Final = ("input_ids", *BORDERS[1:], "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Columns for models that take any keyword argument, such as those of Transformers and PEFT."""


def require_separate_documents(
    model: nn.Module, documents: Documents, device: torch.device | str | None = None
) -> None:
    """Raise if documents of a packed row see each other: then a document alone is not what the model was trained on.

    The model runs in eval mode, once on the first packed row with two documents, as in training
    (``training_collate`` of the documents), and on each of its documents alone. The logits of a token are compared
    without their mean over V. Their relative error, in the Euclidean norm, may be the square root of the rounding error
    of the parameters: 3.5e-4 in float32 and float64 (models of Transformers round some steps to float32 in any dtype),
    0.03 in float16 and 0.09 in bfloat16.

    Args:
        model: A model that takes keyword arguments and returns logits ``(1, T, V)``.
        documents: The documents. If no packed row has two, nothing is compared.
        device: Where the model is; ``None`` is the device of its first parameter.

    Raises:
        InvalidInputError: If the logits of a document differ; names the first such document, its packed row and token.
            Or if the model gives logits of another shape.
    """
    later = np.flatnonzero(documents.place > 0)
    if not len(later):
        return
    number = int(documents.row[later[0]])
    row, collate, call = documents.packed[number], documents.training_collate, ModelCall(model)
    where = next(model.parameters()).device if device is None else torch.device(device)
    dtypes = {torch.float32, *(p.dtype for p in model.parameters() if p.is_floating_point())}
    allowed = math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))
    members = np.flatnonzero(documents.row == number)
    batch = columns_of(collate([row]), ()) if collate else _training_inputs(model, documents, row, members)
    batch.pop("labels", None)
    with evaluating(model):
        packed = tensor_of(call(**move_batch(batch, where)), "logits")
        end = int(documents.stop[members].max())
        if packed.dim() != 3 or len(packed) != 1 or packed.shape[1] < end:
            raise InvalidInputError(
                f"The model gave logits of shape {tuple(packed.shape)} for packed row {number}. Expected (1, T, V) "
                f"with T at least {end}. Pass Documents(training_collate=...) for another batch, or check=False."
            )
        for index in members.tolist():
            start, stop, rank = (int(of[index]) for of in (documents.start, documents.stop, documents.place))
            inputs = _accepted(model, documents[index])
            columns = {name: torch.as_tensor(values, device="cpu")[None] for name, values in inputs.items()}
            alone = tensor_of(call(**move_batch(columns, where)), "logits")
            solo, beside = (
                logits - logits.mean(-1, keepdim=True) for logits in (alone[0], packed[0, start:stop])
            )
            errors = (beside - solo).norm(dim=-1) / solo.norm(dim=-1).clamp(min=torch.finfo(solo.dtype).tiny)
            token = int(errors.argmax())
            if errors[token] > allowed:
                raise InvalidInputError(
                    f"Document {rank} of packed row {number} has other logits in the packed row than alone (relative "
                    f"difference {errors[token]:.2g} at its token {token}, allowed {allowed:.2g}): it sees another "
                    "document of its row, or its positions do not begin anew. The model was then not trained on single "
                    f"documents. The packed row was passed as {list(batch)}; if training passed other inputs, "
                    "use Documents(training_collate=...). If training did mix documents, featurize the packed rows "
                    "as they are. Documents(check=False) attributes single documents all the same."
                )


def _training_inputs(
    model: nn.Module, documents: Documents, row: Mapping[str, Any], members: NDArray[np.int64]
) -> dict[str, Any]:
    """Return the keyword arguments of the model for a packed row; ``members`` are the documents in it."""
    columns = token_columns(row)
    tokens = np.arange(len(columns["input_ids"]))
    begins = np.isin(tokens, [*documents.start[members], *documents.stop[members]])
    columns.setdefault("position_ids", tokens - np.maximum.accumulate(np.where(begins, tokens, 0)))
    inputs = _accepted(model, {"position_ids": None, **row})
    for name, values in inputs.items():
        if name.startswith("cu_seq"):
            inputs[name] = torch.as_tensor(values, device="cpu").reshape(-1).int()
        elif name in columns:
            inputs[name] = torch.as_tensor(columns[name], device="cpu")[None]
    # With a mask or a cache, models of Transformers do not separate documents. TRL's collator, which reads seq_lengths,
    # makes no mask. The trainers of both train without a cache.
    if "seq_lengths" in row:
        inputs.pop("attention_mask", None)
    return {**inputs, "use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else inputs


def without_cache(model: nn.Module, batch: Batch) -> dict[str, Any] | None:
    """Return a batch of packed rows with ``use_cache=False`` if the model fills a cache for it, else ``None``.

    With a cache, models of Transformers do not keep apart texts whose positions begin anew.
    """
    fields = fields_of(batch) or {}
    positions = fields.get("position_ids")
    is_cached = getattr(getattr(model, "config", None), "use_cache", False) and "use_cache" not in fields
    if not (is_cached and isinstance(positions, Tensor) and positions.dim() == 2):
        return None
    begins = (positions[:, 1:-1] == 0) & (positions[:, 2:] == 1)  # unlike those of padding
    return {**fields, "use_cache": False} if bool(begins.any()) else None


def _accepted(model: nn.Module, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a model takes as keyword arguments."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names.update(_ANYWHERE)
    return {name: values for name, values in columns.items() if name in names and name != "labels"}
