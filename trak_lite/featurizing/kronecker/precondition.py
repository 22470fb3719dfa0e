r"""Multiplies gradient blocks by the inverse of the curvature before they are projected.

:math:`(H + \lambda I)^{-1} g` is :math:`Q_S \left[(Q_S^\top G Q_A) \oslash (\Lambda + \lambda)\right] Q_A^\top` for a
unit's gradient as a matrix G (arXiv:2308.03296, equation 20).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

import torch
from torch import Tensor

from trak_lite._devices import full_float32, precise
from trak_lite.errors import InvalidInputError
from trak_lite.featurizing.kronecker.curvature import KroneckerCurvature
from trak_lite.featurizing.kronecker.units import GradientJoiner, UnitGradient, sample_slices
from trak_lite.projectors import AbstractProjector
from trak_lite.projectors._base import AbstractFeatureAccumulator
from trak_lite.types import BlockSink, DenseBlock, FeatureLayout, GradientBlock, ParameterShapes


class Inverse(Protocol):
    """Multiplies gradients by the inverse of a curvature before they are projected."""

    def accumulator(
        self, projector: AbstractProjector, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator of the features of one batch; see :meth:`AbstractProjector.accumulator`."""


@final
class Preconditioner:
    """Multiplies gradients by the inverse of a damped curvature, or by the square root of the inverse."""

    def __init__(
        self,
        curvature: KroneckerCurvature,
        *,
        damping: float,
        absolute: bool = False,
        share: float | None = None,
    ) -> None:
        """Invert the eigenvalues, damped by lambda in units of the mean eigenvalue of a unit, above 0.

        If ``absolute``, the damping is lambda itself, the same for all units. With ``share``, a factor of the curvature
        that does not change the damping, gradients are multiplied by the square root of the inverse.
        """
        if not damping > 0:
            raise InvalidInputError(
                f"The damping of a Kronecker-factored curvature is {damping!r}. Expected a number above 0: without "
                "damping, directions in which no train row has curvature would be divided by zero."
            )
        self._inverses = {
            found.basis.unit: (found, found.inverse(damping, absolute=absolute, share=share))
            for found in curvature.units
        }
        self.lambdas = {
            name: float(found.damping_of(damping, absolute=absolute))
            for found in curvature.units
            for name in found.basis.unit.names
        }
        """Lambda of every parameter by name; 0 where no train row has curvature."""

    def accumulator(
        self, projector: AbstractProjector, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator; see :class:`Inverse`. Raises if the curvature lacks a parameter."""
        unknown = [name for name in parameters if name not in self.lambdas]
        if unknown:
            raise InvalidInputError(
                f"The curvature was fitted without the parameters {unknown[:5]}. Fit it for all parameters in grad_wrt."
            )
        inner = projector.accumulator(num_samples, model_id=model_id, parameters=parameters)
        joiner = GradientJoiner(
            list(self._inverses), lambda gradient: self._apply(gradient, parameters, inner.add)
        )

        def features() -> Tensor:
            joiner.finish()
            return inner.features()

        return Accumulator(joiner.add, features)

    @torch.no_grad()
    def _apply(self, gradient: UnitGradient, parameters: ParameterShapes, sink: BlockSink) -> None:
        """Multiply the gradients of a unit by its inverse and pass them to the sink, a few samples at a time."""
        found, inverse = self._inverses[gradient.unit]
        if found.treatment == "diagonal":
            _scale(gradient.block, inverse, tuple(parameters[gradient.block.name]), sink)
            return
        unit = gradient.unit
        # TF32 would put a part of the large directions into small ones, which the inverse amplifies.
        with full_float32(inverse.device):
            for samples, turned in found.basis.rotated(gradient):
                matrices = found.basis.back(turned.mul_(inverse.to(turned)))
                start = gradient.block.start + samples.start
                weight = matrices[:, :, : unit.columns]
                sink(DenseBlock(unit.weight, weight.reshape(-1, *parameters[unit.weight]), start))
                if unit.bias is not None:
                    bias = matrices[:, :, -1].reshape(-1, *parameters[unit.bias])
                    sink(DenseBlock(unit.bias, bias, start))


def _scale(block: GradientBlock, inverse: Tensor, shape: tuple[int, ...], sink: BlockSink) -> None:
    """Multiply the gradients of a parameter entry by entry, and pass them to the sink."""
    inverse = inverse.reshape(shape)
    scaled = block.by_entry(inverse.to(precise(block.parts[0].carrier[:0])))
    if scaled is not None:
        sink(scaled)
        return
    for samples in sample_slices(block.num_samples, inverse.numel()):
        grads = precise(block.samples(samples).dense()).reshape(-1, *shape)
        sink(DenseBlock(block.name, grads * inverse.to(grads), block.start + samples.start))


@final
class PreconditionedProjector(AbstractProjector):
    r"""Multiplies gradients by the inverse of a curvature, then projects them.

    The projection is that of the inner projector, so dot products of these features with features of plain gradients
    estimate :math:`g^\top (H + \lambda I)^{-1} g'`.
    """

    def __init__(self, projector: AbstractProjector, inverse: Inverse) -> None:
        super().__init__(
            projector.grad_dim, projector.proj_dim, projector.seed, projector.proj_type, projector.device
        )
        self._projector, self._inverse = projector, inverse

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator for one batch; see :meth:`AbstractProjector.accumulator`."""
        return self._inverse.accumulator(
            self._projector, num_samples, model_id=model_id, parameters=parameters
        )

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return the layout of the inner projector."""
        return self._projector.layout(parameters)


@final
class Accumulator(AbstractFeatureAccumulator):
    """An accumulator that consists of two functions."""

    def __init__(self, add: Callable[[GradientBlock], None], features: Callable[[], Tensor]) -> None:
        self._add, self._features = add, features

    def add(self, block: GradientBlock) -> None:
        """Add one block."""
        self._add(block)

    def features(self) -> Tensor:
        """Return the feature rows."""
        return self._features()
