"""Extraction of labels and named columns from batches and of logits from model outputs, with checks of all.

Shapes and dtypes are always checked. Checks of values read the tensor, which is impossible under ``torch.func``
transforms; there :func:`nan_unless` makes f and the gradient of an invalid sample NaN instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from trak_lite.core.devices import precise as widened
from trak_lite.errors import InvalidInputError
from trak_lite.types import Batch

LABEL_KEYS = ("labels", "label")


class Labelled(NamedTuple):
    """Labels and model inputs of a batch: call the model with ``*args, **kwargs``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor


def fields_of(batch: Batch) -> dict[str, Any] | None:
    """Return the named parts of a mapping or dataclass batch as a new dict; ``None`` for any other batch."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def split_labels(batch: Batch) -> Labelled:
    """Split a batch into model inputs and labels; raise without inputs, or without one tensor of labels.

    The batch is a tuple or list ``(*inputs, labels)``, or a mapping or dataclass with ``labels`` or ``label``, whose
    other entries become keyword arguments.
    """
    fields = fields_of(batch)
    if fields is not None:
        label_keys = [key for key in LABEL_KEYS if key in fields]
        if len(label_keys) != 1 or len(fields) < 2:
            raise InvalidInputError(
                f"The batch has the keys {list(fields)}. Expected inputs and exactly one of "
                f"{list(LABEL_KEYS)}; rename or drop keys in the dataset or in to_batch."
            )
        labels = fields.pop(label_keys[0])
        args: tuple[Any, ...] = ()
    elif isinstance(batch, tuple | list) and len(batch) >= 2:
        *inputs, labels = batch
        args, fields = tuple(inputs), {}
    else:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise InvalidInputError(
            f"The batch is a {type(batch).__name__}{size}. Expected (inputs..., labels) as a tuple or list, "
            f"or a dict or dataclass with one of {list(LABEL_KEYS)}."
        )
    return Labelled(args, fields, labels_tensor(labels, "one row per sample"))


def logits_and_labels(model_call: Callable[..., Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """Call the model with a batch without its labels; return the logits and the labels."""
    args, kwargs, labels = split_labels(batch)
    return tensor_of(model_call(*args, **kwargs), "logits"), labels


def tensor_of(answer: Any, *names: str) -> Tensor:
    """Return a tensor that a model gave, in float32 or wider.

    It is the answer, in a mapping or object the first of the ``names`` that holds one, or the first element of a tuple.
    A missing one, or one of a dtype that is not real floating point, raises InvalidInputError.
    """
    tensor = answer
    if not isinstance(answer, Tensor):
        mapped = isinstance(answer, Mapping)
        values = [answer.get(name) if mapped else getattr(answer, name, None) for name in names]
        tensor = next((value for value in values if isinstance(value, Tensor)), None)
        if isinstance(answer, tuple | list) and answer and all(value is None for value in values):
            tensor = answer[0]
    if not isinstance(tensor, Tensor):
        keys = f" with the keys {list(answer)}" if isinstance(answer, Mapping) else ""
        raise InvalidInputError(
            f"The model gave a {type(answer).__name__}{keys}. Expected a tensor, a tuple whose first element is one, "
            f"or an object or mapping with {' or '.join(f'`{name}`' for name in names)}."
        )
    return precise(tensor, what="The model's output")


def one_column(tensor: Tensor, prefix: str, *, hint: str) -> Tensor:
    """Return ``(B,)`` from ``(B,)`` or ``(B, 1)``; the message for other shapes is prefix, shape and hint."""
    if tensor.dim() == 1 or (tensor.dim() == 2 and tensor.shape[1] == 1):
        return tensor.reshape(-1)
    raise InvalidInputError(f"{prefix} {shape_texts(tensor.shape)[0]}. Expected (B,) or (B, 1){hint}")


def labels_tensor(labels: Any, shape: str, prefix: str = "The labels are") -> Tensor:
    """Return labels; raise if they are no tensor."""
    if not isinstance(labels, Tensor):
        name = type(labels).__name__
        shown = {"TupleColumn": "tuple", "ListColumn": "list", "ArrayColumn": "ndarray"}.get(name, name)
        raise InvalidInputError(f"{prefix} a {shown}. Expected a tensor, {shape}.")
    return labels


def distinct_names(pair: tuple[str, str] | None = None, **named: Any) -> tuple[str, ...]:
    """Return the one keyword value; raise if it is not a sequence of distinct names.

    With ``pair``, an example, it must have two names.
    """
    ((field, names),) = named.items()
    is_sequence = isinstance(names, Sequence) and not isinstance(names, str)
    is_named = is_sequence and all(isinstance(name, str) for name in names)
    if not is_named or len(set(names)) != len(names) or (pair and len(names) != 2):
        kind, example = ("2 distinct", f"{pair}, or None") if pair else ("distinct", "('input_ids',)")
        raise InvalidInputError(
            f"{field} is {names!r}. Expected a sequence of {kind} keyword names, such as {example}."
        )
    return tuple(names)


def precise(tensor: Tensor, *, what: str) -> Tensor:
    """Return a tensor in float32 or wider; raise if its dtype is not a real floating point one."""
    if not tensor.is_floating_point():
        raise InvalidInputError(f"{what} has dtype {tensor.dtype}. Expected a real floating point dtype.")
    # Margins are differences of close numbers and would lose most digits in half precision.
    return widened(tensor)


def class_labels(
    labels: Tensor,
    *,
    shape: Sequence[int],
    num_classes: int,
    ignored: Collection[int] = (),
    start: int = 0,
    what: str = "labels",
) -> Tensor:
    """Return class labels as int64 after checking shape, dtype and (when run eagerly) every value.

    ``ignored`` values mean "no label". Positions of the last axis before ``start`` are not used. ``what`` is the name
    of the labels in messages.
    """
    if num_classes < 2:
        raise InvalidInputError(
            f"The model gives {num_classes} logit(s) per label. A margin needs at least 2 classes; for one "
            "logit use the task 'binary_classification'."
        )
    if labels.shape != tuple(shape):
        actual, wanted = shape_texts(labels.shape, shape)
        column = labels.shape == (*shape, 1)
        hint = " Drop the last axis: labels.squeeze(-1), in the dataset or in to_batch." if column else ""
        if labels.dim() == 2 and labels.shape == (*shape, num_classes):
            hint = " For one label of 0 or 1 per class use the task 'multilabel_classification'."
        raise InvalidInputError(
            f"The {what} have shape {actual}. Expected {wanted} to fit the model's logits.{hint}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InvalidInputError(
            f"The {what} have dtype {labels.dtype}. Expected integer class indices (for example torch.int64)."
        )
    labels = labels.long()
    valid = labels == labels.clamp(0, num_classes - 1)
    for value in ignored:
        valid = valid | (labels == value)
    if start:
        valid = valid | (torch.arange(labels.shape[-1], device=labels.device) < start)
    besides = f", or {sorted(ignored)} for none" if ignored else ""
    refuse_invalid(
        valid,
        labels,
        expected=f"an integer from 0 to {num_classes - 1} (the model gives {num_classes} logits){besides}",
        what=what,
    )
    return labels


_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextmanager
def deferring_checks() -> Iterator[None]:
    """Leave values on an accelerator unchecked inside the block: an invalid sample gets a NaN f, as under transforms.

    A check waits for the device. The caller looks for a NaN f, and then evaluates the sample again outside the block.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def is_unread(tensor: Tensor) -> bool:
    """Return whether checks must not read values: they are transformed, or reading them would wait for a device."""
    return is_functorch_wrapped_tensor(tensor) or (_deferred.get() and tensor.device.type != "cpu")


