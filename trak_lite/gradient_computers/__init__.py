"""Gradient computers: per-sample gradients of a model output function, streamed block by block.

``GRADIENT_COMPUTERS`` holds the ones that ``gradient_computer="..."`` can name; a class of one's own, or a
``functools.partial`` of one, is passed instead of a name.
"""

from __future__ import annotations

from trak_lite.gradient_computers._base import (
    AbstractGradientComputer as AbstractGradientComputer,
)
from trak_lite.gradient_computers._base import collect_gradients as collect_gradients
from trak_lite.gradient_computers._base import select_parameters as select_parameters
from trak_lite.gradient_computers.functional import (
    FunctionalGradientComputer as FunctionalGradientComputer,
)
from trak_lite.gradient_computers.iterative import (
    IterativeGradientComputer as IterativeGradientComputer,
)

__all__ = [
    "GRADIENT_COMPUTERS",
    "AbstractGradientComputer",
    "FunctionalGradientComputer",
    "IterativeGradientComputer",
    "collect_gradients",
    "select_parameters",
]

GRADIENT_COMPUTERS: dict[str, type[AbstractGradientComputer]] = {
    "functional": FunctionalGradientComputer,
    "iterative": IterativeGradientComputer,
}
