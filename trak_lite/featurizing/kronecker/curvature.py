r"""A fitted curvature: an eigenbasis per unit, and the curvature in this basis; products with its inverse.

The curvature of a unit is approximated by
:math:`(Q_S \otimes Q_A)\,\mathrm{diag}(\Lambda)\,(Q_S \otimes Q_A)^\top`, and the curvature between units by zero
(George et al., arXiv:1806.03884). For a unit's gradient as a matrix G, :math:`(H + \lambda I)^{-1} g` is
:math:`Q_S \left[(Q_S^\top G Q_A) \oslash (\Lambda + \lambda)\right] Q_A^\top` (arXiv:2308.03296, equation 20).

Shapes: b samples, T positions, a unit's matrix ``(rows, width)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import eigh_of_positive, full_float32, precise, wide_dtype
from trak_lite.errors import InvalidInputError, NonFiniteError, StateError
from trak_lite.featurizing.kronecker.units import GradientJoiner, Unit, UnitGradient, sample_slices
from trak_lite.projectors import AbstractProjector
from trak_lite.projectors._base import Accumulator
from trak_lite.types import (
    BlockSink,
    DenseBlock,
    FactoredBlock,
    FeatureLayout,
    GradientBlock,
    ParameterShapes,
)


def decomposed(factor: Tensor, *, what: str) -> tuple[Tensor, Tensor | None]:
    """Return the eigenvalues and eigenvectors of a factor ``(d, d)``; of a diagonal one ``(d,)`` itself and ``None``.

    Values ``(d,)`` are at least 0, vectors ``(d, d)`` are columns, both in the dtype and on the device of the factor.
    ``what`` is its name in the error if an entry is not finite.
    """
    if not bool(factor.isfinite().all()):
        raise NonFiniteError(
            f"The sums of {what} hold NaN or infinity. Look for a sample whose gradient is not finite; gradients in "
            "float16 overflow easily."
        )
    if factor.dim() == 1:
        return factor, None
    values, vectors = eigh_of_positive((factor + factor.T) / 2)
    return values.clamp(min=0), vectors


@final
@dataclass(frozen=True, slots=True, eq=False)
class Eigenbasis:
    """Coordinates in which the curvature of a unit is approximated by a diagonal."""

    unit: Unit
    outputs: Tensor | None
    """``(rows, rows)`` eigenvectors as columns; ``None`` does not rotate this side."""
    inputs: Tensor | None
    """``(width, width)`` in the same form."""

    def rotated(self, gradient: UnitGradient) -> Iterator[tuple[slice, Tensor]]:
        """Yield samples and their gradients ``(b, rows, width)`` in this basis, a few samples at a time.

        The gradients are new tensors if a side is rotated.
        """
        block = gradient.block
        rows, width = self.unit.rows, self.unit.width
        cost_of_matrices = rows * width * (rows + width)
        for samples in sample_slices(block.num_samples, rows * width):
            if (
                isinstance(block, FactoredBlock)
                and block.inputs.shape[1] * (rows**2 + width**2) <= cost_of_matrices
            ):
                x, g = self.factors(block, samples)
                yield samples, g.transpose(1, 2) @ x
                continue
            matrices = gradient.matrices(samples)
            if self.outputs is not None:
                matrices = self.outputs.to(matrices).T @ matrices
            yield samples, matrices if self.inputs is None else matrices @ self.inputs.to(matrices)

    def factors(self, block: FactoredBlock, samples: slice) -> tuple[Tensor, Tensor]:
        """Return the factors ``(b, T, width)`` and ``(b, T, rows)`` of a weight and its bias in this basis.

        Of a side that is not rotated they may be tensors of the block: do not write to them.
        """
        x, g = precise(block.inputs[samples]), precise(block.output_grads[samples])
        if self.outputs is not None:
            g = g @ self.outputs.to(g)
        if self.inputs is None:
            ones = x.new_ones(*x.shape[:2], self.unit.width - self.unit.columns)
            return torch.cat([x, ones], 2), g
        vectors = self.inputs.to(x)
        turned = x @ vectors[: self.unit.columns]
        return (turned if self.unit.bias is None else turned.add_(vectors[-1])), g

    def back(self, matrices: Tensor) -> Tensor:
        """Transform matrices ``(b, rows, width)`` from this basis to parameter coordinates."""
        if self.outputs is not None:
            matrices = self.outputs.to(matrices) @ matrices
        return matrices if self.inputs is None else matrices @ self.inputs.to(matrices).T

    @torch.no_grad()
    def add_squares(self, gradient: UnitGradient, total: Tensor) -> None:
        """Add the squares of some samples' gradients in this basis to ``total``, ``(rows, width)``."""
        block = gradient.block
        if isinstance(block, FactoredBlock) and block.inputs.shape[1] == 1:
            # The square of an outer product is the outer product of the squares: no gradient is formed.
            x, g = self.factors(block, slice(None))
            total += g.squeeze(1).square().T @ x.squeeze(1).square()
            return
        for _, turned in self.rotated(gradient):
            total += turned.square_().sum(0)


