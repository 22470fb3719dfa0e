"""Columns of the train data: a value per row, such as its source, date, licence or weight.

Shapes: N rows, G labels.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.validate import known_names
from trak_lite.errors import InvalidInputError, UnknownNameError

_MOST_SHOWN: Final = 10
"""Labels of a column in a message."""

Where: TypeAlias = ArrayLike | Mapping[str, Any]
"""A mask ``(N,)`` of booleans, or a value (or several) per column name."""
MOST_TEXT_BYTES: Final = 1 << 28
"""Limit on an array of texts."""
_NUMBERS: Final = "biuf"
"""Kinds of dtypes of numbers."""
_INEXACT: Final = 2**53
"""Integers below it in size are exact in float64."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A label for each row, or each target."""

    labels: NDArray[Any]
    """``(G,)`` distinct labels, sorted."""
    places: NDArray[np.int64]
    """``(N,)`` index of each row's label among them."""

    @classmethod
    def of(cls, values: ArrayLike, count: int, what: str) -> Self:
        """Number the labels of ``count`` rows.

        A missing value (None, pandas' NA, or NaN among texts) is the label ``"None"`` of texts and booleans, and NaN of
        numbers. Integers that would change in float64, the type of numbers of several types, are refused.
        """
        labels = _array_of(values, what)
        if labels.shape != (count,):
            raise InvalidInputError(f"{what} must hold {count} labels, got an array of shape {labels.shape}.")
        labels = _with_missing_labels(labels, what)
        try:
            distinct, inverse = np.unique(labels, return_inverse=True)
        except TypeError as error:
            raise InvalidInputError(
                f"The labels in {what} are of several types, which cannot be sorted ({error}). Use one type, such as "
                "strings."
            ) from error
        return cls(short_texts(distinct), inverse.astype(np.int64))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """``(G,)`` number of rows of each label."""
        return np.bincount(self.places, minlength=len(self.labels)).astype(np.int64)

    @property
    def values(self) -> NDArray[Any]:
        """``(N,)`` label of each row."""
        return self.labels[self.places]

    @property
    def texts(self) -> list[str]:
        """The distinct labels as text."""
        return [label_text(label) for label in self.labels]

    def text_of(self, row: int) -> str:
        """Return the label of a row as text."""
        return label_text(self.labels[self.places[row]])

    def take(self, rows: NDArray[np.int64]) -> Column:
        """Return the column of some rows, with all labels."""
        return Column(self.labels, self.places[rows])

    def matches(self, *values: Any) -> NDArray[np.bool_]:
        """Return whether each row has one of some values, ``(N,)``: its label, or the text of its label.

        A text matches a number that it shows (``"1"`` and 1.0), and a date its text in ISO 8601.
        """
        mask, kind = np.zeros(len(self.labels), np.bool_), self.labels.dtype.kind
        if kind not in "iuf":  # texts of numbers are compared as numbers, as there may be millions
            wanted = {label_text(value) for value in values}
            mask |= np.array([text in wanted for text in self.texts], np.bool_)
        for value in values if kind in _NUMBERS else ():
            number = _number(value, float if kind == "f" else int)
            if number is not None:
                mask |= np.isnan(self.labels) if number != number else _equal(self.labels, number)
        return mask[self.places]


def label_text(label: Any) -> str:
    """Return a label as text: a time without time zone in ISO 8601, at midnight as its date.

    Example:
        >>> label_text(np.datetime64("2024-05-01T00:00:00")), label_text(2024)
        ('2024-05-01', '2024')
    """
    if isinstance(label, datetime) and label.tzinfo is None and label == label:  # not pandas' NaT
        label = np.datetime64(label)
    if isinstance(label, np.datetime64) and np.datetime_data(label.dtype)[0] not in ("Y", "M"):
        return str(np.datetime_as_string(label, unit="auto"))
    return str(None if label is _not_available() else label)


def _not_available() -> Any:
    """Return what pandas has for a missing value, ``None`` if it is not imported."""
    return getattr(sys.modules.get("pandas"), "NA", None)


