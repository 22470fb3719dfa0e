"""Recurrent layers, unrolled so that their per-sample gradients stay factored.

All gates of a step are one affine map of the input and of the last state. The gradient with respect to
the input's part, for all steps at once, is therefore enough for every weight of the layer.
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

__all__ = ["PACKED", "RECURRENT", "Tap", "run_recurrent"]

RECURRENT: dict[Any, str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
}
"""Kind of recurrence by operation."""
PACKED = frozenset(RECURRENT)
"""Operations whose rows may be those of a packed sequence, in an order that shapes do not tell."""

Tap = Callable[[Tensor, Sequence[Any], Callable[[Tensor], list[Any]]], Tensor]
"""``tap(value, weights, parts)``: once the gradient of ``value`` is known, ``parts(gradient)`` gives one contribution
per weight. Returns the value to go on with."""


@dataclass(slots=True)
class _Steps:
    """The time steps of a sequence, for all samples or for those that are still running."""

    sizes: list[int]
    """Samples at each step; falling for a packed sequence."""
    num_samples: int
    order: Tensor | None
    """The sample of each row of a packed sequence, if not the row itself."""
    batch_first: bool
    packed: bool

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of every step."""
        return torch.split_with_sizes(flat, self.sizes) if self.packed else flat.unbind(int(self.batch_first))

    def join(self, steps: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split`."""
        return torch.cat(list(steps)) if self.packed else torch.stack(list(steps), int(self.batch_first))

    def by_sample(self, flat: Tensor) -> Tensor:
        """Return ``(B, T, d)`` with zeros where a sample has ended."""
        if not self.packed:
            return flat if self.batch_first else flat.transpose(0, 1)
        padded = flat.new_zeros(len(self.sizes), self.num_samples, flat.shape[-1])
        for step, rows in enumerate(torch.split_with_sizes(flat, self.sizes)):
            padded[step, : len(rows)] = rows
        samples = padded.transpose(0, 1)
        if self.order is None:
            return samples
        placed = torch.empty_like(samples)
        placed[self.order] = samples
        return placed

    def in_order(self, values: Sequence[Tensor], backward: bool) -> Tensor:
        """Return values that were found step by step, last step first if ``backward``, as ``(B, T, d)``."""
        return self.by_sample(self.join(values[::-1] if backward else values))


def run_recurrent(
    kind: str, args: Sequence[Any], *, num_samples: int, order: Tensor | None, tap: Tap
) -> tuple[Tensor, ...]:
    """Run ``torch.lstm`` and its relatives step by step.

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
    finals: list[list[Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            cell = layer * directions + direction
            own = weights[cell * per_cell : (cell + 1) * per_cell]
            out, final = _run_cell(kind, x, [s[cell] for s in states], own, steps, direction == 1, tap)
            outputs.append(out)
            finals.append(final)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return (x, *(torch.stack(values) for values in zip(*finals, strict=True)))


def _bound(args: Sequence[Any], count: int, order: Tensor | None) -> tuple[Tensor, _Steps, Sequence[Any]]:
    """Return the input, its steps and the arguments from the state to ``bidirectional``."""
    if isinstance(args[3], list | tuple):
        return args[0], _Steps(args[1].tolist(), count, order, False, True), args[2:]
    *rest, batch_first = args[1:]
    return args[0], _Steps([count] * args[0].shape[int(batch_first)], count, None, batch_first, False), rest


def _run_cell(
    kind: str,
    x: Tensor,
    state: list[Tensor],
    weights: Sequence[Tensor],
    steps: _Steps,
    backward: bool,
    tap: Tap,
) -> tuple[Tensor, list[Tensor]]:
    """Run one layer in one direction; return its outputs and its last state."""
    w_in, w_state, *biases = weights
    b_in, b_state = biases or (None, None)
    gru = kind == "gru"  # alone it scales its state's part, bias included, by a gate
    bias = b_in if gru or not biases else torch.add(*biases)
    seen, resets = list[Tensor](), list[Tensor]()
    inputs = x.detach()

    def parts(grad: Tensor) -> list[Any]:
        grads = state_grads = steps.by_sample(grad)
        if gru:
            r, z, n = grads.chunk(3, -1)
            state_grads = torch.cat((r, z, n * steps.in_order(resets, backward)), -1)
        found: list[Any] = [
            Factors(steps.by_sample(inputs), grads),
            Factors(steps.in_order(seen, backward), state_grads),
        ]
        return found + ([grads.sum(1), state_grads.sum(1)] if biases else [])

    gates = steps.split(tap(functional.linear(x, w_in, bias), weights, parts))
    outputs: list[Tensor] = []
    for gate in reversed(gates) if backward else gates:
        count = len(gate)
        running = [value if count == len(value) else value[:count] for value in state]
        seen.append(running[0].detach())
        new = _step(kind, gate, running, w_state, b_state, resets)
        outputs.append(new[0])
        state = [
            torch.cat((n, old[count:])) if count < len(old) else n for n, old in zip(new, state, strict=True)
        ]
    return steps.join(outputs[::-1] if backward else outputs), state


def _step(
    kind: str, gate: Tensor, state: list[Tensor], weight: Tensor, bias: Tensor | None, resets: list[Tensor]
) -> list[Tensor]:
    """Return the state after one step."""
    h = state[0]
    if kind == "gru":
        r_in, z_in, n_in = gate.chunk(3, 1)
        r_h, z_h, n_h = functional.linear(h, weight, bias).chunk(3, 1)
        r, z = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)
        n = torch.tanh(n_in + r * n_h)
        resets.append(r.detach())
        return [n + z * (h - n)]
    total = torch.addmm(gate, h, weight.t())
    if kind != "lstm":
        return [torch.tanh(total) if kind == "tanh" else torch.relu(total)]
    i, f, u, o = total.chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(u)
    return [torch.sigmoid(o) * torch.tanh(c), c]
