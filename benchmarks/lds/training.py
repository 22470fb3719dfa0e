"""Training of many small models at once: weights stacked, one vmapped gradient per step.

Model k uses only the rows of its mask; its order of rows and initial weights depend on its seed. Elementwise
optimizers treat stacked weights like separate ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from benchmarks.lds.settings import Setting
from trak_lite.modelout_functions import ModelCall

Weights = dict[str, Tensor]


def train(
    setting: Setting, masks: np.ndarray, seeds: Sequence[int], *, with_optimizer: bool = False
) -> list[list[Any]]:
    """Train one model per mask, all at once.

    Args:
        setting: The problem.
        masks: ``(m, N)`` booleans with equal numbers of rows.
        seeds: One seed per model.
        with_optimizer: Return ``{"model": weights, "optimizer": state dict of AdamW}`` in place of weights.

    Returns:
        For each model its weights at the setting's checkpoints.
    """
    inputs, labels = setting.data()[:2]
    modules = []
    for seed in seeds:
        torch.manual_seed(seed)
        modules.append(setting.make_model())
    # The tied weights of a GPT appear once among its parameters, and stay tied.
    names = [name for name, _ in modules[0].named_parameters()]
    first = stack_module_state(modules)[0]
    stacked = {name: first[name].detach().requires_grad_() for name in names}
    steps_per_epoch = math.ceil(int(masks[0].sum()) / setting.batch_size)
    optimizer, schedule = _optimizer(setting, stacked, setting.epochs * steps_per_epoch)
    gradient = vmap(grad(_loss(setting, _of_batches(modules[0]))))
    orders = [np.random.default_rng((seed, 1)) for seed in seeds]
    saved: list[list[Weights]] = [[] for _ in seeds]
    for epoch in range(1, setting.epochs + 1):
        rows = np.stack(
            [rng.permutation(np.flatnonzero(mask)) for rng, mask in zip(orders, masks, strict=True)]
        )
        for batch in torch.from_numpy(rows).split(setting.batch_size, dim=1):
            for name, value in gradient(dict(stacked), inputs[batch], labels[batch]).items():
                stacked[name].grad = value
            optimizer.step()
            schedule.step()
        if epoch in setting.checkpoint_epochs:
            for k, checkpoints in enumerate(saved):
                weights = {name: value[k].detach().clone() for name, value in stacked.items()}
                weights |= _statistics(setting, weights, inputs[np.flatnonzero(masks[k])])
                if with_optimizer:
                    weights = {"model": weights, "optimizer": _state_of(optimizer, k, names)}
                checkpoints.append(weights)
    return saved


def trained(setting: Setting, masks: np.ndarray, seeds: Sequence[int]) -> list[Weights]:
    """Return the final weights of a model per mask and seed, trained in stacks of masks of one size."""
    found: list[Weights] = [{} for _ in seeds]
    sizes = masks.sum(axis=1)
    for size in np.unique(sizes):
        same = np.flatnonzero(sizes == size)
        for start in range(0, len(same), setting.stack):
            some = same[start : start + setting.stack].tolist()
            for place, run in zip(some, train(setting, masks[some], [seeds[i] for i in some]), strict=True):
                found[place] = run[-1]
    return found


def _of_batches(module: nn.Module) -> nn.Module:
    """Make batch norms use the statistics of each batch alone: a stack of models cannot share running ones."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean = part.running_var = part.num_batches_tracked = None
    return module


@torch.no_grad()
def _statistics(setting: Setting, weights: Weights, inputs: Tensor) -> Weights:
    """Return the buffers of batch norms, from one pass over all rows of a model."""
    module = setting.make_model().train()
    if not list(module.buffers()):
        return {}
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 1.0
    module.load_state_dict(weights, strict=False)  # names of buffers are missing
    module(inputs)
    return {name: value.clone() for name, value in module.named_buffers()}


def _loss(setting: Setting, module):
    def loss(weights: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        return setting.loss(functional_call(module, weights, (inputs,), tie_weights=True), labels)

    return loss


def _optimizer(setting: Setting, stacked: Weights, steps: int):
    """Return the optimizer, and the schedule of the learning rate: a cosine that falls to zero."""
    settings = {"lr": setting.learning_rate, "weight_decay": setting.weight_decay}
    if setting.optimizer == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            stacked.values(), momentum=setting.momentum, **settings
        )
    else:
        optimizer = torch.optim.AdamW(stacked.values(), **settings)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def _state_of(optimizer: torch.optim.Optimizer, k: int, names: list[str]) -> dict[str, Any]:
    """Return the state dict of the optimizer for one model of the stack."""
    state = optimizer.state_dict()
    own = {
        key: {name: value if value.dim() == 0 else value[k].clone() for name, value in entries.items()}
        for key, entries in state["state"].items()
    }
    return {"state": own, "param_groups": [{**state["param_groups"][0], "param_names": names}]}


@torch.no_grad()
def outputs(setting: Setting, weights: Weights) -> np.ndarray:
    """Return f of every target under the weights, ``(M,)`` float32."""
    task = setting.measured()
    inputs, labels = setting.data()[2:]
    return task.evaluate(ModelCall(_loaded(setting, weights)), (inputs, labels)).output.float().numpy()


@torch.no_grad()
def target_losses(setting: Setting, weights: Weights) -> np.ndarray:
    """Return the loss of every target under the weights, ``(M,)`` float32."""
    inputs, labels = setting.data()[2:]
    return losses(_loaded(setting, weights)(inputs), labels).float().numpy()


def losses(found: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every sample, ``(B,)``, from the outputs of a model.

    It is half the squared error, or the cross-entropy, of a text summed over its tokens.
    """
    if labels.is_floating_point():
        return (found.squeeze(-1) - labels).square() / 2
    if found.dim() == 3:
        return functional.cross_entropy(found[:, :-1].mT, labels[:, 1:], reduction="none").sum(1)
    return functional.cross_entropy(found, labels, reduction="none")


def _loaded(setting: Setting, weights: Weights) -> nn.Module:
    module = setting.make_model().eval()
    module.load_state_dict(weights, strict=False)  # names of tied weights are missing
    return module
