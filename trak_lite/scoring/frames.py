"""Pandas frames and xarray's arrays of scores (extra ``tables``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import require_packages

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame
    from xarray import DataArray as DataArray
else:
    DataArray = DataFrame = Any

__all__ = ["DataArray", "DataFrame", "data_array", "frame"]


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


def data_array(
    values: NDArray[Any], names: Sequence[str], *, name: str, attributes: Mapping[str, str]
) -> DataArray:
    """Return an array with the names of its dimensions, whose entries are numbered, and attributes."""
    require_packages("xarray", extra="tables")
    import xarray as xr

    numbers = {dim: np.arange(count) for dim, count in zip(names, values.shape, strict=True)}
    return xr.DataArray(values, dims=tuple(names), coords=numbers, name=name, attrs=dict(attributes))
