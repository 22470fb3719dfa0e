"""One recurrent layer in one direction as a single autograd function with a hand-written derivative.

Autograd's graph of an unrolled recurrence has about ten nodes per step, each of which allocates and saves tensors. The
hand-written derivative computes the terms that do not depend on the gradient for all steps at once: the gradient of a
gate's input is a *slope* times the gradient of the state. A backward step is one matrix product and a few in-place
products.

Shapes: B samples, T steps, H units, G gates. *Rows* hold all steps and samples: ``(B, T, d)``, ``(T, B, d)`` or, for a
packed sequence, ``(N, d)`` with the steps one after the other; the number of samples per step does not increase.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trak_lite.errors import UnsupportedModelError

__all__ = ["Trace", "Walk", "run_cell"]


@dataclass(frozen=True, slots=True)
class Walk:
    """The steps of a recurrence, and their order."""

    sizes: list[int]
    """Number of samples at each step."""
    axis: int | None
    """The axis of the steps in rows; ``None`` if the sequence is packed."""
    backward: bool
    """Whether the recurrence starts at the last step."""

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of every step, first step first."""
        return rows.split_with_sizes(self.sizes) if self.axis is None else rows.unbind(self.axis)

    def join(self, steps: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split`; the result has new memory."""
        return torch.cat(list(steps)) if self.axis is None else torch.stack(list(steps), self.axis)

    def run(
        self, step: Callable[..., tuple[Tensor, ...]], state: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run all steps.

        Args:
            step: ``step(t, *state)`` returns the next state of the samples that are still running.
            state: The first state, ``(B, H)`` each.

        Returns:
            The last state, ``(B, H)`` each, and rows with the state before every step.
        """
        before: list[tuple[Tensor, ...]] = []
        for t in self._places():
            count = self.sizes[t]
            all_run = count == len(state[0])
            running = state if all_run else tuple(value[:count] for value in state)
            before.append(running)
            new = step(t, *running)
            if not all_run:
                new = tuple(torch.cat((n, old[count:])) for n, old in zip(new, state, strict=True))
            state = new
        if self.backward:
            before.reverse()
        return list(state), [self.join(values) for values in zip(*before, strict=True)]

    def run_back(self, step: Callable[..., None], carry: list[Tensor], grads: Tensor | None) -> None:
        """Run all steps in reverse order.

        Args:
            step: ``step(t, *carry)`` replaces the gradient of the state after step t by that before it, in place.
            carry: The gradient of the last state, ``(B, H)`` each; overwritten with that of the first state.
            grads: The gradient of the outputs.
        """
        of_steps = None if grads is None else self.split(grads)
        running = carry
        for t in reversed(self._places()):
            count = self.sizes[t]
            if count != len(running[0]):
                running = [value[:count] for value in carry]
            if of_steps is not None:
                running[0].add_(of_steps[t])
            step(t, *running)

    def _places(self) -> range:
        places = range(len(self.sizes))
        return places[::-1] if self.backward else places


class Trace(NamedTuple):
    """Results of a layer in one direction."""

    outputs: Tensor
    """Rows of h."""
    last: list[Tensor]
    """The last state: ``(B, H)`` each."""
    seen: Tensor
    """Rows with the h that every step reads."""
    slopes: tuple[Tensor, ...]
    """Tensors for the backward steps."""
    resets: Tensor | None = None
    """Rows with the factor of the state's part of the last gate; ``None`` if there is no such factor."""


class _AbstractCell(ABC):
    """The equations of one step and their derivative."""

    @abstractmethod
    def forward(
        self, pre: Tensor, weight: Tensor, bias: Tensor | None, walk: Walk, state: tuple[Tensor, ...]
    ) -> Trace:
        """Run all steps; see :func:`run_cell`. ``pre`` is overwritten."""

    @abstractmethod
    def backward(
        self,
        slopes: Sequence[Tensor],
        weight: Tensor,
        walk: Walk,
        carry: list[Tensor],
        grads: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run all backward steps; ``carry`` is overwritten with the gradient of the first state.

        Returns:
            Rows with the gradients of the input's and of the state's part of the gates, ``G * H`` wide.
        """


class _Plain(_AbstractCell):
    """``h' = f(a + W h)`` (Elman, "Finding Structure in Time", 1990)."""

    def __init__(self, f: Callable[..., Tensor], slope: Callable[[Tensor], Tensor]) -> None:
        """Store f and ``slope``, the derivative of f as a function of its value."""
        self._f = f
        self._slope = slope

    def forward(
        self, pre: Tensor, weight: Tensor, bias: Tensor | None, walk: Walk, state: tuple[Tensor, ...]
    ) -> Trace:
        transposed, outputs = weight.t(), torch.empty_like(pre)
        a, h_new = walk.split(pre), walk.split(outputs)

        def step(t: int, h: Tensor) -> tuple[Tensor, ...]:
            return (h_new[t].copy_(self._f(a[t].addmm_(h, transposed))),)

        last, (seen,) = walk.run(step, state)
        return Trace(outputs, last, seen, (self._slope(outputs),))

    def backward(
        self,
        slopes: Sequence[Tensor],
        weight: Tensor,
        walk: Walk,
        carry: list[Tensor],
        grads: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        found = torch.empty_like(slopes[0])
        slope, gates = walk.split(slopes[0]), walk.split(found)

        def step(t: int, h: Tensor) -> None:
            torch.mm(torch.mul(slope[t], h, out=gates[t]), weight, out=h)

        walk.run_back(step, carry, grads)
        return found, found


class _Lstm(_AbstractCell):
    """``c' = f c + i u``, ``h' = o tanh(c')`` (Gers et al., "Learning to Forget", 2000); gates i, f, u, o."""

    def forward(
        self, pre: Tensor, weight: Tensor, bias: Tensor | None, walk: Walk, state: tuple[Tensor, ...]
    ) -> Trace:
        transposed = weight.t()
        outputs, u, c, tanh_c = (pre.new_empty(*pre.shape[:-1], weight.shape[1]) for _ in range(4))
        gates, h_new, u_new, c_new, tanh_new = map(walk.split, (pre, outputs, u, c, tanh_c))
        i, f, u_in, o = map(walk.split, pre.chunk(4, -1))

        def step(t: int, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
            gates[t].addmm_(h, transposed)
            torch.tanh(u_in[t], out=u_new[t])
            gates[t].sigmoid_()  # one call for all four gates; the one of u is not used
            torch.mul(f[t], c, out=c_new[t]).addcmul_(i[t], u_new[t])
            torch.tanh(c_new[t], out=tanh_new[t])
            torch.mul(o[t], tanh_new[t], out=h_new[t])
            return h_new[t], c_new[t]

        last, (seen, c_before) = walk.run(step, state)
        return Trace(outputs, last, seen, self._slopes(pre, u, tanh_c, c_before))

    @staticmethod
    def _slopes(gates: Tensor, u: Tensor, tanh_c: Tensor, c_before: Tensor) -> tuple[Tensor, ...]:
        """Replace the gates by their slopes in place; return them, dc'/dc and dh'/dc'."""
        i, f, of_u, o = gates.chunk(4, -1)
        keep, u_slope, of_c = f.clone(), i * u, o * tanh_c
        torch.addcmul(i, u_slope, u, value=-1, out=u_slope)
        torch.addcmul(o, of_c, tanh_c, value=-1, out=of_c)
        gates.addcmul_(gates, gates, value=-1)  # the derivative of a sigmoid s is s - s^2
        i.mul_(u)
        f.mul_(c_before)
        of_u.copy_(u_slope)
        o.mul_(tanh_c)
        return gates, keep, of_c

    def backward(
        self,
        slopes: Sequence[Tensor],
        weight: Tensor,
        walk: Walk,
        carry: list[Tensor],
        grads: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        found = torch.empty_like(slopes[0])
        gates, keep, of_c = map(walk.split, (found, *slopes[1:]))
        (by_c, by_h), (slope_c, slope_h) = (
            (walk.split(value[..., :3, :]), walk.split(value[..., 3, :]))
            for value in (torch.unflatten(v, -1, (4, weight.shape[1])) for v in (found, slopes[0]))
        )

        def step(t: int, h: Tensor, c: Tensor) -> None:
            c.addcmul_(h, of_c[t])
            torch.mul(slope_c[t], c.unsqueeze(1), out=by_c[t])
            torch.mul(slope_h[t], h, out=by_h[t])
            torch.mm(gates[t], weight, out=h)
            c.mul_(keep[t])

        walk.run_back(step, carry, grads)
        return found, found


class _Gru(_AbstractCell):
    """``n = tanh(a + r (W h + b))``, ``h' = n + z (h - n)`` (Cho et al., arXiv:1406.1078); gates r, z, n."""

    def forward(
        self, pre: Tensor, weight: Tensor, bias: Tensor | None, walk: Walk, state: tuple[Tensor, ...]
    ) -> Trace:
        width, transposed, part = weight.shape[1], weight.t(), torch.empty_like(pre)
        offset = pre.new_zeros(len(weight)) if bias is None else bias
        outputs = pre.new_empty(*pre.shape[:-1], width)
        (a, n), (rz, of_n) = (
            map(walk.split, v.split_with_sizes((2 * width, width), -1)) for v in (pre, part)
        )
        parts, h_new = walk.split(part), walk.split(outputs)

        def step(t: int, h: Tensor) -> tuple[Tensor, ...]:
            torch.addmm(offset, h, transposed, out=parts[t])
            rz[t].add_(a[t]).sigmoid_()
            r, z = rz[t].chunk(2, 1)
            n[t].addcmul_(r, of_n[t]).tanh_()
            torch.lerp(n[t], h, z, out=h_new[t])
            return (h_new[t],)

        last, (seen,) = walk.run(step, state)
        r, z, of_n_all = part.chunk(3, -1)
        slopes = self._slopes(r, z, pre[..., 2 * width :], of_n_all, seen)
        return Trace(outputs, last, seen, slopes, r.clone())

    @staticmethod
    def _slopes(r: Tensor, z: Tensor, n: Tensor, of_n: Tensor, h_before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the concatenated slopes of r, z, the state's part of n, and n; and dh'/dh for fixed gates."""
        rest = 1 - z
        n_slope = torch.addcmul(rest, rest * n, n, value=-1)
        r_slope = torch.addcmul(r, r, r, value=-1).mul_(of_n).mul_(n_slope)
        z_slope = torch.addcmul(z, z, z, value=-1).mul_(h_before - n)
        return torch.cat((r_slope, z_slope, n_slope * r, n_slope), -1), z.clone()

    def backward(
        self,
        slopes: Sequence[Tensor],
        weight: Tensor,
        walk: Walk,
        carry: list[Tensor],
        grads: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        found, width = torch.empty_like(slopes[0]), weight.shape[1]
        by_gate, slope = (walk.split(torch.unflatten(v, -1, (4, width))) for v in (found, slopes[0]))
        of_state, keep = walk.split(found[..., : 3 * width]), walk.split(slopes[1])

        def step(t: int, h: Tensor) -> None:
            torch.mul(slope[t], h.unsqueeze(1), out=by_gate[t])
            h.mul_(keep[t]).addmm_(of_state[t], weight)

        walk.run_back(step, carry, grads)
        of_input = torch.cat((found[..., : 2 * width], found[..., 3 * width :]), -1)
        return of_input, found[..., : 3 * width]


_CELLS: dict[str, _AbstractCell] = {
    "lstm": _Lstm(),
    "gru": _Gru(),
    "tanh": _Plain(torch.tanh, lambda h: 1 - h.square()),
    "relu": _Plain(torch.relu, lambda h: (h > 0).to(h.dtype)),
}
"""Equations by kind of recurrence."""


def run_cell(
    kind: str, pre: Tensor, weight: Tensor, bias: Tensor | None, walk: Walk, state: Sequence[Tensor]
) -> tuple[Trace, tuple[Tensor, ...]]:
    """Run a layer in one direction, as one autograd function.

    Args:
        kind: ``"lstm"``, ``"gru"``, ``"tanh"`` or ``"relu"``.
        pre: Rows of the input's part of the gates, ``G * H`` wide. It is overwritten.
        weight: The state's weight, ``(G * H, H)``.
        bias: The bias of the state's part, ``(G * H,)``; ``None`` if it is included in ``pre``.
        walk: The steps.
        state: The first state, ``(B, H)`` each.

    Returns:
        The trace, outside autograd's graph; and the rows of outputs and the last state, in the graph. A backward pass
        with ``create_graph=True`` raises :class:`UnsupportedModelError`.
    """
    cell = _CELLS[kind]
    with torch.no_grad():
        # .data, not detach(): with detach(), autograd sees the in-place change and replaces pre's node, without hooks.
        trace = cell.forward(pre.data, weight, bias, walk, tuple(state))
    apply: Callable[..., tuple[Tensor, ...]] = _Recurrence.apply  # torch has types here from 2.15
    results = apply(cell, walk, trace, pre, weight, bias, *state)
    return trace, results


class _Recurrence(torch.autograd.Function):
    """Makes the results of a :class:`Trace` differentiable, but not their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: _AbstractCell,
        walk: Walk,
        trace: Trace,
        pre: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.cell, ctx.walk, ctx.state_shape = cell, walk, state[0].shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, trace.seen if ctx.needs_input_grad[4] else None, *trace.slopes)
        return trace.outputs, *trace.last

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None, *last: Tensor | None) -> tuple[Any, ...]:
        # once_differentiable is not enough: it raises only if its node leads to the differentiated inputs.
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                "f needs a second derivative of a recurrent layer (create_graph=True), which its gradient rule does "
                "not support. Use gradient_computer='functional' or 'iterative'."
            )
        weight, seen, *slopes = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            carry = [weight.new_zeros(ctx.state_shape) for _ in last]
            for value, grad in zip(carry, last, strict=True):
                if grad is not None:
                    value.copy_(grad)
            of_input, of_state = ctx.cell.backward(slopes, weight, ctx.walk, carry, grads)
            rows = of_state.flatten(0, -2)
            of_weight = rows.t() @ seen.flatten(0, -2) if ctx.needs_input_grad[4] else None
            of_bias = rows.sum(0) if ctx.needs_input_grad[5] else None
        return None, None, None, of_input, of_weight, of_bias, *carry
