"""Arrival of gradients in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trak_lite.gradient_computers.hooks.calls import OperationCall
from trak_lite.gradient_computers.hooks.plan.rearranging import flattened

__all__ = ["on_gradients"]

_Arrived = Callable[[Sequence[Tensor | None]], None]


def on_gradients(outputs: Sequence[Tensor], arrived: _Arrived, call: OperationCall | None) -> None:
    """Call ``arrived`` with the gradients of results, after hooks of the model on the results have changed them.

    Args:
        outputs: The differentiable results of one operation, which the model may write into later.
        arrived: Called in the backward pass, in which autograd disables gradients.
        call: The operation; ``None`` for modules and recurrent layers.
    """
    if len(outputs) > 1:
        torch.autograd.graph.register_multi_grad_hook(
            [tensor for tensor in outputs if tensor.requires_grad], arrived, mode="all"
        )
        return
    (result,) = outputs
    base = result._base
    strides: tuple[torch.Size, tuple[int, ...]] | None = None
    if base is not None and call is not None and _is_whole_of_new(result, base, call):
        # A write into a view (`x += y`) replaces its autograd history, so a hook on the view would not be called.
        strides = result.size(), result.stride()
        result = base
    node, place = result.grad_fn, result.output_nr
    assert node is not None

    def take(grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[place]
        if grad is not None:
            arrived((grad if strides is None else grad.contiguous().as_strided(*strides),))

    node.register_prehook(take)  # a tensor's own hook takes three times as long


def _is_whole_of_new(result: Tensor, base: Tensor, call: OperationCall) -> bool:
    """Whether a view covers all of a tensor that the operation itself allocated."""
    if not base.is_contiguous() or base.numel() != result.numel():
        return False
    memory = base.untyped_storage().data_ptr()
    read = (leaf for leaf in flattened(call.args, call.kwargs)[0] if isinstance(leaf, Tensor))
    return all(leaf.untyped_storage().data_ptr() != memory for leaf in read)
