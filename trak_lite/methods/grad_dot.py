"""GradDot: products of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from trak_lite.methods.base import AbstractMethod

__all__ = ["GradDot"]


@dataclass(frozen=True, kw_only=True)
class GradDot(AbstractMethod):
    """The inner product of the gradients of train row and target, without a kernel, averaged over checkpoints.

    Source: Charpiat et al. (arXiv:2102.13620), section 3.
    """

    kernel = None
