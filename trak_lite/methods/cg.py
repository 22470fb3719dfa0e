"""CG: influence functions with the exact Gauss-Newton matrix, solved by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

from trak_lite._validate import positive_int, real_at_least
from trak_lite.errors import InvalidInputError
from trak_lite.methods.ekfac import EKFAC, AbstractInverseMethod

__all__ = ["CG"]


@dataclass(frozen=True, kw_only=True)
class CG(AbstractInverseMethod):
    r"""Influence functions with the Gauss-Newton matrix of the training loss, without approximating its structure.

    Solves :math:`(H + \Lambda) x = g` for the gradient g of every target by conjugate gradients. H is
    :math:`\sum_i J_i^\top \nabla^2_{out} L_i J_i` over the train rows i, with the Jacobian J of all model outputs and
    the Hessian of the loss in these outputs. Its products with vectors are exact and need no matrix: one forward-mode
    and one reverse-mode pass over the train rows per iteration and target. The inverse of :class:`EKFAC`, which is
    fitted first, is the preconditioner. The iterations and the residual of every target are in
    ``scores.convergence`` (of ``stream_scores`` and ``refine``) and in the log; a warning names what did not converge.

    :math:`\Lambda` is diagonal, with one number per layer as in EKFAC, unless ``absolute`` is set.
    Source: Martens (arXiv:1412.1193), section 8, for the products and the preconditioned solver.
    """

    damping: float = 1.0
    """Lambda, above 0. In units of the mean eigenvalue of a layer's curvature, as in :class:`EKFAC`; with ``absolute``,
    in units of the summed training loss."""
    absolute: bool = False
    """Whether the damping is the same number for all layers. If training minimised the mean loss with weight decay c
    (:math:`c \\lVert\\theta\\rVert^2 / 2`), it is N c."""
    max_iterations: int = 50
    """Largest number of iterations per target."""
    tolerance: float = 1e-2
    """The iteration of a target ends when the norm of its residual is at most this share of the norm of g."""
    max_rows: int | None = None
    """Number of evenly spaced train rows that H is computed from, scaled to all; ``None`` uses all."""
    draws: int | None = None
    """``None`` computes the products exactly. A number D estimates H by the gradients for D labels per row that are
    drawn from the model: an iteration is then D passes of per-sample gradients for all targets together, whatever their
    number. Use it for language models, where exact products take minutes per target."""
    seed: int = 0
    """Seed of all drawn labels."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        object.__setattr__(self, "damping", above_zero(damping=self.damping))
        object.__setattr__(self, "tolerance", above_zero(tolerance=self.tolerance))
        positive_int(max_iterations=self.max_iterations)
        if self.max_rows is not None:
            positive_int(max_rows=self.max_rows)
        if self.draws is not None:
            positive_int(draws=self.draws)

    @property
    def ekfac(self) -> EKFAC:
        """The EK-FAC of the preconditioner."""
        return EKFAC(seed=self.seed, fisher="auto" if self.draws is None else "sampled")


def above_zero(**named: object) -> float:
    """Return the number; raise if it is not finite and above 0."""
    (name, value), *_ = named.items()
    number = real_at_least(0.0, **{name: value})
    if number == 0.0:
        raise InvalidInputError(f"{name} must be above 0, got {value!r}.")
    return number
