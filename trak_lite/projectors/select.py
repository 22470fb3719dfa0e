"""Projector selection by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from trak_lite.core.validate import one_of
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import AbstractProjector
from trak_lite.projectors.dense.projectors import FastJLProjector, GaussianProjector, RademacherProjector
from trak_lite.projectors.mask import GraSSProjector, MaskProjector
from trak_lite.projectors.per_module import NoOpProjector, PerModuleProjector
from trak_lite.projectors.sketch.countsketch import CountSketchProjector
from trak_lite.projectors.two_sided.projector import TwoSidedProjector

PROJECTORS: dict[str, Callable[..., AbstractProjector]] = {
    "countsketch": CountSketchProjector,
    "fast_jl": FastJLProjector,
    "gaussian": GaussianProjector,
    "grass": GraSSProjector,
    "mask": MaskProjector,
    "none": lambda proj_dim, *, seed, device: NoOpProjector(device=device),
    "rademacher": RademacherProjector,
    "two_sided": TwoSidedProjector.of_width,
}
"""Projectors by name. Each is called with ``(proj_dim, seed=...)``, and with ``device=...`` if it takes one."""


def select_projector(
    projector: str | AbstractProjector,
    *,
    proj_dim: int,
    seed: int = 0,
    device: str | torch.device | None = None,
    layout: str = "auto",
) -> AbstractProjector:
    """Return a projector by name, or the given projector.

    Args:
        projector: ``"auto"``, a name in :data:`PROJECTORS`, or a projector, which is returned unchanged.
        proj_dim: K, number of features per sample; not used by ``"none"``.
        seed: Seed of every random entry.
        device: Device of the projection; ``None`` for the gradients' device.
        layout: ``"joint"`` for one segment of K features, ``"module"`` for one segment per module
            (``"two_sided"``: per matrix). ``"auto"`` is ``"module"`` for ``"two_sided"``, else ``"joint"``; it is the
            only choice if ``projector`` is an object.

    Raises:
        InvalidInputError: If a name is unknown, ``projector`` is neither a name nor a projector, or a projector is
            given with a layout.

    Example:
        >>> select_projector("auto", proj_dim=512).fingerprint()["kind"]
        'countsketch'
    """
    one_of(("auto", "joint", "module"), layout=layout)
    if isinstance(projector, AbstractProjector):
        if layout != "auto":
            raise InvalidInputError(
                f"layout={layout!r} was given with a projector, which has its own layout. Leave it out, or pass "
                "PerModuleProjector(projector)."
            )
        return projector
    if not isinstance(projector, str):
        raise InvalidInputError(
            f"projector must be one of {['auto', *PROJECTORS]} or an AbstractProjector, got {projector!r}."
        )
    one_of(["auto", *PROJECTORS], projector=projector)
    name = projector_name(projector) or ""
    if name == "two_sided":
        kind = "module" if layout == "auto" else layout
        return TwoSidedProjector.of_width(proj_dim, seed=seed, device=device, layout=kind)
    make = PROJECTORS[name]
    taken = inspect.signature(make).parameters.values()
    takes_device = any(one.name == "device" or one.kind is one.VAR_KEYWORD for one in taken)
    made = make(proj_dim, seed=seed, **({"device": device} if takes_device else {}))
    return PerModuleProjector(made) if layout == "module" else made


def projector_name(projector: str | AbstractProjector) -> str | None:
    """Return the name in :data:`PROJECTORS` that a choice resolves to; ``None`` for a projector object."""
    if not isinstance(projector, str):
        return None
    # A dense sign matrix has the same variance of inner products at 2K operations per entry instead of one.
    return "countsketch" if projector == "auto" else projector
