"""No projection, and separate features, hence a separate kernel, for each module with any projector.

With one joint segment the features of all parameters are summed and share one kernel. With one segment per module the
kernel is block-diagonal, as in layer-wise influence functions. At equal storage the joint layout preserves inner
products better, because each module has only a share of the columns. :class:`~trak_lite.Attributor` nevertheless uses
one segment per module by default: the criterion is how well scores predict retraining (``benchmarks/lds/table.py``
compares both).

Shapes: B samples, P gradient entries per sample, L modules, K features of each (the projector's ``proj_dim``); rows
have at most L K features.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from trak_lite.projectors._base import (
    AbstractProjector,
    Accumulator,
    ProjectionType,
    block_rows,
    by_module,
    routed,
    side_by_side,
)
from trak_lite.projectors._scratch import FeatureRows
from trak_lite.types import FeatureLayout, GradientBlock, ParameterShapes, by_name, num_entries


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
        """Store the device of the features, ``None`` for that of the gradients; no other argument has an effect.

        The attribute ``proj_dim`` is 0, because K is the P of the gradients.
        """
        super().__init__(grad_dim, 0, seed, proj_type, device)

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows."""
        starts = accumulate(map(math.prod, parameters.values()), initial=0)
        columns = dict(zip(parameters, starts, strict=False))
        features = FeatureRows(num_samples, num_entries(parameters), self.device)

        def add(block: GradientBlock) -> None:
            rows = block_rows(block, num_samples, parameters)
            total, column = features.of(rows.dtype, rows.device), columns[block.name]
            view = total[block.start : block.start + len(rows), column : column + rows.shape[1]]
            view.add_(rows.to(total.device))

        return Accumulator(add, features.whole)

    def adjoint(self, features: Tensor, *, model_id: int, parameters: ParameterShapes) -> dict[str, Tensor]:
        """Return the columns of every parameter in its shape, ``(m, *shape)``."""
        return by_name(features, parameters)

    def fingerprint(self) -> dict[str, Any]:
        """Return kind and version; the identity has no settings."""
        return {"kind": "identity", "proj_dim": 0, "seed": 0, "version": 1}


_ROOT = "(model)"
"""Segment name for parameters registered on the root module."""


@final
class PerModuleProjector(AbstractProjector):
    """Projects the parameters of each module to a separate segment of features.

    The gradient of a module with no more parameters than features is stored whole: it is exact and takes fewer bytes.

    Example:
        >>> from trak_lite.projectors import CountSketchProjector
        >>> projector = PerModuleProjector(CountSketchProjector(4))
        >>> projector.layout({"fc.weight": (3, 2), "fc.bias": (3,), "head.weight": (1, 3)}).to_json()
        [['fc', 0, 4], ['head', 4, 7]]
    """

    def __init__(self, projector: AbstractProjector) -> None:
        """Wrap a projector.

        Args:
            projector: Projects the parameters of each module; its ``proj_dim`` is K.
        """
        super().__init__(0, projector.proj_dim, projector.seed, projector.proj_type, projector.device)
        self.projector = projector

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows."""
        parts = [(self._projector_of(shapes), shapes) for shapes in by_module(parameters).values()]
        return routed(parts, num_samples, model_id, _concatenated)

    def adjoint(
        self, features: Tensor, *, model_id: int, parameters: ParameterShapes
    ) -> dict[str, Tensor] | None:
        """Return the transposed map of every module; ``None`` if the wrapped projector does not define it."""
        by_name: dict[str, Tensor] = {}
        start = 0
        for shapes in by_module(parameters).values():
            projector = self._projector_of(shapes)
            columns = features[:, start : start + projector.layout(shapes).width]
            start += columns.shape[1]
            part = projector.adjoint(columns, model_id=model_id, parameters=shapes)
            if part is None:
                return None
            by_name |= part
        return {name: by_name[name] for name in parameters}

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return the segments of every module, in model order."""
        widths: list[tuple[str, int]] = []
        for module, shapes in by_module(parameters).items():
            name, inner = module or _ROOT, self._projector_of(shapes).layout(shapes).segments
            widths += [(name if len(inner) == 1 else f"{name}/{part.name}", part.width) for part in inner]
        return side_by_side(widths)

    def fingerprint(self) -> dict[str, Any]:
        """Return the wrapped projector's fingerprint, marked as per module."""
        inner = self.projector.fingerprint()
        return {
            "kind": "per_module",
            "proj_dim": inner["proj_dim"],
            "seed": inner["seed"],
            "version": 2,
            "of": inner,
        }

    def _projector_of(self, parameters: ParameterShapes) -> AbstractProjector:
        is_small = num_entries(parameters) <= self.projector.layout(parameters).width
        return NoOpProjector(device=self.device) if is_small else self.projector

    def free_memory(self) -> None:
        """Free the wrapped projector's cached matrices."""
        self.projector.free_memory()


def _concatenated(rows: list[Tensor]) -> Tensor:
    device = next((row.device for row in rows if row.device.type != "cpu"), torch.device("cpu"))
    return torch.cat([row.to(device) for row in rows], 1)
