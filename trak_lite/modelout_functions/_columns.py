"""Named columns of a batch, for tasks that need more than inputs and labels. Shapes: B samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._inputs import fields_of, nan_unless, refuse_invalid, shape_texts
from trak_lite.types import Batch

__all__ = ["columns_of", "prefixed", "real_column", "token_column"]


def columns_of(batch: Batch, needed: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a mapping or dataclass as a new dict.

    Raises:
        InvalidInputError: If the batch is something else, or a needed column is missing.
    """
    fields = fields_of(batch)
    if fields is None:
        raise InvalidInputError(
            f"The batch is a {type(batch).__name__}. Expected a dict or dataclass with the columns {list(needed)}."
        )
    missing = [name for name in needed if name not in fields]
    if missing:
        raise InvalidInputError(
            f"The batch has the columns {list(fields)}. Missing: {missing}. Add them to the dataset, or rename columns "
            "in collate."
        )
    return fields


def prefixed(fields: dict[str, Any], prefix: str, others: Iterable[str]) -> dict[str, Any]:
    """Return the columns with a prefix, without it, and the columns that have none of the other prefixes."""
    refused = (prefix, *others)
    shared = {name: value for name, value in fields.items() if not name.startswith(refused)}
    return shared | {
        name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)
    }


def real_column(fields: dict[str, Any], name: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a column ``(B,)`` of finite numbers in the dtype of ``like``, and 1 where valid and NaN elsewhere.

    Raises:
        InvalidInputError: If it is not a tensor of this shape, or (when run eagerly) a number is not finite.
    """
    column = _of_shape(fields, name, like.shape, "one real number per sample").to(like.dtype)
    valid = column.isfinite()
    refuse_invalid(valid, column, expected="a finite number", what=name)
    return column, nan_unless(valid, column)


def token_column(fields: dict[str, Any], name: str, predicted: Tensor, like: Tensor) -> Tensor:
    """Return a column ``(B, T)`` of numbers per token without its first position, in the dtype of ``like``.

    Positions that are not predicted become 0. Under a transform, a number that is not finite becomes NaN.

    Args:
        fields: The columns of a batch.
        name: Name of the column.
        predicted: ``(B, T - 1)``, whether the next token is predicted.
        like: ``(B, T - 1)``.

    Raises:
        InvalidInputError: If it is not a tensor of this shape, or (when run eagerly) a number at a predicted position
            is not finite.
    """
    shape = (predicted.shape[0], predicted.shape[1] + 1)
    column = _of_shape(fields, name, shape, "one number per token, aligned with the labels")
    column = column[:, 1:].to(like.dtype).masked_fill(~predicted, 0.0)
    valid = column.isfinite()
    refuse_invalid(valid, column, expected="a finite number", what=name)
    return column * nan_unless(valid, column)


def _of_shape(fields: dict[str, Any], name: str, wanted: Sequence[int], what: str) -> Tensor:
    """Return a column; raise if it is not a tensor of real numbers of the shape."""
    column = fields[name]
    if isinstance(column, Tensor) and column.shape == wanted and not column.is_complex():
        return column
    seen, expected = type(column).__name__, shape_texts(wanted)[0]
    if isinstance(column, Tensor):
        shape, expected = shape_texts(column.shape, wanted)
        seen = f"{column.dtype} tensor of shape {shape}"
    raise InvalidInputError(f"The column {name!r} is a {seen}. Expected {expected}: {what}.")
