r"""A fitted curvature: an eigenbasis per unit, and the curvature in this basis.

The curvature of a unit is approximated by
:math:`(Q_S \otimes Q_A)\,\mathrm{diag}(\Lambda)\,(Q_S \otimes Q_A)^\top`, and the curvature between units by zero
(George et al., arXiv:1806.03884).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite._devices import wide_dtype
from trak_lite.errors import StateError
from trak_lite.featurizing.kronecker.bases import Eigenbasis
from trak_lite.featurizing.kronecker.units import Unit

__all__ = ["ArrayKeeper", "KroneckerCurvature", "Treatment", "UnitArrays", "UnitCurvature"]


class ArrayKeeper(Protocol):
    """A mapping that stores the arrays of a fit, such as a ``dict``."""

    def get(self, name: str, /) -> NDArray[Any] | None:
        """Return an array, or ``None`` if it is not stored."""

    def __setitem__(self, name: str, array: NDArray[Any], /) -> None:
        """Store an array."""


class Treatment(NamedTuple):
    """How the curvature of one parameter is approximated."""

    name: str
    how: Literal["kronecker", "one side", "diagonal"]
    """The basis: eigenbases of both factors, of the shorter side only, or parameter coordinates."""
    unit: str
    """Name of the weight that it shares a matrix with; its own name if it shares none."""


@final
@dataclass(frozen=True, slots=True)
class UnitCurvature:
    """The curvature of one unit."""

    basis: Eigenbasis
    values: Tensor
    """Lambda ``(rows, width)``, a sum over the train rows."""

    @property
    def treatment(self) -> Literal["kronecker", "one side", "diagonal"]:
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

    def inverse(self, damping: float, *, absolute: bool = False) -> Tensor:
        """Return ``1 / (Lambda + lambda)``, ``(rows, width)``; lambda is :meth:`damping_of`.

        The result is 0 where no train row has curvature, because no train row has a gradient there.
        """
        damped = self.values + self.damping_of(damping, absolute=absolute)
        counts = (damped >= self._smallest) & (self.mean > 0 if not absolute else True)
        return torch.where(counts, damped.reciprocal(), 0.0)


@final
@dataclass(frozen=True, slots=True)
class KroneckerCurvature:
    """The curvatures of all kept parameters."""

    units: Sequence[UnitCurvature]

    @classmethod
    def of(cls, arrays: Iterable[UnitArrays], device: torch.device) -> Self:
        """Return the curvature from the arrays of all units.

        Raises:
            StateError: If an array is missing.
        """
        return cls([found for unit in arrays for found in unit.curvatures(device)])

    def treatments(self) -> list[Treatment]:
        """Return, for every parameter, how its curvature is approximated."""
        return [
            Treatment(name, found.treatment, found.basis.unit.weight)
            for found in self.units
            for name in found.basis.unit.names
        ]


@final
@dataclass(frozen=True, slots=True)
class UnitArrays:
    """The arrays of one unit in a keeper, under separate names."""

    keeper: ArrayKeeper
    number: int
    unit: Unit
    """A unit from :func:`find_units`; its bias may become a separate unit in the first pass."""

    def has_basis(self) -> bool:
        """Whether the first pass is done for this unit."""
        return self._get("inputs") is not None

    def is_complete(self) -> bool:
        """Whether all arrays of the unit are stored."""
        return self.has_basis() and self._get("values") is not None

    def put_basis(
        self, outputs: Tensor | None, inputs: Tensor | None, *, bias_values: Tensor | None, joint: bool
    ) -> None:
        """Store the eigenvectors, whether they include the bias, and the curvature of a bias that they exclude."""
        self._put("joint", torch.tensor(float(joint), device="cpu"))
        for name, found in (("bias", bias_values), ("outputs", outputs), ("inputs", inputs)):
            self._put(name, torch.empty(0, 0, device="cpu") if found is None else found)

    def put_values(self, values: Tensor) -> None:
        """Store the eigenvalues, the last array of a unit."""
        self._put("values", values)

    def basis(self, device: torch.device) -> Eigenbasis:
        """Return the eigenbasis of the weight, or of weight and bias."""
        unit = self.unit if float(self._tensor("joint", device)) else self.unit.apart()[0]
        outputs, inputs = (self._tensor(name, device) for name in ("outputs", "inputs"))
        return Eigenbasis(unit, outputs if outputs.numel() else None, inputs if inputs.numel() else None)

    def curvatures(self, device: torch.device) -> list[UnitCurvature]:
        """Return the curvature of the unit, or of the weight and of the bias.

        Raises:
            StateError: If an array is missing.
        """
        basis = self.basis(device)
        found = [UnitCurvature(basis, self._tensor("values", device))]
        if self.unit.bias is not None and basis.unit.bias is None:
            alone = Eigenbasis(self.unit.apart()[1], None, None)
            found.append(UnitCurvature(alone, self._tensor("bias", device)))
        return found

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

    def _put(self, name: str, tensor: Tensor) -> None:
        self.keeper[f"unit-{self.number}-{name}"] = tensor.cpu().numpy()