def columns_of(data: Any, num_rows: int, what: str) -> dict[str, Column]:
    """Return all columns of a ``datasets.Dataset``, a pandas frame or a mapping of arrays."""
    names = _names(data)
    if names is None:
        raise InvalidInputError(
            f"{what} must be a mapping of names to one value per row, a pandas frame or a datasets.Dataset, got "
            f"{type(data).__name__}."
        )
    return {str(name): Column.of(data[name], num_rows, f"the column {str(name)!r}") for name in names}


def column_of(data: Any, name: str) -> ArrayLike:
    """Return a column of a ``datasets.Dataset``, a pandas frame or a mapping of arrays."""
    names = _names(data)
    if names is None:
        raise InvalidInputError(
            f"groups={name!r} names a column, and {type(data).__name__} has no named columns. Give data= as a "
            "datasets.Dataset, a pandas frame or a mapping of arrays, or the labels themselves as groups."
        )
    known_names([name], [str(one) for one in names], what="columns")
    values: ArrayLike = data[name]
    return values


def wanted_rows(where: Where, columns: Mapping[str, Column], num_rows: int) -> NDArray[np.bool_]:
    """Return whether each row is wanted, ``(N,)``, by a mask or by the values of known columns.

    A row is wanted if in each named column it has the value, or one of several values in a list, tuple, set or array.

    Example:
        >>> source = Column.of(["web", "book", "web"], 3, "the column 'source'")
        >>> wanted_rows({"source": "web"}, {"source": source}, 3)
        array([ True, False,  True])
    """
    if isinstance(where, Mapping):
        require_columns(where, columns)
        mask = np.ones(num_rows, np.bool_)
        for name, value in where.items():
            mask &= columns[name].matches(*_several(value))
    else:
        mask = np.asarray(where)
        if mask.dtype != np.bool_ or mask.shape != (num_rows,):
            raise InvalidInputError(
                f"where must be a mask of {num_rows} booleans or a mapping of column names to values, got "
                f"{mask.dtype} of shape {mask.shape}."
            )
    if not mask.any():
        if not isinstance(where, Mapping):
            raise InvalidInputError("No train row is wanted: where is a mask without True.")
        examples = {name: columns[name].texts[:_MOST_SHOWN] for name in where}
        raise InvalidInputError(
            f"No train row satisfies where={dict(where)!r:.200}. Values of these columns include {examples!r:.400}."
        )
    return mask


def weights_of(weights: ArrayLike | str, columns: Mapping[str, Column], num_rows: int) -> NDArray[np.float64]:
    """Return a weight per row, ``(N,)``: the given ones, or those in the column of a name."""
    if isinstance(weights, str):
        require_columns([weights], columns)
    array = columns[weights].values if isinstance(weights, str) else np.asarray(weights)
    if array.shape != (num_rows,) or array.dtype.kind not in _NUMBERS or not np.isfinite(array).all():
        raise InvalidInputError(
            f"weights must be {num_rows} finite numbers, one per train row, got {array.dtype} of shape {array.shape}."
        )
    return array.astype(np.float64)


def labels_of(labels: ArrayLike | str, columns: Mapping[str, Column], num_rows: int, what: str) -> Column:
    """Return a label per train row: the given ones, called ``what`` in messages, or the column of a name."""
    if isinstance(labels, str):
        require_columns([labels], columns)
        return columns[labels]
    return Column.of(labels, num_rows, what)


def require_columns(names: Iterable[str], columns: Mapping[str, Column]) -> None:
    """Raise if a name is not that of a column."""
    wanted = list(names)
    if wanted and not columns:
        raise UnknownNameError(
            f"There is no column {wanted[0]!r}, because no columns of these train rows are stored. Store them with "
            "featurize(data, columns=...), or pass a mask, labels or weights with one value per train row."
        )
    known_names(wanted, list(columns), what="columns")


def _names(data: Any) -> Iterable[Any] | None:
    """Return the names of the columns of some data, ``None`` if they have none."""
    keys = data.keys() if isinstance(data, Mapping) else None
    attributes = (getattr(data, kind, None) for kind in ("column_names", "columns"))
    return next((names for names in attributes if names is not None), keys)


