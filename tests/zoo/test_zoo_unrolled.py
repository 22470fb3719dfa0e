"""Replays of published architectures equal plain autograd through the whole training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_zoo import architecture
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import default_collate

from benchmarks.whole_path import batch_in_float64, in_float64
from trak_lite import Rows
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.unrolled import SGD, Recipe, unrolled

LR, MOMENTUM, BATCH, EPOCHS, ROWS = 1e-3, 0.9, 2, 2, 4


def collate(samples: list[Any]) -> Any:
    return batch_in_float64(default_collate(samples))


@pytest.mark.filterwarnings("ignore:The training has metasmoothness")
@pytest.mark.parametrize("name", ["resnet50", "distilbert", "lora-vit", "t5", "whisper"])
def test_scores_are_those_of_autograd_through_the_training(name: str) -> None:
    entry = architecture(name)
    task = resolve_task(entry.task)
    train, targets = entry.samples(ROWS, 1), entry.samples(1, 2)

    def losses(model: ModelCall, batch: Any) -> Tensor:
        return torch.nn.functional.softplus(-task.evaluate(model, batch).output / 10)

    recipe = Recipe(
        lambda seed: in_float64(entry.make()),
        losses,
        Rows(train, collate=collate),
        SGD(lr=LR, momentum=MOMENTUM),
        batch_size=BATCH,
        epochs=EPOCHS,
    )
    found = unrolled(recipe.train(), Rows(targets, collate=collate), entry.task).numpy()[:, 0]

    model = in_float64(entry.make())
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    weights = torch.ones(ROWS, dtype=torch.float64, requires_grad=True)

    def call() -> ModelCall:
        return ModelCall(model, {**frozen, **parameters}, dict(model.named_buffers()))

    with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
        for step in range(recipe.num_steps):
            rows = recipe.order(step, num_rows=ROWS, seed=0)
            batch = collate([train[int(row)] for row in rows])
            loss = (losses(call(), batch) * weights[torch.from_numpy(rows)]).mean()
            grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
            for (name, p), g in zip(list(parameters.items()), grads, strict=True):
                momentum[name] = MOMENTUM * momentum[name] + (torch.zeros_like(p) if g is None else g)
                parameters[name] = p - LR * momentum[name]
        output = task.evaluate(call(), collate([targets[0]])).output.sum()
    expected = torch.autograd.grad(output, weights)[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