Treatment: TypeAlias = Literal["kronecker", "one side", "diagonal"]
"""The basis of a curvature: eigenbases of both factors, of the shorter side only, or parameter coordinates."""


class ArrayKeeper(Protocol):
    """A mapping that stores the arrays of a fit, such as a ``dict``."""

    def get(self, name: str, /) -> NDArray[Any] | None:
        """Return an array, or ``None`` if it is not stored."""

    def __setitem__(self, name: str, array: NDArray[Any], /) -> None:
        """Store an array."""


@final
@dataclass(frozen=True, slots=True)
class UnitCurvature:
    """The curvature of one unit."""

    basis: Eigenbasis
    values: Tensor
    """Lambda ``(rows, width)``, a sum over the train rows."""

    @property
    def treatment(self) -> Treatment:
        """How the curvature is approximated."""
        sides = sum(side is not None for side in (self.basis.outputs, self.basis.inputs))
        return ("diagonal", "one side", "kronecker")[sides]

    @property
    def mean(self) -> Tensor:
        """Mean of Lambda, a scalar; 0 if it is beneath the smallest normal number, because 1 / Lambda overflows."""
        mean = self.values.mean(dtype=wide_dtype(self.values.device)).to(self.values)
        return torch.where(mean >= self._smallest, mean, 0.0)

    @property
    def _smallest(self) -> float:
        # Of float64, the square of a smallest gradient: solutions are cast to float32.
        return max(torch.finfo(self.values.dtype).tiny, torch.finfo(torch.float32).tiny ** 2)

    def damping_of(self, damping: float, *, absolute: bool = False) -> Tensor:
        """Return lambda as a scalar: ``damping * mean``, or ``damping`` itself if ``absolute``."""
        return self.values.new_tensor(damping) if absolute else damping * self.mean

    def inverse(self, damping: float, *, absolute: bool = False, share: float | None = None) -> Tensor:
        """Return ``1 / (Lambda + lambda)``, ``(rows, width)``; lambda is :meth:`damping_of`.

        The result is 0 where no train row has curvature, because no train row has a gradient there. With ``share``, it
        is the square root of ``1 / (share Lambda + lambda)``.
        """
        damped = self.values * (share or 1) + self.damping_of(damping, absolute=absolute)
        counts = (damped >= self._smallest) & (self.mean > 0 if not absolute else True)
        return torch.where(counts, damped.reciprocal() if share is None else damped.rsqrt(), 0.0)


@final
@dataclass(frozen=True, slots=True)
class KroneckerCurvature:
    """The curvatures of all kept parameters."""

    units: Sequence[UnitCurvature]

    @classmethod
    def of(cls, arrays: Iterable[UnitArrays], device: torch.device) -> Self:
        """Return the curvature from the arrays of all units; raises if one is missing."""
        return cls([curvature for unit in arrays for curvature in unit.curvatures(device)])

    def treatments(self) -> dict[str, Treatment]:
        """Return, for every parameter, how its curvature is approximated."""
        return {name: unit.treatment for unit in self.units for name in unit.basis.unit.names}


