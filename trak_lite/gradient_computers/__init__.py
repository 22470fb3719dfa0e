"""Gradient computers: per-sample gradients of a model output function, streamed block by block.

``GRADIENT_COMPUTERS`` maps the names accepted by ``gradient_computer="..."`` to classes. A custom class, or a
``functools.partial`` of a class, can be passed instead of a name.
"""

from trak_lite.gradient_computers._base import AbstractGradientComputer, collect_gradients
from trak_lite.gradient_computers.choice import GRADIENT_COMPUTERS, choose_gradient_computer
from trak_lite.gradient_computers.functional import FunctionalGradientComputer
from trak_lite.gradient_computers.hooks.computer import HookGradientComputer
from trak_lite.gradient_computers.hooks.registry import register_gradient_rule
from trak_lite.gradient_computers.iterative import IterativeGradientComputer
from trak_lite.gradient_computers.parameters import select_parameters
from trak_lite.gradient_computers.reach import GradientReach, ParameterReach, gradient_reach

__all__ = [
    "GRADIENT_COMPUTERS",
    "AbstractGradientComputer",
    "FunctionalGradientComputer",
    "GradientReach",
    "HookGradientComputer",
    "IterativeGradientComputer",
    "ParameterReach",
    "choose_gradient_computer",
    "collect_gradients",
    "gradient_reach",
    "register_gradient_rule",
    "select_parameters",
]
