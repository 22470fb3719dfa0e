"""Scores of a replay equal derivatives of the real training by its row weights."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from unrolled_cases import (
    CLASSES,
    WIDTH,
    Dicts,
    N,
    assert_close,
    dict_margin,
    differences,
    dropping,
    halves,
    images,
    margin,
    mlp,
    recipe,
    replayed,
    targets,
    vectors,
)

from trak_lite.unrolled import SGD, Adam, AdamW

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")


class Tied(nn.Module):
    """One matrix in two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Unused(nn.Module):
    """Trains without some parameters."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, CLASSES), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.used(inputs)


class Adapter(nn.Module):
    """A frozen layer with a trained product of low rank."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / 3)
        self.lora_b = nn.Parameter(torch.randn(layer.out_features, rank) / 3)

    def forward(self, inputs):
        return self.layer(inputs) + inputs @ self.lora_a.T @ self.lora_b.T


class Transformer(nn.Module):
    """A causal language model with one block; embedding and head are tied."""

    def __init__(self, vocabulary=13, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(6, width)
        self.norm, self.final = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        count, length = ids.shape
        hidden = self.tokens(ids) + self.places(torch.arange(length))
        qkv = self.qkv(self.norm(hidden)).reshape(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(count, length, -1))
        return self.head(self.final(hidden + self.mlp(hidden)))


def cnn(seed):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    ).double()


def normalised(seed):
    """With batch norm in eval mode."""
    norm = nn.BatchNorm1d(6).eval()
    norm.running_var.fill_(2.0)
    return nn.Sequential(nn.Linear(WIDTH, 6), norm, nn.Linear(6, CLASSES)).double()


def tokens(count, seed):
    return TensorDataset(torch.randint(13, (count, 6), generator=torch.Generator().manual_seed(seed)))


def token_losses(model, batch):
    (ids,) = batch
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").reshape(len(ids), -1)


def language_loss(model, batch):
    return token_losses(model, batch).mean(1)


def language_output(model, batch):
    return -token_losses(model, batch).sum(1)


def dict_loss(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="none")


