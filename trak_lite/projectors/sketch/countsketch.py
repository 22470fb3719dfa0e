r"""The default projection: a CountSketch that reads each gradient entry at most once.

phi is the sum over parameters of a sketch of the parameter's gradient: every entry is added with a random sign to one
of the K features (with ``copies=s``, to s features, scaled by :math:`1/\sqrt s`). Inner products are unbiased, with
variance at most :math:`(\|x\|^2\|y\|^2 + \langle x, y\rangle^2 - \frac2s\sum_i x_i^2 y_i^2)/K`. For s = 1 this is the
variance of a dense sign matrix, which costs 2K operations per entry. (The sketch of a matrix has a different variance,
smaller except for a relative term of order 1/K, see ``matrix``.) Gradients given as factors or as table rows are never
formed as a whole on a CPU; on an accelerator, those of some samples are, in at most 256 MiB.

Shapes: B samples, K features (``proj_dim``), P gradient entries per sample.
Numerics: float64 gradients are summed in float64, all others in float32, in an order that is part of the definition.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from typing import Any, final

import torch
from torch import Tensor

from trak_lite.core.validate import integer, one_of, positive_int
from trak_lite.projectors._base import (
    AbstractFeatureAccumulator,
    AbstractProjector,
    ProjectionType,
    check_block,
)
from trak_lite.projectors._scratch import FeatureRows, Scratch
from trak_lite.projectors.sketch.base import Keys
from trak_lite.projectors.sketch.matrix import FactorMethod, MatrixSketch
from trak_lite.projectors.sketch.vector import VectorSketch
from trak_lite.types import FactoredBlock, GradientBlock, LookupBlock, ParameterShapes, SingleBlock

_NARROW = 64
"""Minimum number of columns for sketching a parameter as a matrix; part of the definition."""


@final
class CountSketchProjector(AbstractProjector):
    """CountSketch: adds every gradient entry to a few of the K features, with random signs.

    The features of dense gradients are bitwise independent of batch, block order, number of threads and device; those
    of factors and table rows up to rounding.
    Not thread-safe.

    Example:
        >>> projector = CountSketchProjector(512)
        >>> projector.project({"weight": torch.ones(2, 10, 100)}, model_id=0).shape
        torch.Size([2, 512])
    """

    def __init__(
        self,
        proj_dim: int,
        *,
        seed: int = 0,
        copies: int = 1,
        device: str | torch.device | None = None,
        factors: FactorMethod = "auto",
    ) -> None:
        """Store the settings; nothing is drawn.

        Args:
            proj_dim: K, number of features per sample.
            seed: Any integer.
            copies: s, number of features that every entry is added to. Time is proportional to s; larger values help
                if a few entries dominate the gradients.
            device: Device of the projection; ``None`` for the gradients' device.
            factors: Method for gradients given as factors: ``"form"`` forms some rows at a time, ``"fourier"`` uses
                Fourier transforms without forming any, ``"auto"`` uses the cheaper one. The map is the same. On an
                accelerator gradients are formed only with Triton and where K rows of one take at most 256 MiB.

        Raises:
            InvalidInputError: If a setting is not allowed.
        """
        kind = ProjectionType.rademacher
        super().__init__(0, positive_int(proj_dim=proj_dim), integer(seed=seed), kind, device)
        self.copies = positive_int(copies=copies)
        self._factors: FactorMethod = one_of(("auto", "form", "fourier"), factors=factors)  # type: ignore[assignment]
        self._scratch = Scratch()
        self._sketches: dict[tuple[str, tuple[int, ...]], list[VectorSketch | MatrixSketch]] = {}
        self._drawn_for: tuple[int, torch.device] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out generated hash functions and scratch memory, so that the projector can be pickled."""
        return {**self.__dict__, "_sketches": {}, "_drawn_for": None, "_scratch": Scratch()}

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows."""
        return _SketchAccumulator(self, num_samples, model_id, parameters)

    def adjoint(self, features: Tensor, *, model_id: int, parameters: ParameterShapes) -> dict[str, Tensor]:
        """Return the transposed map applied to feature rows, ``(m, *shape)`` by parameter name."""
        scaled = features / math.sqrt(self.copies)
        found = {}
        for name, shape in parameters.items():
            sketches = self._sketches_of(name, tuple(shape), model_id, features.device)
            entries = functools.reduce(torch.add, (sketch.adjoint(scaled) for sketch in sketches))
            found[name] = entries.reshape(len(features), *shape)
        return found

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the features."""
        return {**super().fingerprint(), "kind": "countsketch", "copies": self.copies}

    def free_memory(self) -> None:
        """Free hash functions and scratch memory; they are created again when needed."""
        self._sketches.clear()
        self._scratch = Scratch()

    def sketch(self, block: GradientBlock, shape: tuple[int, ...], model_id: int) -> Tensor:
        """Return the features ``(b, K)`` of one block, not yet scaled.

        Args:
            block: Gradients of b samples of one parameter.
            shape: Shape of the parameter.
            model_id: The checkpoint.
        """
        if len(block.parts) > 1:
            return functools.reduce(torch.add, (self.sketch(part, shape, model_id) for part in block.parts))
        single: SingleBlock = block.parts[0].moved(self.device)
        device = single.carrier.device
        sketches = self._sketches_of(block.name, shape, model_id, device)
        scratch = self._scratch if device.type == "cpu" else Scratch()
        if isinstance(single, FactoredBlock):
            parts = (sketch.factored(single, scratch) for sketch in sketches)
        elif isinstance(single, LookupBlock):
            parts = (sketch.looked_up(single, scratch) for sketch in sketches)
        else:
            entries = single.dense()  # copies strided rows, once
            parts = (sketch.dense(entries, scratch) for sketch in sketches)
        return functools.reduce(operator.iadd, parts)

    def _sketches_of(
        self, name: str, shape: tuple[int, ...], model_id: int, device: torch.device
    ) -> list[VectorSketch | MatrixSketch]:
        """Return the sketches of a parameter, one per copy, drawn at the first call."""
        if self._drawn_for != (model_id, device):
            self._sketches.clear()
            self._drawn_for = (model_id, device)
        if (name, shape) not in self._sketches:
            keys = [Keys(self.seed, model_id, name, copy) for copy in range(self.copies)]
            is_matrix = len(shape) >= 2 and shape[0] >= 2 and math.prod(shape[1:]) >= _NARROW
            self._sketches[name, shape] = [
                MatrixSketch(shape, self.proj_dim, key, device=device, method=self._factors)
                if is_matrix
                else VectorSketch(math.prod(shape), self.proj_dim, key, device=device)
                for key in keys
            ]
        return self._sketches[name, shape]


