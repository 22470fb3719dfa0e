"""Recurrent layers with factored per-sample gradients: every direction of a layer is one autograd function.

All gates of a step are one affine map of the input and of the previous state. The gradient of the input's part at all
steps therefore determines the gradients of all weights of the layer.

Autograd's graph of an unrolled recurrence has about ten nodes per step, each of which allocates and saves tensors. The
hand-written derivative computes the terms that do not depend on the gradient for all steps at once: the gradient of a
gate's input is a *slope* times the gradient of the state. A backward step is one matrix product and a few in-place
products.

A cell has the equations of one step and their derivative. Its ``forward`` runs all steps on the rows ``pre`` of the
input's part of the gates, which it overwrites, with the weight ``(G * H, H)`` and the bias ``(G * H,)`` of the state's
part; the bias is ``None`` if ``pre`` includes it. Its ``backward`` runs all backward steps by ``run_back``, which is
given a step (:meth:`Steps.run_back`).

Shapes: B samples, T steps, H units, G gates. *Rows* hold all steps and samples: ``(B, T, d)``, ``(T, B, d)`` or, for a
packed sequence, ``(N, d)`` with the steps one after the other; the number of samples per step does not increase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from trak_lite.errors import UnsupportedModelError
from trak_lite.types import FactoredBlock

Tap: TypeAlias = Callable[[Tensor, Sequence[Any], Callable[[Tensor], list[Any]]], Tensor]
"""``tap(value, weights, parts)``: once the gradient of ``value`` is known, ``parts(gradient)`` returns one contribution
per weight. The caller continues with the value that ``tap`` returns."""
_State: TypeAlias = tuple[Tensor, ...]
_RunBack: TypeAlias = Callable[[Callable[..., None]], None]
_Gates: TypeAlias = tuple[Tensor, Tensor]
"""Rows with the gradients of the input's and of the state's part of the gates, ``G * H`` wide."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The time steps of a sequence, and the order in which a recurrence runs them."""

    sizes: list[int]
    """Number of samples at each step."""
    num_samples: int
    order: Tensor | None
    """The sample of each row of a packed sequence, if not the row itself."""
    axis: int | None
    """The axis of the steps in rows; ``None`` if the sequence is packed."""
    backward: bool = False
    """Whether the recurrence starts at the last step."""

    def by_sample(self, rows: Tensor) -> Tensor:
        """Return rows as a contiguous ``(B, T, d)``, with zeros after the end of a sample."""
        if self.axis is not None:
            return rows.movedim(self.axis, 1).contiguous()
        samples = rows.new_zeros(self.num_samples, len(self.sizes), rows.shape[-1])
        for t, (count, step) in enumerate(zip(self.sizes, self.split(rows), strict=True)):
            samples[slice(count) if self.order is None else self.order[:count], t] = step
        return samples

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of every step, first step first."""
        return rows.split_with_sizes(self.sizes) if self.axis is None else rows.unbind(self.axis)

    def run(self, step: Callable[..., _State], state: _State) -> tuple[list[Tensor], list[Tensor]]:
        """Run all steps from the first state, ``(B, H)`` each.

        ``step(t, *state)`` returns the next state of the samples that are still running.

        Returns:
            The last state, ``(B, H)`` each, and rows with the state before every step, in new memory.
        """
        before: list[_State] = []
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
        join: Callable[..., Tensor] = torch.cat if self.axis is None else partial(torch.stack, dim=self.axis)
        return list(state), [join(values) for values in zip(*before, strict=True)]

    def run_back(self, carry: list[Tensor], grads: Tensor | None, step: Callable[..., None]) -> None:
        """Run all steps in reverse order.

        Args:
            carry: The gradient of the last state, ``(B, H)`` each; overwritten with that of the first state.
            grads: The gradient of the outputs.
            step: ``step(t, *carry)`` replaces the gradient of the state after step t by that before it, in place.
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
        steps = range(len(self.sizes))
        return steps[::-1] if self.backward else steps


def _is_packed(args: Sequence[Any]) -> bool:
    return isinstance(args[3], list | tuple)


