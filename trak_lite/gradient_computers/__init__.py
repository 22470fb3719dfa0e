"""Gradient computers: per-sample gradients of a model output function, streamed block by block.

``GRADIENT_COMPUTERS`` holds the ones that ``gradient_computer="..."`` can name; a class of one's own, or a
``functools.partial`` of one, is passed instead of a name.
"""

from __future__ import annotations

from trak_lite.gradient_computers._base import (
    AbstractGradientComputer as AbstractGradientComputer,
)
from trak_lite.gradient_computers._base import ParameterChoice as ParameterChoice
from trak_lite.gradient_computers._base import collect_gradients as collect_gradients
from trak_lite.gradient_computers._base import select_parameters as select_parameters
from trak_lite.gradient_computers.choice import choose_gradient_computer as choose_gradient_computer
from trak_lite.gradient_computers.functional import (
    FunctionalGradientComputer as FunctionalGradientComputer,
)
from trak_lite.gradient_computers.hooks import Coverage as Coverage
from trak_lite.gradient_computers.hooks import HookGradientComputer as HookGradientComputer
from trak_lite.gradient_computers.hooks import register_gradient_rule as register_gradient_rule
from trak_lite.gradient_computers.iterative import (
    IterativeGradientComputer as IterativeGradientComputer,
)
from trak_lite.gradient_computers.normalization import Normalization as Normalization
from trak_lite.gradient_computers.normalization import as_normalization as as_normalization
from trak_lite.gradient_computers.normalization import clip as clip
from trak_lite.gradient_computers.normalization import clipping_threshold as clipping_threshold
from trak_lite.gradient_computers.normalized import (
    NormalizedGradientComputer as NormalizedGradientComputer,
)
from trak_lite.gradient_computers.normalized import RowNormalizer as RowNormalizer
from trak_lite.gradient_computers.reductions import gradient_norms as gradient_norms
from trak_lite.gradient_computers.reductions import sums_by_row as sums_by_row
from trak_lite.gradient_computers.reductions import weighted_gradient as weighted_gradient

__all__ = [
    "GRADIENT_COMPUTERS",
    "AbstractGradientComputer",
    "Coverage",
    "FunctionalGradientComputer",
    "HookGradientComputer",
    "IterativeGradientComputer",
    "Normalization",
    "NormalizedGradientComputer",
    "ParameterChoice",
    "RowNormalizer",
    "as_normalization",
    "choose_gradient_computer",
    "clip",
    "clipping_threshold",
    "collect_gradients",
    "gradient_norms",
    "register_gradient_rule",
    "select_parameters",
    "sums_by_row",
    "weighted_gradient",
]

GRADIENT_COMPUTERS: dict[str, type[AbstractGradientComputer]] = {
    "hook": HookGradientComputer,
    "functional": FunctionalGradientComputer,
    "iterative": IterativeGradientComputer,
}
"""Classes by the name that ``gradient_computer="..."`` takes."""
