"""Pandas frames and Parquet files of arrays (extra ``tables``)."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trak_lite._validate import require_packages
from trak_lite.errors import InvalidInputError

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame
else:
    DataFrame = Any

__all__ = ["DataFrame", "frame", "matrix_frame", "write_parquet"]


def frame(columns: Mapping[str, NDArray[Any]], *, index: str) -> DataFrame:
    """Return a frame of columns of one length, with a numbered index of a name.

    Raises:
        MissingPackageError: If pandas is not installed.
    """
    require_packages("pandas", extra="tables")
    import pandas as pd

    count = len(next(iter(columns.values())))
    return pd.DataFrame(dict(columns), index=pd.RangeIndex(count, name=index))


def matrix_frame(values: NDArray[np.float32], *, index: str, columns: str) -> DataFrame:
    """Return a frame of a matrix, with numbered rows and columns of a name each.

    Raises:
        MissingPackageError: If pandas is not installed.
    """
    require_packages("pandas", extra="tables")
    import pandas as pd

    num_rows, num_columns = values.shape
    return pd.DataFrame(
        values,
        index=pd.RangeIndex(num_rows, name=index),
        columns=pd.RangeIndex(num_columns, name=columns),
    )


def write_parquet(columns: Mapping[str, NDArray[Any]], path: str | PathLike[str], *, index: str) -> Path:
    """Write columns of one length to a Parquet file, and return its path.

    Raises:
        InvalidInputError: If the path is a folder.
        MissingPackageError: If pandas or pyarrow is not installed.
    """
    require_packages("pandas", "pyarrow", extra="tables")
    out = Path(path)
    if out.is_dir():
        raise InvalidInputError(f"{out} is a folder. Name a file in it, such as {out / 'selection.parquet'}.")
    frame(columns, index=index).to_parquet(out, engine="pyarrow")
    return out
