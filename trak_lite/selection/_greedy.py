r"""Greedy choice of rows that are valuable and not alike, by the objective F of ``select(method="greedy")``.

Its second term is monotone and submodular, and a row that repeats chosen rows adds little to it. Without noise it is
the objective of determinantal point processes, whose greedy algorithm by incremental Cholesky rows is used here (Chen,
Zhang and Zhou, NeurIPS 2018, algorithm 1). If all values are at least 0, greedy choices reach 1 - 1/e of the largest F
(Nemhauser, Wolsey and Fisher, 1978). F does not depend on the signs of the rows, so it needs no q.

Shapes: P candidates, k chosen rows, K feature width, C checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import NonFiniteError

NOISE = 0.1
"""Of the observations along the rows: the second copy of a row adds 0.27 of what the first adds, the third 0.16."""
_EQUAL = 1e-9
"""Gains whose difference is smaller are equal; rounding errors of equal rows differ by their places in a matrix."""


class GreedyChoice(NamedTuple):
    """Chosen candidates, in the order of choice."""

    order: NDArray[np.int64]
    """``(k,)`` places among the candidates."""
    redundancy: NDArray[np.float64]
    """``(k,)`` share of each row's squared norm that the rows chosen before explain, from 0 to 1."""


def greedy(
    values: NDArray[np.float64], features: Sequence[NDArray[Any]], k: int, *, diversity: float
) -> GreedyChoice:
    """Choose k of P candidates that raise F most, one after the other; of equal gains the first.

    Values are ``(P,)``, larger is better; features ``(P, K)`` for each checkpoint; alpha is ``diversity``. Memory: ``8
    P (C K + k)`` bytes. Time: ``k P (C K + k)`` multiplications.
    """
    units = [_unit_rows(rows) for rows in features]
    norms = np.mean([np.einsum("pk,pk->p", rows, rows) for rows in units], axis=0)
    values = np.ldexp(values, -_exponents(values))  # exact; squares would leave the range of float64
    worth = values / (float(np.sqrt(np.mean(values**2))) or 1.0)
    left = norms.copy()  # squared norm of each row that the chosen rows do not explain
    cholesky = np.empty((k, len(values)))
    order, redundancy = np.empty(k, np.int64), np.empty(k)
    free = np.ones(len(values), np.bool_)
    for step in range(k):
        gains = worth + diversity * np.log1p(left / NOISE) / np.log1p(1.0 / NOISE)
        gains[~free] = -np.inf
        highest = gains.max()
        chosen = int(np.argmax(gains >= highest - _EQUAL * max(1.0, abs(highest))))
        order[step], free[chosen] = chosen, False
        redundancy[step] = 1.0 - left[chosen] / norms[chosen] if norms[chosen] > 0 else 0.0
        cosines = np.mean([rows @ rows[chosen] for rows in units], axis=0)
        before = cholesky[:step]
        row = (cosines - before[:, chosen] @ before) / np.sqrt(left[chosen] + NOISE)
        cholesky[step] = row
        left = np.maximum(left - row**2, 0.0)
    return GreedyChoice(order, redundancy.clip(0.0, 1.0))


def _exponents(values: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the exponent of 2 of the largest size of values, along the last axis."""
    exponents: NDArray[np.int32] = np.frexp(np.abs(values).max(axis=-1, initial=0.0))[1]
    return exponents


def _unit_rows(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return the rows in float64 with norm 1; rows of zeros remain zero."""
    wide = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(wide).all():
        raise NonFiniteError(
            "A feature of a candidate row is NaN or infinite. Featurize the train data again."
        )
    wide = np.ldexp(wide, -_exponents(wide)[:, None])
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    units: NDArray[np.float64] = np.divide(wide, norms, out=np.zeros_like(wide), where=norms > 0)
    return units
