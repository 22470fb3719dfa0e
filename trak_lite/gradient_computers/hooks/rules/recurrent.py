"""Recurrent layers with factored per-sample gradients.

All gates of a step are one affine map of the input and of the previous state. The gradient of the input's part at all
steps therefore determines the gradients of all weights of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.calls import Factors
from trak_lite.gradient_computers.hooks.rules.recurrent_cells import Walk, run_cell

__all__ = ["Tap", "run_recurrent"]


Tap = Callable[[Tensor, Sequence[Any], Callable[[Tensor], list[Any]]], Tensor]
"""``tap(value, weights, parts)``: once the gradient of ``value`` is known, ``parts(gradient)`` returns one contribution
per weight. The caller continues with the value that ``tap`` returns."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The time steps of a sequence."""

    sizes: list[int]
    """Number of samples at each step; it does not increase in a packed sequence."""
    num_samples: int
    order: Tensor | None
    """The sample of each row of a packed sequence, if not the row itself."""
    axis: int | None
    """The axis of the steps; ``None`` if the sequence is packed."""

    def by_sample(self, rows: Tensor) -> Tensor:
        """Return rows as a contiguous ``(B, T, d)``, with zeros after the end of a sample."""
        if self.axis is not None:
            return rows.movedim(self.axis, 1).contiguous()
        samples = rows.new_zeros(self.num_samples, len(self.sizes), rows.shape[-1])
        for t, (count, step) in enumerate(zip(self.sizes, rows.split_with_sizes(self.sizes), strict=True)):
            samples[slice(count) if self.order is None else self.order[:count], t] = step
        return samples


def run_recurrent(
    kind: str, args: Sequence[Any], *, num_samples: int, order: Tensor | None, tap: Tap
) -> tuple[Tensor, ...]:
    """Run ``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` or ``torch.rnn_relu``.

    Args:
        kind: A value of :data:`RECURRENT`.
        args: The operation's arguments.
        num_samples: B.
        order: The sample of each row of a packed sequence.
        tap: Called for each tensor whose gradient is needed.

    Raises:
        UnsupportedModelError: If dropout is active between layers.
    """
    x, steps, (state, weights, _, layers, dropout, train, bidirectional) = _bound(args, num_samples, order)
    if train and dropout:
        raise UnsupportedModelError(
            "A recurrent layer draws dropout masks between its layers. Call model.eval(), or set its dropout to 0."
        )
    states = list(state) if kind == "lstm" else [state]
    directions = 2 if bidirectional else 1
    per_cell = len(weights) // (layers * directions)
    finals: list[Sequence[Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            cell = layer * directions + direction
            own = weights[cell * per_cell : (cell + 1) * per_cell]
            out, *final = _run_cell(kind, x, [s[cell] for s in states], own, steps, direction == 1, tap)
            outputs.append(out)
            finals.append(final)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return (x, *(torch.stack(values) for values in zip(*finals, strict=True)))


def _bound(args: Sequence[Any], count: int, order: Tensor | None) -> tuple[Tensor, _Steps, Sequence[Any]]:
    """Return the input, its steps and the arguments from the state to ``bidirectional``."""
    if isinstance(args[3], list | tuple):
        return args[0], _Steps(args[1].tolist(), count, order, None), args[2:]
    *rest, batch_first = args[1:]
    axis = int(batch_first)
    return args[0], _Steps([count] * args[0].shape[axis], count, None, axis), rest


def _run_cell(
    kind: str,
    x: Tensor,
    state: list[Tensor],
    weights: Sequence[Tensor],
    steps: _Steps,
    backward: bool,
    tap: Tap,
) -> tuple[Tensor, ...]:
    """Run one layer in one direction; return its outputs and its last state."""
    w_in, w_state, *biases = weights
    b_in, b_state = biases or (None, None)
    gru = kind == "gru"  # only a GRU scales the state's part, including its bias, by a gate
    bias = b_in if gru or not biases else torch.add(*biases)
    inputs, version = x.detach(), x._version

    def parts(grad: Tensor) -> list[Any]:
        _refuse_change(inputs, version)
        grads = state_grads = steps.by_sample(grad)
        if resets is not None:
            r, z, n = grads.chunk(3, -1)
            state_grads = torch.cat((r, z, n * steps.by_sample(resets)), -1)
        found: list[Any] = [
            Factors(steps.by_sample(inputs), grads),
            Factors(steps.by_sample(seen), state_grads),
        ]
        return found + ([grads.sum(1), state_grads.sum(1)] if biases else [])

    pre = tap(functional.linear(x, w_in, bias), weights, parts)
    # Autocast rounds the input's part; the recurrence runs in the precision of its state.
    dtype = torch.promote_types(pre.dtype, state[0].dtype)
    offset = b_state.to(dtype) if gru and b_state is not None else None
    walk = Walk(steps.sizes, steps.axis, backward)
    trace, found = run_cell(
        kind, pre.to(dtype), w_state.to(dtype), offset, walk, [s.to(dtype) for s in state]
    )
    seen, resets = trace.seen, trace.resets
    return found


def _refuse_change(inputs: Tensor, version: int) -> None:
    if inputs._version != version:
        raise UnsupportedModelError(
            "The input of a recurrent layer was changed in place after the layer read it, so its gradient cannot "
            "be formed. Make the later operation out of place (x = x + y, inplace=False)."
        )
