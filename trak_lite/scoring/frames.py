"""Pandas frames and Parquet files of arrays (extra ``tables``)."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import require_packages
from trak_lite.errors import InvalidInputError

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame
else:
    DataFrame = Any

__all__ = ["DataFrame", "frame", "write_parquet"]


def frame(
    values: Mapping[str, NDArray[Any]] | NDArray[Any], *, index: str, columns: str | None = None
) -> DataFrame:
    """Return a frame of named columns of one length, or of a matrix, whose numbered columns have a name.

    The rows are numbered; ``index`` is the name of their numbers.
    """
    require_packages("pandas", extra="tables")
    import pandas as pd

    if isinstance(values, np.ndarray):
        numbers = pd.RangeIndex(values.shape[1], name=columns)
        return pd.DataFrame(values, pd.RangeIndex(len(values), name=index), numbers)
    count = len(next(iter(values.values())))
    return pd.DataFrame(dict(values), pd.RangeIndex(count, name=index))


def write_parquet(columns: Mapping[str, NDArray[Any]], path: str | PathLike[str], *, index: str) -> Path:
    """Write columns of one length to a Parquet file, and return its path."""
    require_packages("pandas", "pyarrow", extra="tables")
    out = Path(path)
    if out.is_dir():
        raise InvalidInputError(f"{out} is a folder. Name a file in it, such as {out / 'selection.parquet'}.")
    frame(columns, index=index).to_parquet(out, engine="pyarrow")
    return out