@final
@dataclass(frozen=True, slots=True)
class UnitArrays:
    """The arrays of one unit in a keeper, under separate names."""

    keeper: ArrayKeeper
    number: int
    unit: Unit
    """A unit from :func:`find_units`; its bias may become a separate unit in the first pass."""

    def has_basis(self) -> bool:
        """Whether the first pass is done for this unit: a repair, or a fit of another seed, may have taken a part."""
        return all(self._get(name) is not None for name in ("values", "joint", "bias", "outputs", "inputs"))

    def is_complete(self) -> bool:
        """Whether the second pass is done, too: until then the eigenvalues that it computes are an empty array."""
        return self.has_basis() and len(self._tensor("values", torch.device("cpu"))) > 0

    def put(self, **tensors: Tensor | None) -> None:
        """Store arrays by name, in order; ``None`` is an empty one.

        ``outputs`` and ``inputs`` are the eigenvectors, ``joint`` is whether they include the bias, ``bias`` the
        curvature of a bias that they exclude, and ``values`` the eigenvalues.
        """
        for name, tensor in tensors.items():
            array = np.empty((0, 0), np.float32) if tensor is None else tensor.cpu().numpy()
            self.keeper[f"unit-{self.number}-{name}"] = array

    def basis(self, device: torch.device) -> Eigenbasis:
        """Return the eigenbasis of the weight, or of weight and bias."""
        unit = self.unit if float(self._tensor("joint", device)) else self.unit.apart()[0]
        outputs, inputs = (self._tensor(name, device) for name in ("outputs", "inputs"))
        return Eigenbasis(unit, outputs if outputs.numel() else None, inputs if inputs.numel() else None)

    def curvatures(self, device: torch.device) -> list[UnitCurvature]:
        """Return the curvature of the unit, or of the weight and of the bias."""
        basis = self.basis(device)
        curvatures = [UnitCurvature(basis, self._tensor("values", device))]
        if self.unit.bias is not None and basis.unit.bias is None:
            alone = Eigenbasis(self.unit.apart()[1], None, None)
            curvatures.append(UnitCurvature(alone, self._tensor("bias", device)))
        return curvatures

    def _get(self, name: str) -> NDArray[Any] | None:
        return self.keeper.get(f"unit-{self.number}-{name}")

    def _tensor(self, name: str, device: torch.device) -> Tensor:
        array = self._get(name)
        if array is None:
            raise StateError(
                f"The array {name!r} of the curvature of {self.unit.weight!r} is missing: the fit was not made, or was "
                "interrupted. Fit the curvature on the train rows first."
            )
        return torch.from_numpy(np.array(array)).to(device)


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
            unit.basis.unit: (unit, unit.inverse(damping, absolute=absolute, share=share))
            for unit in curvature.units
        }
        self.lambdas = {
            name: float(unit.damping_of(damping, absolute=absolute))
            for unit in curvature.units
            for name in unit.basis.unit.names
        }
        """Lambda of every parameter by name; 0 where no train row has curvature."""

    def accumulator(
        self, projector: AbstractProjector, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> Accumulator:
        """Return a new accumulator of features of gradients times the inverse; raises if it lacks a parameter."""
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
        curvature, inverse = self._inverses[gradient.unit]
        if curvature.treatment == "diagonal":
            _scale(gradient.block, inverse, tuple(parameters[gradient.block.name]), sink)
            return
        unit = gradient.unit
        # TF32 would put a part of the large directions into small ones, which the inverse amplifies.
        with full_float32(inverse.device):
            for samples, turned in curvature.basis.rotated(gradient):
                matrices = curvature.basis.back(turned.mul_(inverse.to(turned)))
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

    def __init__(self, projector: AbstractProjector, accumulator: Callable[..., Accumulator]) -> None:
        """Take what returns accumulators of features of gradients times an inverse, for the projector."""
        super().__init__(
            projector.grad_dim, projector.proj_dim, projector.seed, projector.proj_type, projector.device
        )
        self._projector, self._accumulator = projector, accumulator

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch; see :meth:`AbstractProjector.accumulator`."""
        return self._accumulator(self._projector, num_samples, model_id=model_id, parameters=parameters)

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return the layout of the inner projector."""
        return self._projector.layout(parameters)
