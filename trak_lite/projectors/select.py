"""The one place that turns a projector's name into a projector."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trak_lite._validate import one_of
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import AbstractProjector
from trak_lite.projectors.dense import GaussianProjector, RademacherProjector
from trak_lite.projectors.identity import NoOpProjector

__all__ = ["PROJECTORS", "projector_name", "select_projector"]


def _identity(proj_dim: int, *, seed: int, device: str | torch.device | None) -> NoOpProjector:
    """Make the identity, which has no size and no seed of its own."""
    return NoOpProjector(device=device)


PROJECTORS: dict[str, Callable[..., AbstractProjector]] = {
    "gaussian": GaussianProjector,
    "none": _identity,
    "rademacher": RademacherProjector,
}
"""Native projectors by name; each is called with ``(proj_dim, seed=..., device=...)``."""


def select_projector(
    projector: str | AbstractProjector,
    *,
    proj_dim: int,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> AbstractProjector:
    """Return the projector that is meant.

    Args:
        projector: ``"auto"``, a name in :data:`PROJECTORS`, or a projector, which is returned as it is.
        proj_dim: K, number of features per sample; not used by ``"none"``.
        seed: Seed of every random entry.
        device: Where the projection runs; ``None`` for where the gradients are.

    Raises:
        InvalidInputError: If the name is unknown or ``projector`` is neither a name nor a projector.

    Example:
        >>> select_projector("auto", proj_dim=512).fingerprint()["kind"]
        'dense_rademacher'
    """
    if isinstance(projector, AbstractProjector):
        return projector
    if not isinstance(projector, str):
        raise InvalidInputError(
            f"projector must be one of {['auto', *PROJECTORS]} or an AbstractProjector, got {projector!r}."
        )
    one_of(["auto", *PROJECTORS], projector=projector)
    return PROJECTORS[projector_name(projector) or ""](proj_dim, seed=seed, device=device)


def projector_name(projector: str | AbstractProjector) -> str | None:
    """Return the name in :data:`PROJECTORS` that a choice comes to; ``None`` for a projector of the user's own."""
    if not isinstance(projector, str):
        return None
    # Signs are several times cheaper to draw than normal numbers, and their inner products vary slightly less.
    return "rademacher" if projector == "auto" else projector