def refuse_invalid(valid: Tensor, values: Tensor, *, expected: str, what: str = "labels") -> None:
    """Raise for the first invalid entry; do nothing under a transform, where values cannot be read, or if deferred.

    ``valid`` has the shape of ``values``, with samples on axis 0. The message names sample, index and value, their
    name ``what``, and what was ``expected`` of them.
    """
    if is_unread(valid) or bool(valid.all()):
        return
    index = (~valid).nonzero()[0].tolist()
    value = values[tuple(index)].item()
    raise InvalidInputError(f"sample {index[0]}: {what}{index} is {value!r}. Expected {expected}.")


def shape_texts(*shapes: Sequence[int]) -> list[str]:
    """Return shapes as text for a message, with B for axis 0 if it has size 1 in every shape.

    Gradient computers that run sample by sample (``torch.func``) give each sample a batch axis of size 1, so a
    message such as "(1, 1), expected (1,)" would not describe the user's batch.
    """
    sizes = [[str(size) for size in shape] for shape in shapes]
    if all(shape[0] == 1 for shape in shapes if len(shape)):
        sizes = [["B", *some[1:]] if some else some for some in sizes]
    return [f"({some[0]},)" if len(some) == 1 else f"({', '.join(some)})" for some in sizes]


def finite_factor(column: Tensor, values: Tensor, *, what: str) -> Tensor:
    """Return 1 where a column is finite and NaN elsewhere; the message shows ``values``, before they were cast."""
    valid = column.isfinite()
    refuse_invalid(valid, values, expected=f"a finite number of {column.dtype}", what=what)
    return nan_unless(valid, column)


