"""Normalisation of per-sample gradients: to unit norm, to a largest norm, or by the state of Adam.

Source of clipping: Abadi et al., "Deep Learning with Differential Privacy" (arXiv:1607.00133), section 3. Source of
Adam updates as rows: Xia et al., "LESS" (arXiv:2402.04333), section 4.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import in_float64
from trak_lite.core.validate import one_of
from trak_lite.errors import InvalidInputError

NormalizationKind: TypeAlias = Literal["none", "unit", "clip", "adam", "adam_update"]
_KINDS: Final = get_args(NormalizationKind)


@dataclass(frozen=True, slots=True)
class Normalization:
    """Settings for the normalisation of every sample's gradient."""

    kind: NormalizationKind = "none"
    r"""``unit`` divides a gradient by its norm; ``clip`` scales gradients above the threshold to that norm.

    ``adam`` multiplies every entry by :math:`(\sqrt{\hat v} + \epsilon)^{-1/2}`, with Adam's second moment v: products
    of rows are then those in the metric of Adam's updates. ``adam_update`` replaces the gradient of a train row by the
    change of the weights, per learning rate, in an Adam step on the row's loss; targets keep their gradients."""
    threshold: float | None = None
    """C, the largest norm after ``clip``; in units of f per unit of the parameters."""
    scope: Literal["global", "module"] = "global"
    """``global``: the norm of the whole gradient; ``module``: per module, the norm over the parameters it owns."""

    def __post_init__(self) -> None:
        """Validate the settings.

        Raises:
            InvalidInputError: If a value is not allowed, ``clip`` has no positive threshold, or another kind has one.
        """
        one_of(_KINDS, kind=self.kind)
        one_of(("global", "module"), scope=self.scope)
        if self.reads_optimizer and self.scope != "global":
            raise InvalidInputError(
                f"scope={self.scope!r} was given with kind={self.kind!r}, which scales entry by entry. Leave it out."
            )
        if self.kind != "clip":
            if self.threshold is not None:
                raise InvalidInputError(
                    f"threshold={self.threshold!r} was given with kind={self.kind!r}, which has no threshold. Leave it "
                    "out, or pass kind='clip'."
                )
            return
        threshold = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            raise InvalidInputError(
                f"kind='clip' needs a threshold, got {threshold!r}. Expected a positive number; "
                "clipping_threshold(norms) finds one."
            )
        if not (math.isfinite(threshold) and threshold > 0):
            raise InvalidInputError(f"threshold must be a finite number above 0, got {threshold!r}.")

    @property
    def reads_optimizer(self) -> bool:
        """Whether it depends on the optimizer state of a checkpoint."""
        return self.kind in ("adam", "adam_update")

    def of_targets(self) -> Normalization:
        """Return the normalisation of the gradients of targets."""
        return Normalization() if self.kind == "adam_update" else self

    def group(self, name: str) -> str:
        """Return the key of the parameters that share a norm: the module's name, or ``""`` for all.

        Example:
            >>> Normalization("unit", scope="module").group("layers.0.weight")
            'layers.0'
        """
        return "" if self.scope == "global" else name.rpartition(".")[0]

    def factors(self, squared_norms: Tensor) -> Tensor:
        """Return the factor by which each sample's gradient, or its part in a module, is multiplied, ``(B,)``.

        For kinds that are no single factor per sample, it is 1.

        If a squared norm is zero, ``unit`` returns the factor 0. If a squared norm is not finite, the factor is NaN, so
        that the row is not mistaken for a finite one.

        Args:
            squared_norms: Squared norms over the parameters that share a norm, ``(B,)``.

        Example:
            >>> Normalization("clip", 2.0).factors(torch.tensor([16.0, 1.0, 0.0]))
            tensor([0.5000, 1.0000, 1.0000])
        """
        if self.kind not in ("unit", "clip"):
            return torch.ones_like(squared_norms)
        norms = squared_norms.sqrt()
        ratio = (1.0 if self.threshold is None else self.threshold) / norms
        # C / 0 is infinite; the clamp makes it 1, as for every gradient below C, which keeps its exact bits.
        factors = ratio.clamp(max=1) if self.kind == "clip" else torch.where(norms > 0, ratio, 0)
        return torch.where(squared_norms.isfinite(), factors, torch.nan)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values; they are valid keyword arguments of the constructor."""
        threshold = {} if self.threshold is None else {"threshold": float(self.threshold)}
        return {"kind": self.kind, "scope": self.scope, **threshold}

    def fingerprint(self) -> dict[str, Any]:
        """Return the manifest entry; empty for ``kind="none"``."""
        return {} if self.kind == "none" else {"normalization": self.to_json()}


def clip(threshold: float, *, scope: Literal["global", "module"] = "global") -> Normalization:
    """Return the setting that clips gradients to a norm of at most ``threshold``.

    Args:
        threshold: C, above 0; :func:`clipping_threshold` computes one from norms.
        scope: ``global`` clips the whole gradient, ``module`` each module's part.

    Raises:
        InvalidInputError: If the threshold is not a finite number above 0, or the scope is unknown.
    """
    return Normalization("clip", threshold, scope)


def as_normalization(choice: str | Normalization) -> Normalization:
    """Convert a user's ``normalize=...`` to a :class:`Normalization`.

    Raises:
        InvalidInputError: If it is neither a known name nor a :class:`Normalization`.
    """
    if isinstance(choice, Normalization):
        return choice
    if not isinstance(choice, str) or choice not in _KINDS or choice == "clip":
        raise InvalidInputError(
            "normalize must be 'none', 'unit', clip(C) with the largest norm C to keep, 'adam', 'adam_update', or a "
            f"Normalization; got {choice!r}."
        )
    return Normalization(choice)  # type: ignore[arg-type]  # one of the kinds


def clipping_threshold(norms: Tensor | NDArray[np.floating], *, quantile: float = 0.9) -> float:
    """Return the threshold C that leaves a given share of the gradients unclipped.

    Source: Andrew et al., "Differentially Private Learning with Adaptive Clipping" (arXiv:1905.03871).

    Args:
        norms: Gradient norms in any shape, from :meth:`trak_lite.Attributor.gradient_norms`.
        quantile: The share, above 0 and at most 1.

    Raises:
        InvalidInputError: If there are no finite norms, the share is out of range, or C would be zero.

    Example:
        >>> clipping_threshold(torch.tensor([1.0, 2.0, 3.0]), quantile=0.5)
        2.0
    """
    if not 0 < quantile <= 1:
        raise InvalidInputError(f"quantile must be above 0 and at most 1, got {quantile!r}.")
    array = in_float64(norms.detach()).cpu().numpy() if isinstance(norms, Tensor) else norms
    values = np.asarray(array, np.float64)
    if not values.size or not np.isfinite(values).all():
        raise InvalidInputError(
            f"norms has {values.size} entries, of which {int(np.isfinite(values).sum())} are finite. "
            "Expected at least one, and all of them finite."
        )
    # torch.quantile refuses more than 16 million entries.
    threshold = float(np.quantile(values, quantile))
    if threshold <= 0:
        raise InvalidInputError(
            f"The {quantile} quantile of the norms is {threshold}, and a threshold must be above 0. Most gradients are "
            "zero: check grad_wrt and the output function, or use a larger quantile."
        )
    return threshold