def num_sequences(args: Sequence[Any]) -> int:
    """Return how many sequences a recurrent operation reads; all packed ones are in the first step."""
    return int(args[1][0]) if _is_packed(args) else int(args[0].shape[int(not args[-1])])


def is_recurrence(kind: str, args: Sequence[Any]) -> bool:
    """Whether a recurrent operation has no projection of its state; raise if it projects that of a packed sequence."""
    state = args[2 if _is_packed(args) else 1]
    if kind != "lstm" or state[0].shape[-1] == state[1].shape[-1]:
        return True
    if _is_packed(args):
        raise UnsupportedModelError(
            "An LSTM with proj_size reads a packed sequence, whose rows hooks cannot assign to samples. Pad the "
            "sequence, or use gradient_computer='iterative'."
        )
    return False


def run_recurrent(kind: str, args: Sequence[Any], *, order: Tensor | None, tap: Tap) -> tuple[Tensor, ...]:
    """Run ``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` or ``torch.rnn_relu``.

    ``order`` is the sample of each row of a packed sequence. ``tap`` is called for each tensor that needs a gradient.
    """
    count = num_sequences(args)
    if _is_packed(args):
        x, sizes, *rest = args
        steps = Steps(sizes.tolist(), count, order, None)
    else:
        x, *rest, batch_first = args
        steps = Steps([count] * x.shape[int(batch_first)], count, None, int(batch_first))
    state, weights, _, layers, dropout, train, bidirectional = rest
    if train and dropout:
        raise UnsupportedModelError(
            "A recurrent layer draws dropout masks between its layers. Call model.eval(), or set its dropout to 0."
        )
    states = list(state) if kind == "lstm" else [state]
    directions = [steps, replace(steps, backward=True)] if bidirectional else [steps]
    per_cell = len(weights) // (layers * len(directions))
    finals: list[Sequence[Tensor]] = []
    for _ in range(layers):
        outputs = []
        for direction in directions:
            cell = len(finals)
            cell_weights = weights[cell * per_cell : (cell + 1) * per_cell]
            out, *final = _run_layer(kind, x, [s[cell] for s in states], cell_weights, direction, tap)
            outputs.append(out)
            finals.append(final)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return (x, *(torch.stack(values) for values in zip(*finals, strict=True)))


def _run_layer(
    kind: str, x: Tensor, state: list[Tensor], weights: Sequence[Tensor], steps: Steps, tap: Tap
) -> _State:
    """Run one layer in one direction; return its outputs and its last state.

    They are in autograd's graph. A backward pass with ``create_graph=True`` raises :class:`UnsupportedModelError`.
    """
    w_in, w_state, *biases = weights
    b_in, b_state = biases or (None, None)
    gru = kind == "gru"  # only a GRU scales the state's part, including its bias, by a gate
    bias = b_in if gru or not biases else torch.add(*biases)
    inputs, version = x.detach(), x._version

    def parts(grad: Tensor) -> list[Any]:
        if inputs._version != version:
            raise UnsupportedModelError(
                "The input of a recurrent layer was changed in place after the layer read it, so its gradient cannot "
                "be formed. Make the later operation out of place (x = x + y, inplace=False)."
            )
        grads = state_grads = steps.by_sample(grad)
        if resets is not None:
            r, z, n = grads.chunk(3, -1)
            state_grads = torch.cat((r, z, n * steps.by_sample(resets)), -1)
        pairs = (inputs, grads), (h_before, state_grads)
        blocks: list[Any] = [FactoredBlock("", steps.by_sample(rows), g) for rows, g in pairs]
        return blocks + ([grads.sum(1), state_grads.sum(1)] if biases else [])

    pre = tap(functional.linear(x, w_in, bias), weights, parts)
    # Autocast rounds the input's part; the recurrence runs in the precision of its state.
    dtype = torch.promote_types(pre.dtype, state[0].dtype)
    offset = b_state.to(dtype) if gru and b_state is not None else None
    pre, w_state, *state = (value.to(dtype) for value in (pre, w_state, *state))
    cell = _CELLS[kind]
    with torch.no_grad():
        # .data, not detach(): with detach(), autograd sees the in-place change and replaces pre's node, without hooks.
        trace = cell.forward(pre.data, w_state, offset, steps, tuple(state))
    h_before, resets = trace.seen, trace.resets  # ``parts`` does not hold the rest
    apply: Callable[..., tuple[Tensor, ...]] = _Recurrence.apply  # torch has types here from 2.15
    return apply(cell, steps, trace, pre, w_state, offset, *state)


