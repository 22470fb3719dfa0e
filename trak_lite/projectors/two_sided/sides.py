"""Side matrices of two-sided projections, and the selection of parameters that are projected on both sides.

Shapes: a matrix parameter is ``(d_out, d_in)``; the side matrices are ``(d_in, k_in)`` and ``(d_out, k_out)``.
Numerics: entries are float32 numbers; a float64 product uses the same numbers, widened.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Final, final

import torch
from torch import Tensor

from trak_lite.projectors._scratch import empty_buffer
from trak_lite.projectors.random.entries import AbstractEntries, GaussianEntries, RademacherEntries
from trak_lite.projectors.random.hash import Stream, parameter_key
from trak_lite.types import ParameterShapes

__all__ = ["DEFAULT_MAX_SIDE", "RANDOM_SIDES", "AbstractSides", "RandomSides", "matrix_shapes"]

DEFAULT_MAX_SIDE: Final = 16384
"""Longest side of a matrix that is projected on both sides. It includes the layers of language models of up to about
8 billion parameters and excludes their embeddings and heads, whose vocabulary side is longer."""

RANDOM_SIDES: Final[dict[str, type[AbstractEntries]]] = {
    entries.kind: entries for entries in (RademacherEntries, GaussianEntries)
}
"""Distributions of random side matrices by name."""

_DRAW_BYTES = 4 << 20  # scratch of a draw: stays in a core's cache


def matrix_shapes(parameters: ParameterShapes, max_side: int) -> dict[str, tuple[int, int]]:
    """Return ``(d_out, d_in)`` of every parameter that is projected on both sides, in model order.

    These are the non-empty parameters with at least two axes whose sides are at most ``max_side``. All axes but the
    first form the input side, as in the factors of a convolution.

    Example:
        >>> matrix_shapes({"conv": (8, 3, 5, 5), "bias": (8,), "embedding": (50257, 64)}, max_side=16384)
        {'conv': (8, 75)}
    """
    shapes = {name: (shape[0], math.prod(shape[1:])) for name, shape in parameters.items() if len(shape) >= 2}
    return {name: shape for name, shape in shapes.items() if min(shape) > 0 and max(shape) <= max_side}


class AbstractSides(ABC):
    """Provides side matrices and caches those of one model and device at a time."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all matrices."""
        self._owner: tuple[int, torch.device] | None = None
        self._made: dict[tuple[str, Stream], Tensor] = {}

    def matrix(
        self, name: str, side: Stream, shape: tuple[int, int], *, model_id: int, device: torch.device
    ) -> Tensor:
        """Return the matrix of one side of a parameter.

        Args:
            name: Canonical parameter name.
            side: ``Stream.TWO_SIDED_IN`` or ``Stream.TWO_SIDED_OUT``.
            shape: ``(d, k)`` with k below d.
            model_id: The checkpoint; matrices of another one are dropped.
            device: Where the matrix is wanted; matrices on another device are dropped.

        Returns:
            Float32 ``(d, k)``, unscaled; not to be written to.
        """
        if self._owner != (model_id, device):
            self.clear()
            self._owner = (model_id, device)
        if (name, side) not in self._made:
            self._made[name, side] = self._make(name, side, shape, model_id, device)
        return self._made[name, side]

    @abstractmethod
    def scale(self, width: int) -> float:
        """Return the scale of products with a matrix of ``width`` columns."""

    @abstractmethod
    def fingerprint(self) -> Any:
        """Return the JSON values that, with the seed, determine the matrices."""

    @abstractmethod
    def _make(
        self, name: str, side: Stream, shape: tuple[int, int], model_id: int, device: torch.device
    ) -> Tensor:
        """Compute the result of :meth:`matrix`."""


@final
class RandomSides(AbstractSides):
    """Entries (i, j) drawn from the hash of (seed, model_id, parameter name, side, i, j), scaled by 1/sqrt(k)."""

    def __init__(self, entries: type[AbstractEntries], *, seed: int) -> None:
        super().__init__()
        self._entries_type = entries
        self._seed = seed

    def scale(self, width: int) -> float:
        """Return ``1/sqrt(k)``: then P^T P is the identity in expectation."""
        return 1 / math.sqrt(width)

    def fingerprint(self) -> str:
        """Return the name of the distribution."""
        return self._entries_type.kind

    def _make(
        self, name: str, side: Stream, shape: tuple[int, int], model_id: int, device: torch.device
    ) -> Tensor:
        rows, width = shape
        key = parameter_key(self._seed, model_id, name, side)
        padded = self._entries_type.width(width)
        step = min(rows, max(1, _DRAW_BYTES // (4 * padded)))
        entries = self._entries_type(width, step, device)
        drawn = empty_buffer(step, padded, dtype=torch.float32, device=device)
        matrix = empty_buffer(rows, width, dtype=torch.float32, device=device)
        for start in range(0, rows, step):
            part = matrix[start : start + step]
            part.copy_(entries.draw_(drawn[: part.shape[0]], key, start)[:, :width])
        return matrix
