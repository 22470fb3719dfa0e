"""Training of many small models at once: weights stacked, one vmapped gradient per step.

Model k uses only the rows of its mask; its order of rows and initial weights depend on its seed. Elementwise
optimizers treat stacked weights like separate ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from benchmarks.lds.settings import Setting
from trak_lite.modelout_functions import ModelCall

Weights = dict[str, Tensor]


def train(setting: Setting, masks: np.ndarray, seeds: Sequence[int]) -> list[list[Weights]]:
    """Train one model per mask, all at once.

    Args:
        setting: The problem.
        masks: ``(m, N)`` booleans with equal numbers of rows.
        seeds: One seed per model.

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
    step, advance = _stepper(setting, stacked, setting.epochs * steps_per_epoch)
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
            step()
            advance()
        if epoch in setting.checkpoint_epochs:
            for k, checkpoints in enumerate(saved):
                weights = {name: value[k].detach().clone() for name, value in stacked.items()}
                checkpoints.append(weights | _statistics(setting, weights, inputs[np.flatnonzero(masks[k])]))
    return saved


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


def _stepper(setting: Setting, stacked: Weights, steps: int):
    """Return the step of the optimizer, and the schedule of the learning rate: a cosine that falls to zero."""
    settings = {"lr": setting.learning_rate, "weight_decay": setting.weight_decay}
    if setting.optimizer == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            stacked.values(), momentum=setting.momentum, **settings
        )
    else:
        optimizer = torch.optim.AdamW(stacked.values(), **settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return optimizer.step, schedule.step


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
