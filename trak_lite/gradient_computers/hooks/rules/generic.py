"""Per-sample gradients of any operation, by running the operation again.

The first choice is ``vmap`` of the operation's vector-Jacobian product over the samples. If an argument contains the
number of samples, the operation is random, or ``vmap`` has no rule, the operation runs once more on the whole batch and
is differentiated sample by sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from trak_lite.errors import refuse_signal
from trak_lite.gradient_computers.hooks.calls import Contribution, OperationCall
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis, by_sample
from trak_lite.gradient_computers.hooks.plan.recorder import differentiable, is_in_place, written


def generic_rule(
    call: OperationCall, grads: Sequence[Tensor | None]
) -> tuple[str, list[tuple[Tensor, Contribution]]]:
    """Return the method and the contributions to all kept arguments, given the gradients of the results."""
    if call.sliceable and call.random is None:
        # torch raises no narrower type if vmap cannot run an operation. The loop below either gives the right
        # gradients or raises the operation's own error.
        try:
            return "vmap of the operation", _vectorised(call, grads)
        except RuntimeError as error:
            refuse_signal(error)

    def of_sample(grad: Tensor, axis: BatchAxis, sample: int) -> Tensor:
        alone = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        by_sample(alone, axis, call.num_samples)[sample] = by_sample(grad, axis, call.num_samples)[sample]
        return alone

    def alone(sample: int) -> list[Tensor | None]:
        pairs = zip(grads, call.output_axes, strict=True)
        return [None if g is None or axis is None else of_sample(g, axis, sample) for g, axis in pairs]

    return "one backward of the operation per sample", looped(call, range(call.num_samples), alone)


def _opened(call: OperationCall) -> tuple[list[Any], list[int], Callable[..., tuple[Tensor, ...]]]:
    """Return the flat arguments, the indices of those that gradients are kept for, and a function.

    The function takes flat arguments and the kept ones, and returns the differentiable results of the operation.
    """
    leaves, spec = tree_flatten((call.args, dict(call.kwargs)))
    indices = [index for index, leaf in enumerate(leaves) if call.wants(leaf)]

    def run(leaves: Sequence[Any], *wanted: Tensor) -> tuple[Tensor, ...]:
        replaced = list(leaves)
        for index, value in zip(indices, wanted, strict=True):
            replaced[index] = value
        args, kwargs = tree_unflatten(replaced, spec)
        if is_in_place(call.function):
            args = (args[0].clone(), *args[1:])
        return tuple(differentiable(written(call.function, args, call.function(*args, **kwargs))))

    return leaves, indices, run


def _vectorised(call: OperationCall, grads: Sequence[Tensor | None]) -> list[tuple[Tensor, Contribution]]:
    leaves, indices, run = _opened(call)
    batched = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and call.axis_of(leaf) is not None
    ]
    slices = [call.samples(leaves[index]) for index in batched]
    cotangents = [
        by_sample(g, axis, call.num_samples)
        for g, axis in zip(grads, call.output_axes, strict=True)
        if g is not None and axis is not None
    ]
    if len(cotangents) < len(grads):
        raise RuntimeError("a result has no gradient, or no batch axis")

    def one(parts: list[Tensor], cotangent: list[Tensor]) -> tuple[Tensor, ...]:
        replaced = list(leaves)
        for index, part in zip(batched, parts, strict=True):
            replaced[index] = part
        results, pull = vjp(lambda *wanted: run(replaced, *wanted), *(leaves[index] for index in indices))[:2]
        fitted = tuple(c.to(r.dtype).reshape(r.shape) for c, r in zip(cotangent, results, strict=True))
        parts_of_sample: tuple[Tensor, ...] = pull(fitted)
        return parts_of_sample

    with warnings.catch_warnings():
        # vmap warns if it runs an operation slice by slice; this is no slower than the loop.
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        sample_grads = vmap(one)(slices, cotangents)
    return [(leaves[index], value) for index, value in zip(indices, sample_grads, strict=True)]


def looped(
    call: OperationCall, samples: Iterable[int], alone: Callable[[int], Sequence[Tensor | None]]
) -> list[tuple[Tensor, Contribution]]:
    """Run the operation once and differentiate it once per given sample; other samples have gradient zero.

    ``alone`` returns the gradients of the differentiable results for one sample.
    """
    leaves, indices, run = _opened(call)
    with torch.enable_grad(), nullcontext() if call.random is None else call.random.replayed():
        wanted = [leaves[index].detach().requires_grad_() for index in indices]
        results = run(leaves, *wanted)
    totals = [w.new_zeros(call.num_samples, *w.shape) for w in wanted]
    for sample in samples:
        pairs = [(r, g.to(r.dtype)) for r, g in zip(results, alone(sample), strict=True) if g is not None]
        parts = torch.autograd.grad(
            [r for r, _ in pairs], wanted, [g for _, g in pairs], retain_graph=True, allow_unused=True
        )
        for total, part in zip(totals, parts, strict=True):
            if part is not None:
                total[sample] = part
    return [(leaves[index], value) for index, value in zip(indices, totals, strict=True)]
