"""Identification of the sample that each row of a gradient belongs to, from weighted backward passes.

In a backward pass of ``sum_i c_i f(z_i)``, the gradient of sample i's rows is their plain gradient times ``c_i``. The
``c_i`` are powers of two, which scale exactly in floating point, so the ratio of the two gradients identifies the
sample without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trak_lite.core.devices import float64_device
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative deviation from a power of two that counts as rounding (kernels with varying summation order)."""
_BASE, _BASES = 64, {torch.float16: 4}
"""Number of powers of two per digit of a code; fewer for float16 because of its range."""
_NEGLIGIBLE, _MOST_NEGLIGIBLE = 64, 2**-4
"""A row below this multiple of the machine precision times the largest row is rounding noise; the second, the value of
float16, is the most that may be left out, since the precision of bfloat16 is 2**-7."""


def sketch(rows: Tensor) -> Tensor:
    """Return up to four numbers per row, linear in the row: ``(N, d)`` to ``(N, min(d, 4))``.

    In general they are all zero only for a row of zeros.

    Example:
        >>> sketch(torch.eye(3, 50)).shape
        torch.Size([3, 4])
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    width = rows.shape[1]
    if width <= 4:
        return wide
    return wide @ _directions(width, wide.dtype, wide.device)


@lru_cache(maxsize=256)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    steps = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64, device="cpu").sqrt()
    directions = torch.outer(torch.arange(1, width + 1, dtype=torch.float64, device="cpu"), steps).cos()
    return directions.to(dtype).to(device)


def _noise(dtype: torch.dtype) -> float:
    """Return the size, relative to the largest row, up to which a row may be rounding noise."""
    return min(_NEGLIGIBLE * torch.finfo(dtype).eps, _MOST_NEGLIGIBLE)


def _largest_entries(rows: Tensor) -> Tensor:
    """Return the largest absolute value of every row, ``(N,)``."""
    return rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))


@dataclass(frozen=True, slots=True)
class SampleCode:
    """Code of every sample's number in base ``base``; each weighted backward pass determines one digit."""

    count: int
    base: int = _BASE
    """Number of powers of two per digit."""
    _scales: dict[Any, list[Tensor]] = field(default_factory=dict, repr=False, compare=False)
    """Results of :meth:`row_scales`, for one pass."""

    @classmethod
    def for_gradients(cls, count: int, dtypes: Sequence[torch.dtype]) -> SampleCode:
        """Return the code for gradients of these dtypes."""
        return cls(count, min((_BASES.get(dtype, _BASE) for dtype in dtypes), default=_BASE))

    @property
    def num_digits(self) -> int:
        """Number of weighted passes."""
        return math.ceil(math.log(self.count, self.base) - 1e-9)

    def weights(self, like: Tensor) -> list[Tensor]:
        """Return the weights of f for each pass, ``(B,)`` each; an empty list for one sample.

        Example:
            >>> SampleCode(3, base=4).weights(torch.zeros(1))
            [tensor([0.2500, 0.5000, 1.0000])]
        """
        return [torch.exp2(exponents.to(like.dtype)) for exponents in self._exponents(like.device)]

    def row_scales(self, axis: BatchAxis, shape: Sequence[int], like: Tensor) -> list[Tensor]:
        """Return ``1 / c_i`` of the sample of every row for each pass, ``(N, 1)``, if ``axis`` holds the samples.

        The rows are indexed by axes of this ``shape``, of which ``axis`` is one; N is their product.

        Example:
            >>> SampleCode(2).row_scales(BatchAxis(0, 2), (4,), torch.zeros(1))[0].log2().T
            tensor([[32., 32., 31., 31.]])
        """
        key = axis, tuple(shape), like.dtype, like.device
        if key in self._scales:
            return self._scales[key]
        scales = self._scales[key] = []
        for exponents in self._exponents(like.device):
            along = exponents.repeat_interleave(axis.multiple)
            if not axis.sample_major:
                along = exponents.repeat(axis.multiple)
            view = (-1, *(1,) * (len(shape) - 1 - axis.axis))
            scales.append(torch.exp2(-along.to(like.dtype)).view(view).expand(*shape).reshape(-1, 1))
        return scales

    def _exponents(self, device: torch.device) -> list[Tensor]:
        """Return the base-two logarithms of the weights, ``(B,)`` for each pass."""
        numbers = torch.arange(self.count, device=device)
        return [numbers // self.base**i % self.base - self.base // 2 for i in range(self.num_digits)]

    def owners(self, plain: Tensor, tagged: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
        """Return the sample of every row ``(N,)``, -1 for a row of zeros; ``None`` if a row has several samples.

        ``plain`` are gradients of this dtype or sketches of them, ``(N, s)``; ``tagged`` those of each weighted pass.
        """
        wide = float64_device(plain.device)
        if wide != plain.device:
            samples = self.owners(plain.to(wide), [values.to(wide) for values in tagged], dtype)
            return None if samples is None else samples.to(plain.device)
        if self._cancelled(plain, tagged, dtype):
            return None
        sizes = _largest_entries(plain)
        samples = torch.full((len(plain),), -1, dtype=torch.long, device=plain.device)
        rows = sizes.nonzero().squeeze(1)
        if not len(rows):
            return samples
        sizes = sizes[rows].double().unsqueeze(1)
        unit = plain[rows].double() / sizes
        owner, fits = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
        tolerance = _TOLERANCES.get(dtype, 0.05)
        for position, values in enumerate(tagged):
            scaled = values[rows].double() / sizes
            ratio = (unit * scaled).sum(1) / unit.square().sum(1)
            exponent = ratio.clamp(min=2.0**-64).log2().round()
            power = exponent.exp2().unsqueeze(1)
            fits &= ((scaled - power * unit).abs() <= tolerance * power).all(1)
            digit = exponent.long() + self.base // 2
            fits &= (digit >= 0) & (digit < self.base)
            owner += digit * self.base**position
        fits &= owner < self.count
        noise = sizes.squeeze(1) <= _noise(dtype) * sizes.max()
        if not bool((fits | noise).all()):
            return None
        samples[rows] = torch.where(fits, owner, -1)
        return samples

    def exact_owners(self, plain: Tensor, tagged: Sequence[Tensor]) -> Tensor | None:
        """Return :meth:`owners` if every weighted row equals the plain one times a power of two, without rounding.

        This is the usual case, and a fifth of the work; ``None`` in all others, such as values that are not finite.
        """
        if not plain.shape[1]:
            return None
        owner, fits = torch.zeros_like(plain[:, 0]), None
        for position, values in enumerate(tagged):
            exponent = (values[:, 0] / plain[:, 0]).log2().round()  # NaN for a row of zeros
            power = exponent.exp2().nan_to_num(0.0, 0.0, 0.0)
            digit = exponent + self.base // 2
            same = (values == plain * power.unsqueeze(1)).all() & ~((digit < 0) | (digit >= self.base)).any()
            fits = same if fits is None else fits & same
            owner = owner + digit * self.base**position
        if fits is None or not bool(fits & ~(owner >= self.count).any()):
            return None
        return owner.nan_to_num(-1.0).long()

    def _cancelled(self, plain: Tensor, tagged: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether a row with zero plain gradient has a nonzero weighted one: several samples cancel in it."""
        sizes = _largest_entries(plain)
        if not len(sizes):
            return False
        noise = _noise(dtype) * 2.0 ** -(self.base // 2) * float(sizes.max())
        empty = sizes == 0
        return any(bool((empty & (_largest_entries(values) > noise)).any()) for values in tagged)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows grouped by sample, padded to equal numbers: ``(K * length, ...)`` for the K samples with rows."""

    samples: Tensor
    """The samples, ``(K,)``, ascending."""
    rows: Tensor
    """Row at each position, ``(K * length,)``; a sample with fewer rows is padded with its first row."""
    real: Tensor | None
    """``(K * length,)``, False for padding; ``None`` if there is none."""
    length: int

    @classmethod
    def of(cls, owners: Tensor) -> Arrangement:
        """Group rows by their samples ``(N,)``; rows with -1 are left out.

        Example:
            >>> Arrangement.of(torch.tensor([2, 0, -1, 2])).rows
            tensor([1, 1, 0, 3])
        """
        device = owners.device
        omitted, *numbers = torch.bincount(owners + 1, minlength=1).tolist()
        groups = [(sample, number) for sample, number in enumerate(numbers) if number]
        samples = torch.tensor([sample for sample, _ in groups], dtype=torch.long, device=device)
        order = owners.argsort(stable=True)[omitted:]
        length = max((number for _, number in groups), default=0)
        if length * len(groups) == len(order):  # equal numbers
            return cls(samples, order, None, length)
        counts = torch.tensor([number for _, number in groups], device=device)
        steps = torch.arange(length, device=device)
        first = (counts.cumsum(0) - counts).unsqueeze(1)
        real = steps < counts.unsqueeze(1)
        return cls(samples, order[torch.where(real, first + steps, first).flatten()], real.flatten(), length)

    def take(self, rows: Tensor) -> Tensor:
        """Return ``(N, ...)`` as ``(K * length, ...)``."""
        return rows.index_select(0, self.rows)

    def take_gradients(self, rows: Tensor) -> Tensor:
        """Return gradients ``(N, ...)`` as ``(K * length, ...)``, with zeros for padding."""
        taken = self.take(rows)
        if self.real is None:
            return taken
        return taken.masked_fill(~self.real.view(-1, *(1,) * (taken.dim() - 1)), 0.0)

    def placed(self, parts: Tensor, count: int) -> Tensor:
        """Return values of the K samples, ``(K, ...)``, as ``(B, ...)`` with zeros for the others."""
        if len(self.samples) == count:
            return parts
        return parts.new_zeros(count, *parts.shape[1:]).index_copy_(0, self.samples, parts)
