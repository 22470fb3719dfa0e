"""Gradient rules for module classes: per-sample gradients from a layer's input and output gradient.

Modules made of torch operations need no rule, because the operations have rules
(:mod:`trak_lite.gradient_computers.hooks.rules.operations`). Register a rule for a module that hooks on operations
cannot follow (a custom kernel, an ``autograd.Function``), or for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.types import FactoredBlock

GradientRule: TypeAlias = Callable[
    [Any, tuple[Any, ...], dict[str, Any], Tensor], Mapping[str, Tensor | tuple[Tensor, Tensor]]
]
"""``rule(module, args, kwargs, output_grad)``. The arguments are detached, and ``output_grad`` ``(B, ...)`` has the
samples on axis 0. Returns, by name within the module, per-sample gradients ``(B, *parameter.shape)`` or, for a matrix
``(d_out, d_in)``, the pair of factors ``(B, T, d_in), (B, T, d_out)``."""

_Rule = TypeVar("_Rule", bound=GradientRule)
_RULES: dict[type[nn.Module], GradientRule] = {}


def register_gradient_rule(module_class: type[nn.Module]) -> Callable[[_Rule], _Rule]:
    """Return a decorator that registers a function as the gradient rule of a module class.

    The rule also applies to subclasses that do not override ``forward``. It must return a gradient for every kept
    parameter of the module. The module must return one tensor with the samples on axis 0.

    Args:
        module_class: Class of the layer.

    Raises:
        InvalidInputError: If ``module_class`` is not a subclass of ``nn.Module``.

    Example:
        >>> import torch
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(3))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> @register_gradient_rule(Scale)
        ... def scale_rule(module, args, kwargs, output_grad):
        ...     return {"weight": output_grad * args[0]}
        >>> unregister_gradient_rule(Scale)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise InvalidInputError(
            f"A gradient rule is registered for a class of modules, got {module_class!r}. "
            "Pass the layer's class, not an instance."
        )

    def register(rule: _Rule) -> _Rule:
        _RULES[module_class] = rule
        return rule

    return register


def unregister_gradient_rule(module_class: type[nn.Module]) -> None:
    """Remove the rule of a module class, if it has one."""
    _RULES.pop(module_class, None)


def rule_for(module: nn.Module) -> GradientRule | None:
    """Return the rule of the nearest class in the module's MRO, unless ``forward`` is overridden below it."""
    for cls in type(module).__mro__ if _RULES else ():
        rule = _RULES.get(cls)
        if rule is not None:
            module_class: type[nn.Module] = type(module)
            return rule if module_class.forward is getattr(cls, "forward", None) else None
    return None


def parts_of(
    module: nn.Module, parameters: Mapping[str, Tensor], parts: Mapping[str, Tensor | tuple[Tensor, Tensor]]
) -> dict[str, Tensor | FactoredBlock]:
    """Return the rule's contributions to the module's kept parameters; raise if one is missing."""
    missing = sorted(set(parameters) - set(parts))
    if missing:
        raise UnsupportedModelError(
            f"The gradient rule of {type(module).__name__} returned no gradient for {missing}. Expected one for every "
            "kept parameter."
        )
    return {
        name: FactoredBlock("", *part) if isinstance(part, tuple) else part
        for name, part in parts.items()
        if name in parameters
    }
