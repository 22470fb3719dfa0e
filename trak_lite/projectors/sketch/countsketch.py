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
    AbstractProjector,
    Accumulator,
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

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows.

        It sums the sketches of blocks in reverse model order, for any order of arrival. Sketches that arrive early are
        buffered; in a backward pass they are few.
        """
        order = list(parameters)[::-1]
        turns = deque(order)
        waiting: dict[str, list[tuple[int, Tensor]]] = {}
        sums = FeatureRows(num_samples, self.proj_dim, self.device)

        def merge(name: str) -> None:
            for start, part in waiting.pop(name, ()):
                if part.device.type != "cpu" and len(part) == num_samples:
                    sums.add(part)
                    continue
                total = sums.of(part.dtype, part.device)
                total[start : start + len(part)] += part.to(total.device)

        def add(block: GradientBlock) -> None:
            check_block(block, num_samples, parameters)
            part = self.sketch(block, tuple(parameters[block.name]), model_id)
            waiting.setdefault(block.name, []).append((block.start, part))
            while turns and sum(len(part) for _, part in waiting.get(turns[0], ())) >= num_samples:
                merge(turns.popleft())

        def features() -> Tensor:
            for name in order:  # also blocks of rows that already had been added
                merge(name)
            total = sums.whole()
            # Not by a number: on CUDA torch multiplies by its inverse, which rounds otherwise.
            return total if self.copies == 1 else total / total.new_full((), math.sqrt(self.copies))

        return Accumulator(add, features)

    def adjoint(self, features: Tensor, *, model_id: int, parameters: ParameterShapes) -> dict[str, Tensor]:
        """Return the transposed map applied to feature rows, ``(m, *shape)`` by parameter name."""
        scaled = features / math.sqrt(self.copies)
        by_name = {}
        for name, shape in parameters.items():
            sketches = self._sketches_of(name, tuple(shape), model_id, features.device)
            entries = functools.reduce(torch.add, (sketch.adjoint(scaled) for sketch in sketches))
            by_name[name] = entries.reshape(len(features), *shape)
        return by_name

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
