"""LiSSA: influence functions with the exact Gauss-Newton matrix, inverted by a stochastic Neumann series."""

from __future__ import annotations

from dataclasses import dataclass

from trak_lite._validate import positive_int
from trak_lite.methods.cg import above_zero
from trak_lite.methods.ekfac import EKFAC, AbstractInverseMethod

__all__ = ["LiSSA"]


@dataclass(frozen=True, kw_only=True)
class LiSSA(AbstractInverseMethod):
    r"""Influence functions with the Gauss-Newton matrix of the training loss, by a stochastic Neumann series.

    Iterates :math:`x \leftarrow x + (g - (H_t + \Lambda) x) / s` with H and :math:`\Lambda` as in :class:`CG`, where
    :math:`H_t` is an unbiased estimate of H from ``rows`` train rows drawn in step t, and averages over ``repeats``.
    :class:`CG` needs fewer passes over the train rows where its products are affordable.
    Source: Agarwal et al. (arXiv:1602.03943), section 3; Koh and Liang (arXiv:1703.04730), section 3, for influence.
    """

    damping: float = 1.0
    """Lambda, above 0; as in :class:`CG`."""
    absolute: bool = False
    """As in :class:`CG`."""
    depth: int = 200
    """Number of steps."""
    rows: int = 64
    """Train rows drawn per step, without replacement; all rows if there are fewer."""
    repeats: int = 1
    """Number of independent runs that are averaged."""
    scale: float | None = None
    """s, above half of the largest eigenvalue of H + Lambda, or the series diverges. ``None`` uses 1.5 times an
    estimate of the largest eigenvalue by 10 power iterations over all train rows."""
    draws: int | None = None
    """As in :class:`CG`."""
    seed: int = 0
    """Seed of the drawn rows and of all drawn labels."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        object.__setattr__(self, "damping", above_zero(damping=self.damping))
        for name in ("depth", "rows", "repeats"):
            positive_int(**{name: getattr(self, name)})
        if self.draws is not None:
            positive_int(draws=self.draws)
        if self.scale is not None:
            object.__setattr__(self, "scale", above_zero(scale=self.scale))

    @property
    def ekfac(self) -> EKFAC:
        """The EK-FAC whose mean eigenvalues are the units of the damping."""
        return EKFAC(seed=self.seed, fisher="auto" if self.draws is None else "sampled")
