"""The machinery of :class:`HookGradientComputer`: a plan of where parameters are used, rules, and one pass."""

from __future__ import annotations

from trak_lite.gradient_computers.hooks.computer import HookGradientComputer as HookGradientComputer
from trak_lite.gradient_computers.hooks.coverage import Coverage as Coverage
from trak_lite.gradient_computers.hooks.coverage import ParameterCoverage as ParameterCoverage
from trak_lite.gradient_computers.hooks.registry import GradientRule as GradientRule
from trak_lite.gradient_computers.hooks.registry import register_gradient_rule as register_gradient_rule
from trak_lite.gradient_computers.hooks.registry import unregister_gradient_rule as unregister_gradient_rule

__all__ = [
    "Coverage",
    "GradientRule",
    "HookGradientComputer",
    "ParameterCoverage",
    "register_gradient_rule",
    "unregister_gradient_rule",
]
