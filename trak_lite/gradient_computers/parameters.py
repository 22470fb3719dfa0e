"""Choice of the parameters to keep gradients for."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from trak_lite.core.validate import known_names, some_of
from trak_lite.errors import InvalidInputError
from trak_lite.models._adapters import frozen_adapter
from trak_lite.models.sharded import is_dtensor
from trak_lite.types import ParameterChoice

Kept: TypeAlias = Mapping[str, nn.Parameter]
"""Parameters to keep gradients for, by canonical name."""


def listed(choice: ParameterChoice) -> list[str | type[nn.Module]]:
    """Return a choice as a list.

    Raises:
        InvalidInputError: If it is no choice.

    Example:
        >>> listed("0.weight")
        ['0.weight']
    """
    if isinstance(choice, str | type):
        return [choice]
    if not isinstance(choice, Iterable) or getattr(choice, "ndim", 1) == 0:
        raise InvalidInputError(f"grad_wrt must be names, patterns or module classes, got {choice!r:.100}.")
    return list(choice)


def select_parameters(
    model: nn.Module, grad_wrt: ParameterChoice | None, canonical: Mapping[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """Return the parameters to keep gradients for, by canonical name, in model order; without those of no entries.

    Args:
        model: The module.
        grad_wrt: Names as in ``named_parameters``, patterns of names (``"layers.*.weight"``), and module classes. What
            is the name of a parameter is no pattern (``"w[0]"``). A class selects every parameter that a module of that
            class or of a subclass owns directly. Any name of a tied weight selects the weight. ``None`` selects every
            parameter that requires grad; of a PEFT model that was loaded for inference, also those of its active
            adapter.
        canonical: ``dict(model.named_parameters())``, if the caller has it.

    Raises:
        InvalidInputError: If a name is unknown, a class has no parameter in the model, nothing is selected, or one is
            quantised.
    """
    canonical = dict(model.named_parameters()) if canonical is None else canonical
    canonical = {name: p for name, p in canonical.items() if is_lazy(p) or p.numel()}
    if grad_wrt is None:
        selected = {name: p for name, p in canonical.items() if p.requires_grad}
        if adapter := frozen_adapter(model, selected):  # PEFT freezes one that is loaded for inference
            selected = {name: p for name, p in canonical.items() if name in adapter or name in selected}
        if not selected:
            raise InvalidInputError(
                f"No parameter of {type(model).__name__} requires grad, so there is nothing to differentiate. Name "
                "parameters in grad_wrt; these may be frozen."
            )
        return selected
    choices = set(listed(grad_wrt))
    if choices and choices <= canonical.keys():  # the usual case, in a fraction of the time
        return _without_quantised({name: p for name, p in canonical.items() if name in choices})
    wanted: set[int] = set()
    names: list[Any] = []
    every_name = dict(model.named_parameters(remove_duplicate=False))
    for choice in listed(grad_wrt):
        if isinstance(choice, type) and issubclass(choice, nn.Module):
            wanted.update(map(id, _owned_by(model, choice)))
        elif isinstance(choice, str) and choice not in every_name and any(c in choice for c in "*?["):
            names += fnmatch.filter(every_name, choice) or [choice]
        else:
            names.append(choice)
    chosen = known_names(names, every_name.keys(), what="parameter names in grad_wrt")
    wanted.update(id(every_name[name]) for name in chosen)
    if not wanted:
        raise InvalidInputError("grad_wrt is empty. Name at least one parameter, or leave it out to use all.")
    selected = {name: p for name, p in canonical.items() if id(p) in wanted}
    if not selected:
        raise InvalidInputError(f"The parameters in grad_wrt ({some_of(map(str, names))}) have no entries.")
    return _without_quantised(selected)


def is_quantised(parameter: nn.Parameter) -> bool:
    """Whether it has no gradient: it holds integers, or is frozen and a wrapper of other tensors (torchao)."""
    is_wrapper = type(parameter) is not nn.Parameter and hasattr(parameter, "__tensor_flatten__")
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return not is_number or (is_wrapper and not (parameter.requires_grad or is_dtensor(parameter)))


def _without_quantised(selected: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    if quantised := [name for name, p in selected.items() if is_quantised(p)]:
        raise InvalidInputError(
            f"grad_wrt names {some_of(map(repr, quantised))}, of the class {type(selected[quantised[0]]).__name__}: "
            "integers, and weights in wrappers of other tensors, such as quantised ones, have no gradient. Leave them "
            "out of it."
        )
    return selected


def _owned_by(model: nn.Module, module_class: type[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that modules of a class own directly, including those of their parametrizations."""
    parameters: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, module_class):
            parameters += module.parameters(recurse=False)
            if parametrize.is_parametrized(module):
                parameters += module.parametrizations.parameters()  # type: ignore[union-attr]
    if not parameters:
        owners = {type(m).__name__ for m in model.modules() if list(m.parameters(recurse=False))}
        raise InvalidInputError(
            f"grad_wrt names the class {module_class.__name__}, and no module of that class in "
            f"{type(model).__name__} owns a parameter. Classes that do: {sorted(owners)}."
        )
    return parameters


@contextmanager
def differentiating_only(parameters: Iterable[nn.Parameter], kept: Kept) -> Iterator[None]:
    """Let only the kept ones of all parameters require grad inside the block; autograd forms no other gradient."""
    flags = [(p, p.requires_grad) for p in parameters]
    wanted = {id(p) for p in kept.values()}
    try:
        for p, flag in flags:
            if flag != (id(p) in wanted):
                p.requires_grad_(not flag)
        yield
    finally:
        for p, flag in flags:
            if p.requires_grad != flag:
                p.requires_grad_(flag)
