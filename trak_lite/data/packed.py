"""Packed sequences: datasets whose rows hold several documents, as datasets of documents.

Shapes: N documents, T tokens of a packed row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from trak_lite.core.validate import one_of
from trak_lite.data.datasets import _refuse_unindexed
from trak_lite.data.loading import Collate
from trak_lite.errors import InvalidInputError

logger = logging.getLogger(__name__)

BORDERS: Final = ("seq_lengths", "cu_seqlens", "cu_seq_lens_q", "seq_idx", "position_ids")
"""Columns that say where documents begin. The first that a row has is used by default."""
_IGNORED: Final = -100
"""Label of a token that is not predicted."""
_OF_ROWS: Final = (*BORDERS[:-1], "cu_seq_lens_k", "attention_mask")
"""Columns that hold for packed rows only."""
_PER_TOKEN: Final = ("seq_idx", "position_ids")
"""Columns of borders with an entry per token."""


@final
class Documents(Dataset[dict[str, Any]]):
    """The documents of a packed dataset, each a row of its own.

    A packed row is a mapping with ``input_ids`` ``(T,)`` or ``(1, T)``, as lists, arrays or tensors, and a column of
    borders: ``seq_lengths`` (as TRL's ``packing=True`` makes it), ``cu_seqlens`` or ``cu_seq_lens_q`` (begins with 0),
    ``seq_idx`` (changes at borders; below 0 is padding) or ``position_ids`` (a document begins where a position is not
    the one before plus 1). Tokens with ``attention_mask`` 0 are padding, and tokens after the last border, which must
    have the label -100 or this mask.

    A document holds its part of every column with T entries (``input_ids``, ``labels``, ...), in the type of the
    packed row. ``position_ids`` are kept only if a document has others than 0, 1, 2, ..., as the second half of a text
    that was cut over two packed rows may have; such a part is a document of its own. All other columns stay in
    ``packed[documents.row[i]]``.

    A document without a token to predict has no gradient and is left out: an empty one, one of a single token, or one
    whose labels are all -100. The first token of a document is never predicted. A loss that predicts it from the last
    token of the document before has a term per border that no document contains; the collators of TRL and Transformers
    set these labels to -100.

    :meth:`~trak_lite.Attributor.featurize` checks once, before the first row, that the model keeps documents apart
    (:func:`~trak_lite.modelout_functions.require_separate_documents`).

    Example:
        >>> packed = [{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}, {"input_ids": [4, 3], "seq_lengths": [2]}]
        >>> documents = Documents(packed)
        >>> len(documents), documents[1], documents.row, documents.place
        (3, {'input_ids': [8, 9]}, array([0, 0, 1]), array([0, 1, 0]))
    """

    row: NDArray[np.int64]
    """``(N,)`` index of the packed row of each document."""
    place: NDArray[np.int64]
    """``(N,)`` index of each document in its packed row, in which left out documents count."""
    start: NDArray[np.int64]
    """``(N,)`` first token of each document in its packed row."""
    stop: NDArray[np.int64]
    """``(N,)`` end of each document in its packed row."""

    def __init__(
        self,
        packed: Any,
        *,
        borders: str | None = None,
        shift: bool = True,
        training_collate: Collate | None = None,
        check: bool = True,
    ) -> None:
        """Find the documents of all packed rows, in one pass over the data.

        Args:
            packed: A map-style dataset of packed rows, for example ``trainer.train_dataset`` of TRL, or a list of the
                batches ``(1, T)`` of a padding-free collator. It is kept, and must not change.
            borders: The column of borders, one of :data:`BORDERS`; ``None`` is the first of these that a row has.
            shift: Whether a position predicts the next label, as in causal language modeling. Otherwise the label of
                the first token counts.
            training_collate: Turns a list of one packed row into the batch of training, a mapping, for the check that
                the model keeps documents apart. ``None`` uses ``input_ids``, ``position_ids`` that restart at every
                document, and the other columns of the row that the model's ``forward`` names, with
                ``use_cache=False`` as in the trainers of TRL and Transformers.
            check: Whether ``featurize`` makes this check.

        Raises:
            InvalidInputError: If the data are no map-style dataset of packed rows, or borders contradict the tokens;
                names the packed row.
            UnknownNameError: If ``borders`` is not one of :data:`BORDERS`.
        """
        if isinstance(packed, DataLoader):
            raise InvalidInputError(
                "The packed dataset is a DataLoader. Pass its dataset, if that holds packed rows. If the loader's "
                "collate function joins rows, these are documents already: featurize the dataset with "
                "collate=pad_documents."
            )
        _refuse_unindexed(packed, "the packed dataset")
        if borders is not None:
            one_of(BORDERS, borders=borders)
        self.packed, self.shift = packed, shift
        self.training_collate, self.check = training_collate, check
        spans, self._left_out, self._has_positions = [np.empty((0, 4), np.int64)], 0, False
        reading = packed
        if hasattr(packed, "select_columns"):  # a datasets.Dataset need not decode the others
            names = ("input_ids", "labels", "attention_mask", *BORDERS)
            reading = packed.select_columns([name for name in names if name in packed.column_names])
        for number in range(len(reading)):
            spans.append(self._spans(reading[number], number, borders))
        self.row, self.place, self.start, self.stop = np.concatenate(spans).T.copy()
        if self._left_out:
            logger.info("Left out %d documents without a token to predict.", self._left_out)

    def __len__(self) -> int:
        """Return N, the number of documents with a token to predict."""
        return len(self.row)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a document; its packed row is loaded."""
        return self._cut(self.packed[int(self.row[index])], index)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several documents; each of their packed rows is loaded once."""
        rows = {row: self.packed[row] for row in dict.fromkeys(self.row[list(indices)].tolist())}
        return [self._cut(rows[int(self.row[index])], index) for index in indices]

    def _cut(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        dropped = _OF_ROWS if self._has_positions else (*_OF_ROWS, "position_ids")
        part = slice(int(self.start[index]), int(self.stop[index]))
        columns = token_columns(row)
        return {name: values[part] for name, values in columns.items() if name not in dropped}

    def _spans(self, row: Any, number: int, borders: str | None) -> NDArray[np.int64]:
        """Return row, place, start and stop of the documents of a packed row that are kept, ``(n, 4)``."""
        where = f"Packed row {number}"
        names = list(row) if isinstance(row, Mapping) else []
        name = borders or next((name for name in BORDERS if name in names), None)
        if "input_ids" not in names or name is None or name not in names:
            raise InvalidInputError(
                f"{where} is a {type(row).__name__} with the columns {names}. Expected input_ids and {name or BORDERS} "
                "with the borders of its documents. Rows without borders, such as those of TRL's "
                "packing_strategy='wrapped', are texts of their own: featurize them as they are."
            )
        columns = token_columns(row)
        length = len(columns["input_ids"])
        for column in ("input_ids", "labels", "attention_mask"):
            if column in names and np.ndim(columns.get(column, 0)) != 1:
                raise InvalidInputError(
                    f"{where}: {column} has shape {tuple(np.shape(row[column]))}, and input_ids "
                    f"{tuple(np.shape(row['input_ids']))}. Expected one number per token, (T,) or (1, T)."
                )
        numbers = _document_numbers(name, _array(row[name]).reshape(-1), length, where)
        labels = _array(columns.get("labels", columns["input_ids"]))
        masked = (
            _array(columns["attention_mask"]) == 0
            if "attention_mask" in columns
            else np.zeros(length, np.bool_)
        )
        if name not in _PER_TOKEN:
            rest = np.flatnonzero((numbers < 0) & ~masked & (labels != _IGNORED))
            if len(rest):  # they were trained on, and no document holds them
                raise InvalidInputError(
                    f"{where}: {name} ends at token {int((numbers >= 0).sum())} of {length}, and {len(rest)} tokens "
                    f"after it have labels (the first is token {rest[0]}). Give the borders of all documents, or mark "
                    "padding: labels -100, or attention_mask 0."
                )
        numbers[masked] = -1
        if name in _PER_TOKEN:  # padding has no place
            numbers[numbers >= 0] = np.unique(numbers[numbers >= 0], return_inverse=True)[1]
        edges = np.flatnonzero(np.diff(numbers, prepend=-2, append=-2))
        start, stop = edges[:-1], edges[1:]
        of_documents = numbers[start] >= 0
        start, stop = start[of_documents], stop[of_documents]
        index = numbers[start]
        if len(np.unique(index)) < len(index):
            raise InvalidInputError(
                f"{where} has tokens with attention_mask 0 or seq_idx below 0 inside a document. Expected padding "
                "before or after documents only."
            )
        spans = np.stack([np.full_like(index, number), index, start, stop], 1)
        kept = spans[[bool((labels[a + self.shift : b] != _IGNORED).any()) for *_, a, b in spans]]
        self._left_out += len(spans) - len(kept)
        if "position_ids" in columns:
            positions = _array(columns["position_ids"])
            self._has_positions |= any((np.diff(positions[a:b], prepend=-1) != 1).any() for *_, a, b in kept)
        return kept


def token_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a packed row with an entry per token; those of a row ``(1, T)`` without the first axis."""
    joined = _is_joined(row["input_ids"])
    length = len(row["input_ids"][0] if joined else row["input_ids"])
    columns = {}
    for name, values in row.items():
        if isinstance(values, list | tuple) or np.ndim(values):
            entries = values[0] if joined and _is_joined(values) else values
            if len(entries) == length:
                columns[name] = entries
    return columns


def _is_joined(values: Any) -> bool:
    """Return whether values have a first axis of size 1 before the axis of tokens."""
    return len(values) == 1 and (isinstance(values[0], list | tuple) or np.ndim(values[0]) > 0)


def pad_documents(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return a batch of documents of several lengths, padded on the right: a collate function.

    Args:
        samples: Mappings with ``input_ids`` ``(T,)`` and other columns of numbers per token.

    Returns:
        The columns, ``(B, T)``; ``labels``, which without a column of this name are ``input_ids``; and
        ``attention_mask``. Padding has label -100, and 0 in every other column.

    Raises:
        InvalidInputError: If samples have no ``input_ids``.
    """
    if "input_ids" not in list(samples[0]):
        kind = (
            f"the columns {list(samples[0])}"
            if isinstance(samples[0], Mapping)
            else type(samples[0]).__name__
        )
        raise InvalidInputError(
            f"pad_documents pads samples with the column input_ids, and got {kind}. Of other samples, such as pairs "
            "of answers, pass Rows(pairs, collate=...) with a collate function of their own."
        )
    columns = {name: [_tensor(sample[name]) for sample in samples] for name in samples[0]}
    columns.setdefault("labels", columns["input_ids"])
    columns["attention_mask"] = [torch.ones_like(tokens) for tokens in columns["input_ids"]]
    return {
        name: pad_sequence(values, batch_first=True, padding_value=_IGNORED if name == "labels" else 0)
        for name, values in columns.items()
    }


def _array(values: Any) -> NDArray[Any]:
    return values.numpy(force=True) if isinstance(values, Tensor) else np.asarray(values)


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def _document_numbers(name: str, borders: NDArray[Any], length: int, where: str) -> NDArray[np.int64]:
    """Return the number of each token's document in a packed row, -1 for padding, ``(T,)``."""
    numbers, text = np.full(length, -1, np.int64), f"{borders.tolist()!s:.80}"
    has_integers = borders.dtype.kind in "iu" or not borders.size
    borders = borders.astype(np.int64) if has_integers else borders[:0]
    if name in _PER_TOKEN:
        expected = f"{length} integers, one per token"
        is_valid = len(borders) == length
        if is_valid:
            step = int(name == "position_ids")
            numbers = (np.diff(borders, prepend=borders[:1] - step) != step).cumsum()
            numbers[borders < 0] = -1
    else:
        lengths = borders if name == "seq_lengths" else np.diff(borders)
        expected = f"lengths of documents with a sum of at most {length}, the number of tokens"
        is_valid = has_integers and bool((lengths >= 0).all() and lengths.sum() <= length)
        if name != "seq_lengths":
            expected = (
                f"integers that begin with 0, do not fall and end at most at {length}, the number of tokens"
            )
            is_valid &= borders[:1].tolist() == [0]
        if is_valid:
            numbers[: lengths.sum()] = np.repeat(np.arange(len(lengths)), lengths)
    if not is_valid:
        raise InvalidInputError(f"{where}: {name} is {text}. Expected {expected}.")
    return numbers
