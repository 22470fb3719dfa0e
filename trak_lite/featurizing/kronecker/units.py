"""Units: parameters that share one pair of Kronecker factors, such as the weight and bias of a layer.

A bias is the weight of an additional input that is always 1 (the homogeneous coordinate of Martens & Grosse,
arXiv:1503.05671, section 2.1), so a weight ``(d_out, d_in)`` and its bias are one matrix ``(d_out, d_in + 1)``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from trak_lite.types import ParameterShapes

__all__ = ["Unit", "find_units"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class Unit:
    """One kept parameter as a matrix, or a layer's weight and bias as one matrix."""

    weight: str
    """Canonical name."""
    rows: int
    """d_out: the first axis of the weight; 1 for a parameter with fewer than two axes."""
    columns: int
    """d_in: all other axes of the weight together, without the bias."""
    bias: str | None = None
    """Canonical name of the bias, the last column of the matrix; ``None`` for a unit without one."""
    has_gaps: bool = True
    """Whether positions with zero input and zero output gradient may be padding, and are not counted."""

    @property
    def width(self) -> int:
        """Columns of the matrix, including the column of the bias."""
        return self.columns + (self.bias is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def apart(self) -> tuple[Unit, ...]:
        """Return the weight and the bias as separate units."""
        alone = replace(self, bias=None)
        return (alone,) if self.bias is None else (alone, Unit(self.bias, 1, self.rows))


def find_units(model: nn.Module, parameters: ParameterShapes) -> tuple[Unit, ...]:
    """Return the units of all kept parameters; every parameter is in exactly one unit.

    A bias is joined with its weight if both belong to one linear or convolution layer only. Every other parameter is a
    separate unit.

    Args:
        model: The module.
        parameters: Shapes of the kept parameters by canonical name.

    Example:
        >>> find_units(nn.Linear(3, 2), {"weight": (2, 3), "bias": (2,)})
        (Unit(weight='weight', rows=2, columns=3, bias='bias', has_gaps=True),)
    """
    names = {id(p): name for name, p in model.named_parameters() if name in parameters}
    owners = Counter(id(p) for module in model.modules() for p in _own(module))
    found: dict[str, Unit] = {}
    for module in model.modules():
        if not isinstance(module, _LAYERS):
            continue
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        if weight is None or id(weight) not in names:
            continue
        alone = bias is not None and owners[id(weight)] == owners[id(bias)] == 1
        shape = tuple(weight.shape)
        found[names[id(weight)]] = Unit(
            names[id(weight)],
            shape[0],
            math.prod(shape[1:]),
            names.get(id(bias)) if alone else None,
            has_gaps=isinstance(module, nn.Linear),
        )
    joined = {unit.bias for unit in found.values()}
    return tuple(
        found.get(name) or _alone(name, shape) for name, shape in parameters.items() if name not in joined
    )


def _own(module: nn.Module) -> Iterable[nn.Parameter]:
    return (p for p in module._parameters.values() if p is not None)


def _alone(name: str, shape: tuple[int, ...]) -> Unit:
    rows = shape[0] if len(shape) >= 2 else 1
    return Unit(name, rows, math.prod(shape[1:] if len(shape) >= 2 else shape))