def nan_unless(valid: Tensor, like: Tensor) -> Tensor:
    """Return 1 where valid and NaN elsewhere, as a factor in the dtype of ``like``.

    Multiplying (instead of selecting with ``where``) makes the gradient NaN too: a zero gradient would look like
    a sample without influence.
    """
    return torch.ones_like(like).masked_fill(~valid, torch.nan)


# Named columns, for tasks that need more than inputs and labels


def columns_of(batch: Batch, needed: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a mapping or dataclass as a new dict; raise if it is neither, or lacks a needed column."""
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


def prefixed(fields: dict[str, Any], prefix: str, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the columns with a prefix, without it, and the columns that have none of the prefixes."""
    shared = {name: value for name, value in fields.items() if not name.startswith(prefixes)}
    matching = {name.removeprefix(prefix): fields[name] for name in fields if name.startswith(prefix)}
    return shared | matching


def real_column(fields: dict[str, Any], name: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a column ``(B,)`` of finite numbers in the dtype of ``like``, and 1 where valid and NaN elsewhere.

    Another shape, or (when run eagerly) a number that is not finite, raises InvalidInputError.
    """
    values = _of_shape(fields, name, like.shape, "one real number per sample")
    column = values.to(like.dtype)
    return column, finite_factor(column, values, what=name)


def token_column(fields: dict[str, Any], name: str, predicted: Tensor, like: Tensor) -> Tensor:
    """Return a column ``(B, T)`` of numbers per token without its first position, in the dtype of ``like``.

    Positions that are not ``predicted``, ``(B, T - 1)``, become 0. Under a transform, a number that is not finite
    becomes NaN.

    Another shape, or (when run eagerly) a number that is not finite at a predicted position, raises InvalidInputError.
    """
    shape = (predicted.shape[0], predicted.shape[1] + 1)
    column = _of_shape(fields, name, shape, "one number per token, aligned with the labels")
    values = column[:, 1:]
    column = values.to(like.dtype).masked_fill(~predicted, 0.0)
    return column * finite_factor(column, values, what=name)


def _of_shape(fields: dict[str, Any], name: str, wanted: Sequence[int], what: str) -> Tensor:
    """Return a column; raise if it is not a tensor of real numbers of the shape."""
    column = fields[name]
    if isinstance(column, Tensor) and column.shape == wanted and not column.is_complex():
        return column
    actual, expected = type(column).__name__, shape_texts(wanted)[0]
    if isinstance(column, Tensor):
        shape, expected = shape_texts(column.shape, wanted)
        actual = f"{column.dtype} tensor of shape {shape}"
    raise InvalidInputError(f"The column {name!r} is a {actual}. Expected {expected}: {what}.")
