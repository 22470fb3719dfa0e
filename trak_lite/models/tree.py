"""The modules and parameters of a model, collected in one walk."""

from __future__ import annotations

from functools import cached_property
from typing import final

from torch import nn


@final
class ModelTree:
    """What several steps of one gradient pass ask of a model's modules.

    A walk through the modules of a transformer with tiny layers costs as much as several of its operations. The tree is
    a snapshot: make one for every pass, because modules, modes and parameters may change between passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named_modules = tuple(model.named_modules())

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules, each once, the model first."""
        return tuple(module for _, module in self.named_modules)

    @cached_property
    def classes(self) -> frozenset[type[nn.Module]]:
        """Classes of all modules."""
        return frozenset(map(type, self.modules))

    @cached_property
    def modes(self) -> tuple[bool, ...]:
        """``training`` of every module."""
        return tuple(module.training for _, module in self.named_modules)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name, each once, in the order of ``named_parameters``."""
        if type(self.model).named_parameters is not nn.Module.named_parameters:
            return dict(self.model.named_parameters())
        parameters: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for prefix, module in self.named_modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameters[f"{prefix}.{name}" if prefix else name] = parameter
        return parameters