class Trace(NamedTuple):
    """Results of a layer in one direction, outside autograd's graph."""

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


@dataclass(frozen=True, slots=True)
class _Plain:
    """``h' = f(a + W h)`` (Elman, "Finding Structure in Time", 1990)."""

    f: Callable[..., Tensor]
    slope: Callable[[Tensor], Tensor]
    """The derivative of f as a function of its value."""

    def forward(self, pre: Tensor, weight: Tensor, bias: Tensor | None, steps: Steps, state: _State) -> Trace:
        transposed, outputs = weight.t(), torch.empty_like(pre)
        a, h_new = steps.split(pre), steps.split(outputs)

        def step(t: int, h: Tensor) -> _State:
            return (h_new[t].copy_(self.f(a[t].addmm_(h, transposed))),)

        last, (h_before,) = steps.run(step, state)
        return Trace(outputs, last, h_before, (self.slope(outputs),))

    def backward(self, slopes: Sequence[Tensor], weight: Tensor, steps: Steps, run_back: _RunBack) -> _Gates:
        grads = torch.empty_like(slopes[0])
        slope, gates = steps.split(slopes[0]), steps.split(grads)

        def step(t: int, h: Tensor) -> None:
            torch.mm(torch.mul(slope[t], h, out=gates[t]), weight, out=h)

        run_back(step)
        return grads, grads


class _Lstm:
    """``c' = f c + i u``, ``h' = o tanh(c')`` (Gers et al., "Learning to Forget", 2000); gates i, f, u, o."""

    def forward(self, pre: Tensor, weight: Tensor, bias: Tensor | None, steps: Steps, state: _State) -> Trace:
        transposed = weight.t()
        outputs, u, c, tanh_c = (pre.new_empty(*pre.shape[:-1], weight.shape[1]) for _ in range(4))
        gates, h_new, u_new, c_new, tanh_new = map(steps.split, (pre, outputs, u, c, tanh_c))
        i, f, u_in, o = map(steps.split, pre.chunk(4, -1))

        def step(t: int, h: Tensor, c: Tensor) -> _State:
            gates[t].addmm_(h, transposed)
            torch.tanh(u_in[t], out=u_new[t])
            gates[t].sigmoid_()  # one call for all four gates; the one of u is not used
            torch.mul(f[t], c, out=c_new[t]).addcmul_(i[t], u_new[t])
            torch.tanh(c_new[t], out=tanh_new[t])
            torch.mul(o[t], tanh_new[t], out=h_new[t])
            return h_new[t], c_new[t]

        last, (h_before, c_before) = steps.run(step, state)
        return Trace(outputs, last, h_before, self._slopes(pre, u, tanh_c, c_before))

    @staticmethod
    def _slopes(gates: Tensor, u: Tensor, tanh_c: Tensor, c_before: Tensor) -> _State:
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

    def backward(self, slopes: Sequence[Tensor], weight: Tensor, steps: Steps, run_back: _RunBack) -> _Gates:
        grads = torch.empty_like(slopes[0])
        gates, keep, of_c = map(steps.split, (grads, *slopes[1:]))
        (by_c, by_h), (slope_c, slope_h) = (
            (steps.split(value[..., :3, :]), steps.split(value[..., 3, :]))
            for value in (torch.unflatten(v, -1, (4, weight.shape[1])) for v in (grads, slopes[0]))
        )

        def step(t: int, h: Tensor, c: Tensor) -> None:
            c.addcmul_(h, of_c[t])
            torch.mul(slope_c[t], c.unsqueeze(1), out=by_c[t])
            torch.mul(slope_h[t], h, out=by_h[t])
            torch.mm(gates[t], weight, out=h)
            c.mul_(keep[t])

        run_back(step)
        return grads, grads


