"""Values that modules compute from parameters and cache in eval mode."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_CACHES_NOTHING = frozenset({("transformers.modeling_utils", "PreTrainedModel.train")})
"""Module and name of methods that are not called: that of transformers only chooses kernels."""


def has_own_train(module: nn.Module) -> bool:
    """Return whether a change of the mode runs code of the module's class, which may compute or change values."""
    train = type(module).train
    return train is not nn.Module.train and (train.__module__, train.__qualname__) not in _CACHES_NOTHING


def drop_eval_caches(modules: Iterable[nn.Module]) -> None:
    """Make modules that override ``train`` drop the values they cache in eval mode.

    LeViT and similar models compute position biases once and drop them when ``train(True)`` is called. Biases cached
    by a pass without a graph are constants, so the parameters' gradients are zero; those cached with a graph cannot
    be differentiated twice; and cached biases are stale after other weights are loaded.

    Args:
        modules: Those in eval mode are switched to train mode and back; all modes are unchanged afterwards.
    """
    for module in tuple(modules):
        if module.training or not has_own_train(module):
            continue
        modes = [(inner, inner.training) for inner in module.modules()]
        module.train()
        module.train(False)
        for inner, training in modes:
            inner.training = training
