"""Pairs of answers in one row: which of them are equal.

Shapes: B samples, T positions of an answer (which may differ between the two).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trak_lite.modelout_functions.language_modeling import IGNORED

SIDES = ("chosen_", "rejected_")
"""What the names of the columns of an answer begin with."""
_PADDING = {"labels": IGNORED, "attention_mask": 0}
"""Values of columns where a token is padding."""
_PLAIN = (str, int, float, bool, type(None))


def are_equal(fields: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return whether both answers of each row have the same columns, ``(B,)``: their difference has no gradient.

    The longer side may have more padding: tokens without a label and outside of the attention mask, if it has these.
    """
    equal = torch.ones_like(like, dtype=torch.bool)
    # Positions of each side; none if these are no tensors of tokens.
    sizes = [getattr(fields[f"{side}input_ids"], "shape", ())[1:2] for side in SIDES]
    shorter = min(sizes)
    for side, size in zip(SIDES, sizes, strict=True):
        if size == shorter:
            continue
        marks = {name: fields[side + name] for name in _PADDING if fields.get(side + name) is not None}
        if not marks or not shorter or any(getattr(mark, "shape", ())[1:] != size for mark in marks.values()):
            return torch.zeros_like(equal)
        for name, mark in marks.items():
            equal = equal & (mark[:, shorter[0] :] == _PADDING[name]).all(1)
    for name in {name.removeprefix(side) for side in SIDES for name in fields if name.startswith(side)}:
        one, other = (
            _cut(fields.get(side + name), size, shorter) for side, size in zip(SIDES, sizes, strict=True)
        )
        equal = equal & _same(one, other, equal)
    return equal


def _cut(value: Any, size: tuple[int, ...], shorter: tuple[int, ...]) -> Any:
    """Return a column of tokens without the positions that the other answer lacks; another value as it is."""
    is_longer = isinstance(value, Tensor) and size != shorter and value.shape[1:2] == size
    return value[:, : shorter[0]] if is_longer else value


def _same(one: Any, other: Any, like: Tensor) -> Tensor:
    """Return whether two columns are known to be equal in each row, ``(B,)``."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return torch.zeros_like(like)
        same = one == other
        # A tensor without axes is a setting that all rows share.
        return same.reshape(len(like), -1).all(1) if same.dim() else same
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) == len(like):
        pairs = zip(one, other, strict=True)
        return torch.tensor([type(a) in _PLAIN and a == b for a, b in pairs], device=like.device)
    return torch.full_like(like, type(one) in _PLAIN and type(one) is type(other) and one == other)
