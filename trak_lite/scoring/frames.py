"""Pandas frames of arrays (extra ``tables``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import require_packages

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame
else:
    DataFrame = Any

__all__ = ["DataFrame", "frame"]


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