def _array_of(values: ArrayLike, what: str) -> NDArray[Any]:
    """Return values as an array. Texts and bytes of a list stay objects.

    In an array of texts each has the size of the longest, and NULs at its end are lost.
    """
    entries: Any = values
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        entries = list(values)
    has_texts = isinstance(entries, list) and any(isinstance(value, str | bytes) for value in entries)
    try:
        array = np.asarray(entries, object if has_texts else None)
    except ValueError as error:
        raise InvalidInputError(
            f"{what} must hold one label for each row, got lists ({error}). Leave it out, such as with "
            "dataset.select_columns(names)."
        ) from error
    are_floats = "float" in str(getattr(entries, "dtype", "")).lower()  # not a list, nor integers with a mask
    if array.dtype.kind == "f" and array.ndim == 1 and not are_floats and (np.abs(array) >= _INEXACT).any():
        _require_kept_integers(entries, what)
    return array


def _require_kept_integers(values: Iterable[Any], what: str) -> None:
    """Raise if an integer among some values would become another number, maybe that of another label, in float64."""
    for value in values.to_pylist() if hasattr(values, "to_pylist") else values:  # of an array of pyarrow's
        if isinstance(value, int | np.integer) and _number(value, float) is None:
            raise InvalidInputError(
                f"{what} cannot hold the integer {value}: beside a missing value, a fraction or an integer of another "
                "type, labels become float64, where it is another number. Give the labels as texts, such as "
                "list(map(str, labels))."
            )


def _with_missing_labels(labels: NDArray[Any], what: str) -> NDArray[Any]:
    """Return labels in which missing values have a label of the type of the others, so that they can be sorted."""
    if labels.dtype != object:
        return labels
    na = _not_available()
    scalars = (v.item() if isinstance(v, np.generic) and v.dtype.kind in "biufU" else v for v in labels)
    plain = np.fromiter(scalars, object, len(labels))
    missing = np.array([v is None or v is na or (isinstance(v, float) and v != v) for v in plain])
    kinds = {type(value) for value in plain[~missing]}
    if not missing.any():
        return labels
    if kinds <= {str} or kinds == {bool}:
        plain[~missing], plain[missing] = [str(value) for value in plain[~missing]], str(None)
        return plain
    if not kinds <= {int, float}:
        return labels
    _require_kept_integers([v for v in plain if type(v) is int and abs(v) >= _INEXACT], what)
    return np.where(missing, np.nan, plain).astype(np.float64)


def short_texts(labels: NDArray[Any]) -> NDArray[Any]:
    """Return objects that are texts as an array of texts, unless it would be large; other labels as they are.

    Texts that end with NUL stay objects: NumPy drops it from an array of texts, where two labels would become one.
    """
    if labels.dtype != object or any(not isinstance(label, str) or label[-1:] == "\0" for label in labels):
        return labels
    return labels.astype(np.str_) if size_of_texts(labels) <= MOST_TEXT_BYTES else labels


def size_of_texts(texts: Collection[str]) -> int:
    """Return the size of an array of texts, in bytes: each takes as much as the longest one."""
    return 4 * len(texts) * max(map(len, texts), default=0)


def _equal(labels: NDArray[Any], number: float) -> NDArray[np.bool_] | bool:
    """Return which labels are a number. A fraction is rounded to the dtype of the labels; an integer must be in it."""
    with np.errstate(over="ignore"):
        is_other = labels.dtype.kind == "f" and number % 1 == 0 and float(labels.dtype.type(number)) != number
    return False if is_other else labels == number


def _several(value: Any) -> Iterable[Any]:
    """Return the values of a filter: those of a list or an array, or the one value."""
    if isinstance(value, list | tuple | set | frozenset | range):
        return value
    return list(np.asarray(value)) if getattr(value, "ndim", 0) else [value]


def _number(value: Any, kind: type[int] | type[float]) -> int | float | None:
    """Return the number that a value is, or that a text shows; ``None`` if it is none of this kind."""
    try:
        is_time = isinstance(
            value, np.datetime64 | np.timedelta64
        )  # whose item may be a number of nanoseconds
        plain = value.item() if hasattr(value, "item") and not is_time else value
        number = kind(plain)
        return number if isinstance(plain, str) or number == plain or number != number else None
    except (TypeError, ValueError, OverflowError):
        return None
