"""Decides whether a stored result still is that of a function of the user.

A function is described by its source and values. What else it depends on cannot be followed in general (helpers, base
classes, files, the environment): a part of the work is repeated and compared.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from trak_lite.core.eval_caches import passes_undone
from trak_lite.data.datasets import Rows
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall

_T = TypeVar("_T")

SAME: Final = 1e-2
"""Largest distance on another machine: rounding errors grow with every step of a training."""
_ROUNDING: Final = 1e-5
"""Largest distance under the same conditions, if two repetitions have the same bits."""
_NOISE: Final = 10.0
"""Largest distance in units of that of two repetitions."""


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """A stored result beside repetitions of it. Distances are relative to the size of the stored result."""

    apart: float
    """Distance between the stored result and the nearest repetition."""
    noise: float
    """Distance between two repetitions; 0 if the first one equals the stored result."""
    exact: bool
    """Whether the stored result was made under the present conditions, which give the same bits."""

    @property
    def is_same(self) -> bool:
        """Whether the stored result is that of the present function, as far as its noise allows to say."""
        return self.apart <= max(_ROUNDING if self.exact else SAME, _NOISE * self.noise)

    @property
    def is_random(self) -> bool:
        """Whether repetitions differ by more than rounding."""
        return self.noise > SAME


def compare(
    stored: _T, repeat: Callable[[int], _T], distance: Callable[[_T, _T], float], *, exact: bool
) -> Comparison:
    """Compare a stored result with repetition 0 of it, and with repetition 1 if they differ.

    The distance of two results is relative to the size of the stored one.

    Example:
        >>> compare(1.0, lambda number: 1.001, lambda one, other: abs(one - other), exact=True).is_same
        False
    """
    first = repeat(0)
    apart = distance(first, stored)
    if not apart:
        return Comparison(0.0, 0.0, exact)
    second = repeat(1)
    return Comparison(min(apart, distance(second, stored)), distance(second, first), exact)


def conditions(**others: Any) -> dict[str, Any]:
    """Return JSON values for what the bits of a computation depend on, besides its function, and others."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
    return {
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if in_use else None,
        **others,
    }


def outputs_of_model(model: nn.Module, task: AbstractModelOutput, rows: Rows, device: torch.device) -> Tensor:
    """Return f of every target, ``(M,)`` float64, for a model in eval mode."""
    task.prepare(model)
    outputs = []
    with torch.no_grad():
        for _, batch in rows.moved(np.arange(len(rows)), device):
            with passes_undone(model):
                outputs.append(task.evaluate(ModelCall(model), batch).output.cpu().double())
    return torch.cat(outputs)