class _Gru:
    """``n = tanh(a + r (W h + b))``, ``h' = n + z (h - n)`` (Cho et al., arXiv:1406.1078); gates r, z, n."""

    def forward(self, pre: Tensor, weight: Tensor, bias: Tensor | None, steps: Steps, state: _State) -> Trace:
        width, transposed, part = weight.shape[1], weight.t(), torch.empty_like(pre)
        offset = pre.new_zeros(len(weight)) if bias is None else bias
        outputs = pre.new_empty(*pre.shape[:-1], width)
        (a, n), (rz, of_n) = (
            map(steps.split, v.split_with_sizes((2 * width, width), -1)) for v in (pre, part)
        )
        parts, h_new = steps.split(part), steps.split(outputs)

        def step(t: int, h: Tensor) -> _State:
            torch.addmm(offset, h, transposed, out=parts[t])
            rz[t].add_(a[t]).sigmoid_()
            r, z = rz[t].chunk(2, 1)
            n[t].addcmul_(r, of_n[t]).tanh_()
            torch.lerp(n[t], h, z, out=h_new[t])
            return (h_new[t],)

        last, (h_before,) = steps.run(step, state)
        r, z, of_n_all = part.chunk(3, -1)
        slopes = self._slopes(r, z, pre[..., 2 * width :], of_n_all, h_before)
        return Trace(outputs, last, h_before, slopes, r.clone())

    @staticmethod
    def _slopes(r: Tensor, z: Tensor, n: Tensor, of_n: Tensor, h_before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the concatenated slopes of r, z, the state's part of n, and n; and dh'/dh for fixed gates."""
        rest = 1 - z
        n_slope = torch.addcmul(rest, rest * n, n, value=-1)
        r_slope = torch.addcmul(r, r, r, value=-1).mul_(of_n).mul_(n_slope)
        z_slope = torch.addcmul(z, z, z, value=-1).mul_(h_before - n)
        return torch.cat((r_slope, z_slope, n_slope * r, n_slope), -1), z.clone()

    def backward(self, slopes: Sequence[Tensor], weight: Tensor, steps: Steps, run_back: _RunBack) -> _Gates:
        grads, width = torch.empty_like(slopes[0]), weight.shape[1]
        by_gate, slope = (steps.split(torch.unflatten(v, -1, (4, width))) for v in (grads, slopes[0]))
        of_state, keep = steps.split(grads[..., : 3 * width]), steps.split(slopes[1])

        def step(t: int, h: Tensor) -> None:
            torch.mul(slope[t], h.unsqueeze(1), out=by_gate[t])
            h.mul_(keep[t]).addmm_(of_state[t], weight)

        run_back(step)
        of_input = torch.cat((grads[..., : 2 * width], grads[..., 3 * width :]), -1)
        return of_input, grads[..., : 3 * width]


_Cell: TypeAlias = _Plain | _Lstm | _Gru
_CELLS: dict[str, _Cell] = {
    "lstm": _Lstm(),
    "gru": _Gru(),
    "tanh": _Plain(torch.tanh, lambda h: 1 - h.square()),
    "relu": _Plain(torch.relu, lambda h: (h > 0).to(h.dtype)),
}
"""Equations by kind of recurrence."""


class _Recurrence(torch.autograd.Function):
    """Makes the results of a :class:`Trace` differentiable, but not their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: _Cell,
        steps: Steps,
        trace: Trace,
        pre: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.cell, ctx.steps, ctx.state_shape = cell, steps, state[0].shape
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
        weight, h_before, *slopes = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            carry = [weight.new_zeros(ctx.state_shape) for _ in last]
            for value, grad in zip(carry, last, strict=True):
                if grad is not None:
                    value.copy_(grad)
            run_back = partial(ctx.steps.run_back, carry, grads)
            of_input, of_state = ctx.cell.backward(slopes, weight, ctx.steps, run_back)
            rows = of_state.flatten(0, -2)
            of_weight = rows.t() @ h_before.flatten(0, -2) if ctx.needs_input_grad[4] else None
            of_bias = rows.sum(0) if ctx.needs_input_grad[5] else None
        return None, None, None, of_input, of_weight, of_bias, *carry