MOMENTUM = SGD(lr=0.1, momentum=0.8, weight_decay=0.01)
CASES = {
    "nesterov": {"optimizer": SGD(lr=0.1, momentum=0.8, nesterov=True)},
    "weight decay": {"optimizer": MOMENTUM},
    "adam": {"optimizer": Adam(lr=0.02, eps_root=1e-6)},
    "adamw": {"optimizer": AdamW(lr=0.02, eps_root=1e-6, weight_decay=0.3)},
    "clipping at some steps": {"optimizer": MOMENTUM, "clip_norm": 0.5},
    "clipping and adam": {"optimizer": AdamW(lr=0.02, eps_root=1e-6), "clip_norm": 0.05},
    "accumulation": {"optimizer": MOMENTUM, "accumulate": 3},
    "row weights": {"optimizer": MOMENTUM, "weights": [1.5, 0.5, 1.3, 0.2, 2.0, 1.0, 0.0, 0.7, 0.0, 1.9, 0.4]},
    "dropout and accumulation": {"model_fn": dropping, "accumulate": 2, "optimizer": MOMENTUM},
    "tied weights": {"model_fn": lambda seed: Tied().double(), "optimizer": MOMENTUM},
    "steps that end inside an epoch": {"epochs": None, "steps": 5, "optimizer": MOMENTUM},
    "fewer steps than an epoch has": {"epochs": None, "steps": 2},
    "batches of one row": {"batch_size": 1, "epochs": 1},
    "a batch larger than the data": {"batch_size": 99, "epochs": 4},
    "last layer": {"grad_wrt": ["2.weight", "2.bias"], "optimizer": MOMENTUM},
    "adapters": {
        "model_fn": lambda seed: nn.Sequential(
            Adapter(nn.Linear(WIDTH, 7)), nn.GELU(), Adapter(nn.Linear(7, CLASSES))
        ).double(),
        "grad_wrt": ["*lora_*"],
        "optimizer": AdamW(lr=0.05, eps_root=1e-6),
    },
    "unused parameters": {"model_fn": lambda seed: Unused().double(), "optimizer": Adam(lr=0.02)},
    "schedule": {"optimizer": MOMENTUM, "schedule": lambda step: 1 / (1 + step)},
    "batch norm in eval mode": {"model_fn": normalised},
    "dict batches": {"data": Dicts(*vectors(N, 0)), "loss_fn": dict_loss},
    "cnn": {"model_fn": cnn, "data": TensorDataset(*images(N, 0)), "optimizer": MOMENTUM},
    "causal language model": {"model_fn": lambda seed: Transformer().double(), "loss_fn": language_loss,
                              "data": tokens(N, 0), "optimizer": AdamW(lr=0.01, eps_root=1e-6), "clip_norm": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_differences_of_repeated_trainings(case):
    settings = dict(CASES[case])
    weights = settings.pop("weights", None)
    made = recipe(**settings)
    data, function = {
        "causal language model": (tokens(4, 1), language_output),
        "cnn": (targets(images), margin),
        "dict batches": (Dicts(*vectors(4, 1)), dict_margin),
    }.get(case, (targets(), margin))
    rows = np.random.default_rng(0).choice(N, 3, replace=False)

    expected = differences(made, rows, data, function, weights)
    assert np.abs(expected).max() > 1e-4
    assert_close(replayed(made.train(weights=weights), data, function)[rows], expected)


@pytest.mark.quick
def test_a_row_that_no_step_uses_has_the_score_zero():
    made = recipe(epochs=None, steps=1)
    used = made.order(0, num_rows=N, seed=0)
    scores = replayed(made.train())
    assert (scores[np.setdiff1d(np.arange(N), used)] == 0).all()
    assert (scores[used] != 0).all()


def training_by_autograd(weights, order, inputs, labels, step):
    """The trained model's outputs as a differentiable function of the row weights, in plain torch."""
    torch.manual_seed(0)
    model = mlp(0)
    values = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    memory = {}
    for number, rows in enumerate(order):
        logits = torch.func.functional_call(model, values, inputs[rows])
        losses = F.cross_entropy(logits, labels[rows], reduction="none")
        gradients = torch.autograd.grad(
            (weights[rows] * losses).mean(), list(values.values()), create_graph=True
        )
        values = {
            name: step(value, gradient, memory.setdefault(name, {}), number + 1)
            for (name, value), gradient in zip(values.items(), gradients, strict=True)
        }
    return lambda *inputs: torch.func.functional_call(model, values, inputs)


def sgd_step(value, gradient, memory, number):
    memory["m"] = 0.8 * memory.get("m", 0.0) + gradient
    return value - 0.1 * memory["m"]


def adam_step(value, gradient, memory, number):
    memory["m"] = 0.9 * memory.get("m", 0.0) + 0.1 * gradient
    memory["v"] = 0.99 * memory.get("v", 0.0) + 0.01 * gradient**2
    root = (memory["v"] / (1 - 0.99**number) + 1e-6).sqrt()
    return value - 0.02 * memory["m"] / (1 - 0.9**number) / (root + 1e-8)


STEPS = {
    "sgd": (sgd_step, SGD(lr=0.1, momentum=0.8)),
    "adam": (adam_step, Adam(lr=0.02, betas=(0.9, 0.99), eps_root=1e-6)),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", STEPS)
def test_scores_equal_autograd_through_the_whole_training(name):
    step, optimizer = STEPS[name]
    made = recipe(optimizer=optimizer, epochs=3)
    inputs, labels = vectors(N, 0)
    order = [torch.from_numpy(made.order(i, num_rows=N, seed=0)) for i in range(made.num_steps)]
    weights = torch.ones(N, dtype=torch.float64, requires_grad=True)

    found = margin(training_by_autograd(weights, order, inputs, labels, step), vectors(4, 1))
    expected = torch.stack([torch.autograd.grad(one, weights, retain_graph=True)[0] for one in found], 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = replayed(made.train())
    np.testing.assert_allclose(scores, expected.numpy(), rtol=2e-7, atol=1e-12)


def test_losses_of_float32_models_are_derived_in_float32():
    scores = replayed(recipe(lambda seed: mlp(seed).float(), data=halves(N, 0)).train(), halves(4, 1))
    # Initial weights are drawn in float32 in both.
    np.testing.assert_allclose(scores, replayed(recipe().train()), rtol=1e-3, atol=1e-5)
