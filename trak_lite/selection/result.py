"""The result of a selection: chosen train rows, with the reasons."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.json_text import parse_json
from trak_lite.core.notebook import notebook_table
from trak_lite.core.sealed import BLANK, SEAL, seal, sealed_content
from trak_lite.core.validate import require_packages
from trak_lite.data.columns import label_text, short_texts
from trak_lite.errors import CorruptStoreError, InvalidInputError, StoreError, printable
from trak_lite.scoring.frames import DataFrame, frame

_SHOWN: Final = 5
_JSON_ROWS: Final = 250_000
_VERSION: Final = 2
_SEALED_AS: Final = "selection"
_FIELDS: Final = {
    "row": "indices",
    "score": "scores",
    "best_target": "best_targets",
    "best_score": "best_scores",
    "group": "groups",
    "redundancy": "redundancy",
}
"""Fields of a selection by the names of their columns."""
_TYPES: Final = {"row": "i", "score": "f", "best_score": "f", "redundancy": "f"}
"""Kinds of the columns that are not labels."""
_NUMBERS: Final[dict[str, Any]] = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64}
"""Dtypes that are read by kind; labels of another kind are texts in a file."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Chosen train rows, best first, and why each was chosen. :func:`~trak_lite.selection.select` makes it.

    Example:
        >>> import numpy as np
        >>> from trak_lite.selection import select
        >>> chosen = select(np.array([[0.1, 0.4], [0.9, 0.0], [-0.5, 0.2]]), k=2)
        >>> chosen.indices
        array([1, 0])
        >>> chosen.mask
        array([ True,  True, False])
    """

    indices: NDArray[np.int64]
    """``(k,)`` numbers of train rows, best first (greedy: in the order of choice)."""
    scores: NDArray[np.float64]
    """``(k,)`` the value of each row for all targets, in units of the scores."""
    best_targets: NDArray[Any]
    """``(k,)`` label of the group of targets that the row helps most (harms most), or the number of the target."""
    best_scores: NDArray[np.float64]
    """``(k,)`` mean score of the row for that group."""
    num_rows: int
    """N, the number of train rows."""
    groups: NDArray[Any] | None = None
    """``(k,)`` label of each row, of a balanced selection."""
    redundancy: NDArray[np.float64] | None = None
    """``(k,)`` share of the row's features, from 0 to 1, that earlier rows of a greedy selection explain."""
    settings: dict[str, Any] = field(default_factory=dict)
    """How the rows were chosen, as JSON values."""

    @property
    def mask(self) -> NDArray[np.bool_]:
        """``(N,)`` whether each train row was chosen."""
        mask = np.zeros(self.num_rows, np.bool_)
        mask[self.indices] = True
        return mask

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        lines = [f"Selection({len(self)} of {self.num_rows} train rows)", f"made with {settings}"]
        for row in self._first():
            named = zip(self._columns(), row, strict=True)
            lines.append(", ".join(f"{name} {_text(value)}" for name, value in named))
        more = [f"... {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        return printable("\n  ".join([*lines, *more]))

    def _repr_html_(self) -> str:
        return notebook_table(
            f"Selection: {len(self):,} of {self.num_rows:,} train rows",
            list(self._columns()),
            [[_text(value) for value in row] for row in self._first()],
            notes=[f"{len(self) - _SHOWN:,} more rows: selection.to_pandas()."] if len(self) > _SHOWN else [],
            settings=self.settings,
        )

    def to_pandas(self) -> DataFrame:
        """Return a DataFrame with one line per chosen row, best first (needs pandas).

        Columns: ``row``, ``score``, ``best_target``, ``best_score``; ``group`` if the selection is balanced,
        ``redundancy`` if it is greedy. The index is the rank.

        Raises:
            MissingPackageError: If pandas is not installed.
        """
        return frame(self._columns(), index="rank")

    def to_parquet(self, path: str | PathLike[str]) -> Path:
        """Write the columns of :meth:`to_pandas` to a Parquet file and return its path.

        Raises:
            InvalidInputError: If the path is a folder.
            MissingPackageError: If pandas or pyarrow (extra ``tables``) is not installed.
        """
        require_packages("pandas", "pyarrow", extra="tables")
        out = Path(path)
        if out.is_dir():
            raise InvalidInputError(
                f"{out} is a folder. Name a file in it, such as {out / 'selection.parquet'}."
            )
        self.to_pandas().to_parquet(out, engine="pyarrow")
        return out

    def add_to(self, dataset: Any, *, column: str = "selected") -> Any:
        """Return a ``datasets.Dataset`` with a column of booleans, whether each row was chosen.

        ``dataset.select(selection.indices)`` returns the chosen rows alone.

        Args:
            dataset: The N train rows, in the order in which they were featurized.
            column: Name of the new column.

        Raises:
            InvalidInputError: If the dataset has another number of rows, has the column, or is no ``datasets.Dataset``.
        """
        add = getattr(dataset, "add_column", None)
        if add is None:
            raise InvalidInputError(
                f"add_to needs a datasets.Dataset, got {type(dataset).__name__}. For other data use selection.mask."
            )
        if len(dataset) != self.num_rows:
            raise InvalidInputError(
                f"The selection is of {self.num_rows} train rows, and the dataset has {len(dataset)}. Give the "
                "dataset that was featurized."
            )
        if column in dataset.column_names:
            raise InvalidInputError(f"The dataset has a column {column!r}. Name another one: column=...")
        return add(column, self.mask)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the selection to a JSON file and return its path.

        Labels are read again as the booleans, integers (64 bits), floats (64 bits) or texts that they are; others, such
        as dates, as their texts, which ``where`` and ``quotas`` take for them.

        Raises:
            InvalidInputError: If more than 250,000 rows were chosen, or labels are very long: use :meth:`to_parquet`.
            StoreError: If the file cannot be written. One from before is as it was.
        """
        if len(self) > _JSON_ROWS:
            raise InvalidInputError(
                f"{len(self)} rows are too many for JSON (at most {_JSON_ROWS}). Use to_parquet(path)."
            )
        arrays = {name: _narrowed(values) for name, values in self._columns().items()}
        columns = {name: _plain(values) for name, values in arrays.items()}
        kinds = {name: values.dtype.kind for name, values in arrays.items()}
        content = {SEAL: BLANK, "version": _VERSION, "num_rows": self.num_rows}
        content |= {"settings": self.settings, "columns": columns, "kinds": kinds}
        text = json.dumps(content, allow_nan=False) + "\n"
        try:
            parse_json(text.encode())
        except ValueError as error:
            raise InvalidInputError(
                f"The labels of {len(self)} rows are too long for JSON ({error}). Use to_parquet(path)."
            ) from error
        real = Path(path).resolve()
        unfinished = real.with_name(f".{real.name}.new")  # a full disk must not cost an earlier file
        try:
            unfinished.unlink(missing_ok=True)  # of a killed process; a link is not followed
            try:
                unfinished.write_text(text, encoding="utf-8")
                seal(str(unfinished), _SEALED_AS)
                unfinished.replace(real)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"The selection cannot be written to {path} ({error.strerror or error}). Free some space, or pass "
                "another path."
            ) from error
        return Path(path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read the file of :meth:`save`.

        Raises:
            InvalidInputError: If it is not such a file.
        """
        try:
            file = str(Path(path).resolve(strict=True))
            made = cls._of(parse_json(sealed_content(file, _SEALED_AS)))
        except (CorruptStoreError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError(
                f"{path} is not the file of a selection ({type(error).__name__}: {error}). Give the path that "
                "selection.save(path) wrote."
            ) from error
        return made

    @classmethod
    def _of(cls, content: Any) -> Self:
        """Return the selection in the content of a file; raise ``ValueError`` if it contradicts itself."""
        kinds = content["kinds"] | _TYPES
        columns = {name: _array(values, kinds[name]) for name, values in content["columns"].items()}
        rows, num_rows = columns["row"], int(content["num_rows"])
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r} instead of {_VERSION}")
        if any(values.shape != (len(rows),) for values in columns.values()):
            raise ValueError("columns of different lengths")
        if len(np.unique(rows)) < len(rows) or not ((rows >= 0) & (rows < num_rows)).all():
            raise ValueError(f"rows that are not distinct numbers from 0 to {num_rows - 1}")
        named = {attribute: columns[name] for name, attribute in _FIELDS.items() if name in columns}
        return cls(**named, num_rows=num_rows, settings=dict(content["settings"]))

    def _columns(self) -> dict[str, NDArray[Any]]:
        columns = {name: getattr(self, attribute) for name, attribute in _FIELDS.items()}
        return {name: values for name, values in columns.items() if values is not None}

    def _first(self) -> list[tuple[Any, ...]]:
        return list(zip(*(_plain(values[:_SHOWN]) for values in self._columns().values()), strict=True))


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """Return objects that are all integers of 64 bits as such; other values as they are."""
    if values.dtype == object and all(type(value) is int and -(2**63) <= value < 2**63 for value in values):
        return values.astype(np.int64)
    return values


def _plain(values: NDArray[Any]) -> list[Any]:
    """Return a column as JSON values. Dates and the like are texts, and so are floats that are not finite."""
    if values.dtype.kind not in _NUMBERS:
        return list(map(label_text, values))
    numbers = values.astype(_NUMBERS[values.dtype.kind]).tolist()
    return [number if math.isfinite(number) else str(number) for number in numbers]


def _array(values: list[Any], kind: str) -> NDArray[Any]:
    """Return the column that :func:`_plain` made from an array of a kind of dtypes."""
    if kind in _NUMBERS:
        return np.array(values, dtype=_NUMBERS[kind])
    return short_texts(np.array(values, object))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
