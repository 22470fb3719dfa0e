"""Values that modules compute from parameters and cache in eval mode."""

from __future__ import annotations

from torch import nn

__all__ = ["drop_eval_caches"]


def drop_eval_caches(model: nn.Module) -> None:
    """Make modules that override ``train`` drop the values they cache in eval mode.

    LeViT and similar models compute position biases once and drop them when ``train(True)`` is called. Biases cached
    by a pass without a graph are constants, so the parameters' gradients are zero; those cached with a graph cannot
    be differentiated twice; and cached biases are stale after other weights are loaded.

    Args:
        model: Modules in eval mode are switched to train mode and back; all modes are unchanged afterwards.
    """
    for module in list(model.modules()):
        if type(module).train is nn.Module.train or module.training:
            continue
        modes = [(inner, inner.training) for inner in module.modules()]
        module.train()
        module.train(False)
        for inner, training in modes:
            inner.training = training
