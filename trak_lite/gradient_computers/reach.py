"""Reports on the gradient of each parameter: how it is computed, and which rows and experts have one.

Shapes: B samples, T tokens of a sample, E experts of a module, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.data.batches import batch_size
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers._base import AbstractGradientComputer
from trak_lite.gradient_computers.parameters import select_parameters
from trak_lite.modelout_functions import ModelCall
from trak_lite.types import Batch, GradientBlock

_Line = TypeVar("_Line", "ParameterCoverage", "ParameterReach")


@dataclass(frozen=True, slots=True)
class _Report(Generic[_Line]):
    """One line per kept parameter, in model order; ``print`` shows the table."""

    parameters: tuple[_Line, ...]
    """One line per kept parameter, in model order."""

    def __iter__(self) -> Iterator[_Line]:
        return iter(self.parameters)

    def __getitem__(self, name: str) -> _Line:
        """Return the line of one parameter."""
        return {line.name: line for line in self.parameters}[name]

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return the table's header and lines."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ParameterCoverage:
    """How the gradient of one parameter is computed."""

    name: str
    """Canonical parameter name."""
    how: Literal["rule", "fallback", "zero", "refused"]
    """``rule``: exact formulas; ``fallback``: an operation is run again per sample; ``zero``: f does not depend on it;
    ``refused``: no per-sample gradient."""
    why: str
    """The rules used, or the reason."""


@dataclass(frozen=True, slots=True)
class Coverage(_Report[ParameterCoverage]):
    """How the gradient of each kept parameter is computed, in model order; ``print`` shows the table."""

    @property
    def complete(self) -> bool:
        """Whether no kept parameter is refused."""
        return all(line.how != "refused" for line in self.parameters)

    def _rows(self) -> list[tuple[str, str, str]]:
        return [("parameter", "how", "why"), *((line.name, line.how, line.why) for line in self.parameters)]


@dataclass(frozen=True, slots=True)
class ParameterReach:
    """Rows that have a gradient for one parameter. The gradient of all other rows is exactly zero."""

    name: str
    """Canonical parameter name."""
    rows: NDArray[np.bool_]
    """``(B,)``, whether any entry of the row's gradient is not zero. Rounding errors count: they are not zero."""
    experts: NDArray[np.bool_] | None
    """``(B, E)``, the same for the part of each expert; ``None`` if the parameter does not hold several experts."""

    @property
    def num_zero(self) -> int:
        """Number of rows without a gradient."""
        return int((~self.rows).sum())


@dataclass(frozen=True, slots=True)
class GradientReach(_Report[ParameterReach]):
    """Rows with a gradient for every kept parameter, and the experts of every token; ``print`` shows the table."""

    experts_of_tokens: Mapping[str, NDArray[np.int64]]
    """Experts that each token was routed to, ``(B, T, k)``, by the name of the module of fused experts.

    Padding is routed, too, and reaches experts without a gradient. If a task calls the model several times, the tokens
    of its calls follow each other. The model is expected to order tokens sample by sample. Modules that get no indices
    of experts (``(B T, k)`` integers) are missing.
    """

    @property
    def num_zero(self) -> int:
        """Number of pairs of a row and a parameter without a gradient."""
        return sum(line.num_zero for line in self.parameters)

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [("parameter", "rows with a gradient", "of each expert")]
        for line in self.parameters:
            parts = "" if line.experts is None else " ".join(map(str, line.experts.sum(0)))
            rows.append((line.name, f"{int(line.rows.sum())} of {len(line.rows)}", parts))
        return rows


