"""The public conformance kits, on what the package itself offers."""

from __future__ import annotations

import torch
from models import Opaque

from trak_lite.gradient_computers import (
    FunctionalGradientComputer,
    HookGradientComputer,
    IterativeGradientComputer,
    register_gradient_rule,
)
from trak_lite.testing import GradientComputerTests, GradientRuleTests


class TestHookComputer(GradientComputerTests):
    def make_computer(self, model, task):
        return HookGradientComputer(model, task)


class TestFunctionalComputer(GradientComputerTests):
    def make_computer(self, model, task):
        return FunctionalGradientComputer(model, task)


class TestIterativeComputer(GradientComputerTests):
    def make_computer(self, model, task):
        return IterativeGradientComputer(model, task)


class Doubled(Opaque):
    def forward(self, x):
        return super().forward(x)


@register_gradient_rule(Doubled)
def doubled(module, args, kwargs, grad):
    return {"weight": (2 * grad * args[0]).sum(1)}


class TestAUsersRule(GradientRuleTests):
    """A layer that torch cannot see into, with the rule that its author wrote."""

    def make_layer(self):
        return Doubled()

    def make_input(self, count):
        return (torch.randn(count, 5, 4),)
