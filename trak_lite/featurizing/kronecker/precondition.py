r"""Multiplies gradient blocks by the inverse of the curvature before they are projected.

:math:`(H + \lambda I)^{-1} g` is :math:`Q_S \left[(Q_S^\top G Q_A) \oslash (\Lambda + \lambda)\right] Q_A^\top` for a
unit's gradient as a matrix G (arXiv:2308.03296, equation 20).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch
from torch import Tensor

from trak_lite._devices import full_float32
from trak_lite.errors import InvalidInputError
from trak_lite.featurizing.kronecker.bases import Eigenbasis, GradientJoiner, UnitGradient
from trak_lite.featurizing.kronecker.covariances import precise, sample_slices
from trak_lite.featurizing.kronecker.curvature import KroneckerCurvature
from trak_lite.projectors import AbstractProjector
from trak_lite.projectors._base import AbstractFeatureAccumulator, project_named
from trak_lite.types import (
    BlockSink,
    DenseBlock,
    FeatureLayout,
    GradientBlock,
    LookupBlock,
    ParameterShapes,
    samples_of,
)

__all__ = ["Inverse", "PreconditionedProjector", "Preconditioner"]


class Inverse(Protocol):
    """Multiplies gradients by the inverse of a curvature before they are projected."""

    def accumulator(
        self, projector: AbstractProjector, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator of the features of one batch; see :meth:`AbstractProjector.accumulator`."""


@final
class Preconditioner:
    """Multiplies gradients by the inverse of a damped curvature."""

    def __init__(self, curvature: KroneckerCurvature, *, damping: float, absolute: bool = False) -> None:
        """Invert the eigenvalues.

        Args:
            curvature: Curvature of all parameters that have gradients.
            damping: Lambda in units of the mean eigenvalue of a unit, above 0.
            absolute: Whether the damping is lambda itself, the same for all units.

        Raises:
            InvalidInputError: If the damping is not above 0.
        """
        if not damping > 0:
            raise InvalidInputError(
                f"The damping of a Kronecker-factored curvature is {damping!r}. Expected a number above 0: without "
                "damping, directions in which no train row has curvature would be divided by zero."
            )
        self.damping = damping
        self._inverses = {
            found.unit: _Inverse(
                found.basis, found.treatment == "diagonal", found.inverse(damping, absolute=absolute)
            )
            for found in curvature.units
        }
        self.lambdas = {
            name: float(found.damping_of(damping, absolute=absolute))
            for found in curvature.units
            for name in found.unit.names
        }
        """Lambda of every parameter by name; 0 where no train row has curvature."""

    def stream(self, parameters: ParameterShapes, sink: BlockSink) -> GradientJoiner:
        """Return a sink for the blocks of one batch; call its ``finish`` after the last one.

        Args:
            parameters: Shapes of the parameters by name.
            sink: Takes the preconditioned blocks, a few samples at a time.

        Raises:
            InvalidInputError: If the curvature lacks a parameter.
        """
        unknown = [name for name in parameters if name not in self.lambdas]
        if unknown:
            raise InvalidInputError(
                f"The curvature was fitted without the parameters {unknown[:5]}. Fit it for all parameters in grad_wrt."
            )
        return GradientJoiner(
            list(self._inverses),
            lambda gradient: self._inverses[gradient.unit].apply(gradient, parameters, sink),
        )

    def accumulator(
        self, projector: AbstractProjector, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator; see :class:`Inverse`."""
        inner = projector.accumulator(num_samples, model_id=model_id, parameters=parameters)
        return _PreconditionedAccumulator(inner, self.stream(parameters, inner.add))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Inverse:
    """The inverse of one unit's curvature."""

    _basis: Eigenbasis
    _is_diagonal: bool
    _inverse: Tensor

    @torch.no_grad()
    def apply(self, gradient: UnitGradient, parameters: ParameterShapes, sink: BlockSink) -> None:
        """Multiply the gradients by the inverse and pass them to the sink."""
        if self._is_diagonal:
            self._scale(gradient.block, parameters, sink)
            return
        # TF32 would put a part of the large directions into small ones, which the inverse amplifies.
        with full_float32(self._inverse.device):
            for samples, turned in self._basis.rotated(gradient):
                matrices = self._basis.back(turned.mul_(self._inverse.to(turned)))
                self._emit(matrices, gradient.block.start + samples.start, parameters, sink)

    def _emit(self, matrices: Tensor, start: int, parameters: ParameterShapes, sink: BlockSink) -> None:
        unit = self._basis.unit
        weight = matrices[:, :, : unit.columns]
        sink(DenseBlock(unit.weight, weight.reshape(-1, *parameters[unit.weight]), start))
        if unit.bias is not None:
            sink(DenseBlock(unit.bias, matrices[:, :, -1].reshape(-1, *parameters[unit.bias]), start))

    def _scale(self, block: GradientBlock, parameters: ParameterShapes, sink: BlockSink) -> None:
        if isinstance(block, LookupBlock):
            values = precise(block.values)
            sink(replace(block, values=values * self._inverse.to(values)[block.rows]))
            return
        shape = tuple(parameters[block.name])
        inverse = self._inverse.reshape(shape)
        for samples in sample_slices(block.num_samples, inverse.numel()):
            grads = precise(samples_of(block, samples).dense()).reshape(-1, *shape)
            sink(DenseBlock(block.name, grads * inverse.to(grads), block.start + samples.start))


@final
class PreconditionedProjector(AbstractProjector):
    r"""Multiplies gradients by the inverse of a curvature, then projects them.

    The projection is that of the inner projector, so dot products of these features with features of plain gradients
    estimate :math:`g^\top (H + \lambda I)^{-1} g'`.
    """

    def __init__(self, projector: AbstractProjector, inverse: Inverse) -> None:
        """Wrap a projector.

        Args:
            projector: The projector of the train rows.
            inverse: The inverse curvature of the checkpoint.
        """
        super().__init__(
            projector.grad_dim,
            projector.proj_dim,
            projector.seed,
            projector.proj_type,
            projector.device,
        )
        self._projector, self._inverse = projector, inverse

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator for one batch; see :meth:`AbstractProjector.accumulator`."""
        return self._inverse.accumulator(
            self._projector, num_samples, model_id=model_id, parameters=parameters
        )

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Precondition and project collected gradients, by parameter name.

        Raises:
            InvalidInputError: If the gradients are one tensor, which does not name the parameters.
        """
        if isinstance(grads, Tensor):
            raise InvalidInputError(
                f"The gradients are one tensor of shape {tuple(grads.shape)}, which does not name the parameters, and "
                "every parameter has its own curvature. Pass a mapping from parameter names to gradients."
            )
        return project_named(self, grads, model_id)

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return the layout of the inner projector."""
        return self._projector.layout(parameters)

    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the features, without the curvature, which the caller records."""
        return {**self._projector.fingerprint(), "preconditioned": True}

    def free_memory(self) -> None:
        """Drop cached matrices of the inner projector."""
        self._projector.free_memory()


@final
@dataclass(frozen=True, eq=False)
class _PreconditionedAccumulator(AbstractFeatureAccumulator):
    """Preconditions blocks and adds them to another accumulator."""

    _inner: AbstractFeatureAccumulator
    _joiner: GradientJoiner

    def add(self, block: GradientBlock) -> None:
        self._joiner.add(block)

    def features(self) -> Tensor:
        self._joiner.finish()
        return self._inner.features()