def gradient_reach(computer: AbstractGradientComputer, batch: Batch) -> GradientReach:
    """Return which parameters and experts each row of a batch has a gradient for.

    In a mixture of experts, a row has a gradient for the experts that its tokens were routed to. Stored rows have zeros
    for all others. Modules of fused experts (all experts in one parameter, as in Mixtral, Qwen, OLMoE and gpt-oss of
    Transformers) are found by their attribute ``num_experts`` and a parameter ``(E, ., .)``.

    The cost is one pass of the computer, and one forward pass if there are fused experts. Put the model in eval mode
    first.

    Args:
        computer: A gradient computer of the model and the task.
        batch: At least one sample.

    Raises:
        InvalidInputError: If the batch is empty.
        UnsupportedModelError: If a row has a gradient for an expert that none of its tokens was routed to, because the
            model orders tokens otherwise than sample by sample.

    Example:
        >>> from trak_lite.gradient_computers import IterativeGradientComputer
        >>> from trak_lite.modelout_functions import resolve_task
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1, bias=False))
        >>> _ = model[0].weight.data.copy_(torch.eye(2)), model[0].bias.data.zero_()
        >>> task = resolve_task(lambda call, batch: call(batch[0]).squeeze(1))
        >>> rows = (torch.tensor([[1.0, 1.0], [-1.0, -1.0]]),)
        >>> print(gradient_reach(IterativeGradientComputer(model, task), rows))
        parameter  rows with a gradient  of each expert
        0.weight   1 of 2
        0.bias     1 of 2
        2.weight   1 of 2
    """
    count = batch_size(batch)
    if not count:
        raise InvalidInputError("The batch is empty. Pass at least one sample.")
    fused = _fused_experts(computer.model)
    kept = select_parameters(computer.model, computer.grad_wrt)
    sizes = {id(p): num for module, num in fused.values() for p in _of_experts(module, num)}
    reached = {name: np.zeros((count, sizes.get(id(p), 1)), dtype=np.bool_) for name, p in kept.items()}

    def look(block: GradientBlock) -> None:
        nonzero = (block.dense() != 0).view(block.num_samples, reached[block.name].shape[1], -1).any(2)
        reached[block.name][block.start : block.start + block.num_samples] |= nonzero.cpu().numpy()

    computer.stream_gradients(batch, look)
    lines = tuple(
        ParameterReach(name, reached[name].max(1), reached[name] if id(p) in sizes else None)
        for name, p in kept.items()
    )
    tokens = _routed(computer, batch, fused) if fused else {}
    _refuse_other_order(computer.model, lines, tokens, fused)
    return GradientReach(lines, tokens)


def _fused_experts(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Return the modules that hold several experts in one parameter, and E, by module name."""
    fused = {}
    for name, module in model.named_modules():
        num = getattr(module, "num_experts", None)
        if isinstance(num, int) and any(p.dim() == 3 for p in _of_experts(module, num)):
            fused[name] = (module, num)
    return fused


def _of_experts(module: nn.Module, num: int) -> list[nn.Parameter]:
    """Return the parameters of a module whose first axis is the expert."""
    return [p for p in module.parameters(recurse=False) if p.dim() > 1 and p.shape[0] == num]


def _routed(
    computer: AbstractGradientComputer, batch: Batch, fused: Mapping[str, tuple[nn.Module, int]]
) -> dict[str, NDArray[np.int64]]:
    """Return the experts of every token ``(B, T, k)`` by module name, from one forward pass."""
    experts: dict[str, list[Tensor]] = {name: [] for name in fused}

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        matrices = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() == 2)
        indices = [matrix for matrix in matrices if matrix.dtype in (torch.int64, torch.int32)]
        experts[name] += [index.detach().cpu().long() for index in indices[:1]]

    with ExitStack() as stack:
        for name, (module, _) in fused.items():
            handle = module.register_forward_pre_hook(partial(keep, name), with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(torch.no_grad())
        computer.modelout_fn.evaluate(ModelCall(computer.model), batch)
    count = batch_size(batch)
    return {
        name: torch.cat([part.view(count, -1, part.shape[1]) for part in parts], 1).numpy()
        for name, parts in experts.items()
        if parts and all(len(part) % count == 0 for part in parts)
    }


def _refuse_other_order(
    model: nn.Module,
    lines: tuple[ParameterReach, ...],
    tokens: Mapping[str, NDArray[np.int64]],
    fused: Mapping[str, tuple[nn.Module, int]],
) -> None:
    """Raise if a row has a gradient for an expert that none of its tokens was routed to."""
    owners = {id(p): name for name in tokens for p in fused[name][0].parameters(recurse=False)}
    named = dict(model.named_parameters())
    for line in lines:
        owner = owners.get(id(named[line.name]))
        if owner is None or line.experts is None:
            continue
        routed = (tokens[owner][..., None] == np.arange(line.experts.shape[1])).any((1, 2))
        wrong = (line.experts & ~routed).any(1).nonzero()[0]
        if wrong.size:
            raise UnsupportedModelError(
                f"Row {wrong[0]} has a gradient for experts of {line.name!r} to which none of its tokens seems to be "
                "routed. The order of the tokens in the model is unknown. Expected all tokens of a sample, then those "
                "of the next."
            )