@final
class _SketchAccumulator(AbstractFeatureAccumulator):
    """Sums the sketches of a batch's blocks in reverse model order, for any order of arrival.

    Sketches that arrive early are buffered; in a backward pass they are few.
    """

    def __init__(
        self, projector: CountSketchProjector, num_samples: int, model_id: int, parameters: ParameterShapes
    ) -> None:
        self._projector = projector
        self._num_samples = num_samples
        self._model_id = model_id
        self._parameters = parameters
        self._order = list(parameters)[::-1]
        self._turns = deque(self._order)
        self._waiting: dict[str, list[tuple[int, Tensor]]] = {}
        self._total = FeatureRows(num_samples, projector.proj_dim, projector.device)

    @torch.no_grad()
    def add(self, block: GradientBlock) -> None:
        """Add one block; raises InvalidInputError if it does not fit the parameters or the batch."""
        check_block(block, self._num_samples, self._parameters)
        shape = tuple(self._parameters[block.name])
        part = self._projector.sketch(block, shape, self._model_id)
        self._waiting.setdefault(block.name, []).append((block.start, part))
        while self._turns and self._is_whole(self._turns[0]):
            self._merge(self._turns.popleft())

    @torch.no_grad()
    def features(self) -> Tensor:
        """Return ``(B, K)`` in float32, or in float64 if gradients were float64."""
        for name in self._order:  # also blocks of rows that already had been added
            self._merge(name)
        total = self._total.whole()
        if self._projector.copies == 1:
            return total
        # Not by a number: on CUDA torch multiplies by its inverse, which rounds otherwise.
        return total / total.new_full((), math.sqrt(self._projector.copies))

    def _is_whole(self, name: str) -> bool:
        return sum(len(part) for _, part in self._waiting.get(name, ())) >= self._num_samples

    def _merge(self, name: str) -> None:
        for start, part in self._waiting.pop(name, ()):
            if part.device.type != "cpu" and len(part) == self._num_samples:
                self._total.add(part)
                continue
            total = self._total.of(part.dtype, part.device)
            total[start : start + len(part)] += part.to(total.device)
