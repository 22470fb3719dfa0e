"""Decides whether a stored result still is that of a function of the user.

A function is described by its source and values. What else it depends on cannot be followed in general (helpers, base
classes, files, the environment): a part of the work is repeated and compared.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from trak_lite.data.datasets import RowNumbers
from trak_lite.store import AbstractRowTable

_T = TypeVar("_T")

SAME: Final = 1e-2
"""Largest distance on another machine: rounding errors grow with every step of a training."""
_ROUNDING: Final = 1e-5
"""Largest distance under the same conditions, if two repetitions have the same bits."""
_NOISE: Final = 10.0
"""Largest distance in units of that of two repetitions."""
PROBED_ROWS: Final = 8
"""Largest number of rows of a table that are recomputed."""


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """A stored result beside repetitions of it. Distances are relative to the size of the stored result."""

    apart: float
    """Distance between the stored result and the nearest repetition."""
    noise: float
    """Distance between two repetitions; 0 if the first one equals the stored result."""
    exact: bool
    """Whether the stored result was made under the present conditions, which give the same bits."""

    @property
    def is_same(self) -> bool:
        """Whether the stored result is that of the present function, as far as its noise allows to say."""
        return self.apart <= max(_ROUNDING if self.exact else SAME, _NOISE * self.noise)

    @property
    def is_random(self) -> bool:
        """Whether repetitions differ by more than rounding."""
        return self.noise > SAME


def compare(
    stored: _T, repeat: Callable[[int], _T], distance: Callable[[_T, _T], float], *, exact: bool
) -> Comparison:
    """Compare a stored result with repetition 0 of it, and with repetition 1 if they differ.

    The distance of two results is relative to the size of the stored one.

    Example:
        >>> compare(1.0, lambda number: 1.001, lambda one, other: abs(one - other), exact=True).is_same
        False
    """
    first = repeat(0)
    apart = distance(first, stored)
    if not apart:
        return Comparison(0.0, 0.0, exact)
    second = repeat(1)
    return Comparison(min(apart, distance(second, stored)), distance(second, first), exact)


def conditions(**others: Any) -> dict[str, Any]:
    """Return JSON values for what the bits of a computation depend on, besides its function, and others."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
    return {
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if in_use else None,
        **others,
    }


def done_rows(
    table: AbstractRowTable, wanted: RowNumbers | None = None, *, without: Collection[int] = ()
) -> tuple[RowNumbers, Mapping[str, NDArray[Any]]] | None:
    """Return up to ``PROBED_ROWS`` done rows of a table, from its first and its last chunk; ``None`` without any.

    Reading a row reads its whole chunk (checksum, object store), so only two chunks are used. ``wanted`` are committed
    rows to return instead, ``without`` chunks to leave out.
    """
    committed = [chunk for chunk in table.committed_chunks() if chunk not in without]
    if wanted is None and committed:
        chunks = sorted({committed[0], committed[-1]})
        share = PROBED_ROWS // len(chunks)
        wanted = np.concatenate([_spread(np.arange(*table.chunk_range(chunk)), share) for chunk in chunks])
    if wanted is not None:
        return wanted, {column.name: table.read_rows(column.name, wanted) for column in table.spec.columns}
    begun = np.unique(np.flatnonzero(table.done()) // table.spec.chunk_rows).tolist()
    for chunk in (chunk for chunk in begun if chunk not in without):
        rows, values = table.read_done(chunk)
        if len(rows):
            chosen = _spread(np.arange(len(rows)), PROBED_ROWS)
            return rows[chosen], {name: column[chosen] for name, column in values.items()}
    return None


def _spread(rows: RowNumbers, most: int) -> RowNumbers:
    """Return at most ``most`` evenly spread rows, with the first and the last one."""
    indices = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64)
    return rows[np.unique(indices)]
