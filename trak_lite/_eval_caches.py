"""Values that a model keeps while it is in eval mode, computed from parameters by an earlier pass."""

from __future__ import annotations

from torch import nn

__all__ = ["drop_eval_caches"]


def drop_eval_caches(model: nn.Module) -> None:
    """Let the modules that override ``train`` drop what they keep in eval mode.

    LeViT and its like compute position biases once and drop them when ``train(True)`` is called. A pass without a graph
    leaves constants behind, so that the parameters' gradients are zero; one with a graph leaves a graph that cannot be
    differentiated again; other weights are loaded and the old biases stay.

    Args:
        model: Modules in eval mode are put into train mode and back; every module ends in the mode it had.
    """
    for module in list(model.modules()):
        if type(module).train is nn.Module.train or module.training:
            continue
        modes = [(inner, inner.training) for inner in module.modules()]
        module.train()
        module.train(False)
        for inner, training in modes:
            inner.training = training
