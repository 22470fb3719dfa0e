"""The public conformance kits, on what the package itself offers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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


class TestMultiheadAttention(GradientRuleTests):
    def make_layer(self):
        return nn.MultiheadAttention(4, 2, batch_first=True)

    def make_input(self, count):
        x = torch.randn(count, 5, 4)
        return (x, x, x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight) ** 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        inner = 3 * grad * (x * weight) ** 2
        return inner * weight, (inner * x).sum((0, 1))


class CubeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x, self.weight)


@register_gradient_rule(CubeLayer)
def cube(module, args, kwargs, grad):
    return {"weight": (3 * grad * (args[0] * module.weight) ** 2 * args[0]).sum(1)}


class TestAUsersRule(GradientRuleTests):
    """A layer that torch cannot see into, with the rule that its author wrote."""

    def make_layer(self):
        return CubeLayer()

    def make_input(self, count):
        return (torch.randn(count, 5, 4),)
