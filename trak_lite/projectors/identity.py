"""No projection: features are the gradients themselves.

Shapes: B samples, P gradient entries per sample; K = P.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from trak_lite.projectors._base import (
    AbstractFeatureAccumulator,
    AbstractProjector,
    ProjectionType,
    block_rows,
)
from trak_lite.projectors._scratch import FeatureRows
from trak_lite.types import GradientBlock, ParameterShapes, num_entries

__all__ = ["NoOpProjector"]


@final
class NoOpProjector(AbstractProjector):
    """Returns all P gradient entries, unscaled, with parameters in model order.

    Name and signature are those of the original TRAK; only ``device`` has an effect.

    Example:
        >>> NoOpProjector().project({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, model_id=0)
        tensor([[1., 1., 0.]])
    """

    def __init__(
        self,
        grad_dim: int = 0,
        proj_dim: int = 0,
        seed: int = 0,
        proj_type: str | ProjectionType = "na",
        device: str | torch.device | None = None,
        **kwargs: object,
    ) -> None:
        """Store the device.

        Args:
            grad_dim: Has no effect.
            proj_dim: Has no effect; the attribute is 0, because K is the P of the gradients.
            seed: Has no effect.
            proj_type: Has no effect.
            device: Device of the features; ``None`` for the gradients' device.
            **kwargs: Ignored; accepts the arguments of other projectors.
        """
        super().__init__(grad_dim, 0, seed, proj_type, device)

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows."""
        return _ColumnAccumulator(num_samples, parameters, self.device)

    def adjoint(self, features: Tensor, *, model_id: int, parameters: ParameterShapes) -> dict[str, Tensor]:
        """Return the columns of every parameter in its shape, ``(m, *shape)``."""
        del model_id
        parts = torch.split(features, [math.prod(shape) for shape in parameters.values()], dim=1)
        return {
            name: part.reshape(len(features), *shape)
            for (name, shape), part in zip(parameters.items(), parts, strict=True)
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return kind and version; the identity has no settings."""
        return {"kind": "identity", "proj_dim": 0, "seed": 0, "version": 1}


@final
class _ColumnAccumulator(AbstractFeatureAccumulator):
    """Writes each block into its parameter's columns."""

    def __init__(
        self, num_samples: int, parameters: ParameterShapes, device: str | torch.device | None
    ) -> None:
        self._num_samples = num_samples
        self._parameters = parameters
        self._columns = dict(
            zip(parameters, accumulate(map(math.prod, parameters.values()), initial=0), strict=False)
        )
        self._features = FeatureRows(num_samples, num_entries(parameters), device)

    @torch.no_grad()
    def add(self, block: GradientBlock) -> None:
        rows = block_rows(block, self._num_samples, self._parameters)
        features = self._features.of(rows.dtype, rows.device)
        column = self._columns[block.name]
        target = features[block.start : block.start + block.num_samples, column : column + rows.shape[1]]
        target.add_(rows.to(features.device))

    def features(self) -> Tensor:
        return self._features.whole()
