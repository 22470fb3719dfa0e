"""The problems of the benchmark: data, models and training. Shapes: N train rows, M targets.

``digits_mlp`` and ``digits_cnn``: scikit-learn's digits with noise of standard deviation 0.3 and 10 % of the train
labels changed to another class, N = 1200, M = 300 with clean labels. ``python_lm``: a byte-level GPT fine-tuned on
chunks of 20 modules of Python's standard library, N = 600; M = 150 other chunks of the same modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lds import language
from trak_lite.modelout_functions import (
    AbstractModelOutput,
    CausalLanguageModelingModelOutput,
    ImageClassificationModelOutput,
)

NUM_TRAIN, NUM_TARGETS = 1200, 300
NOISE, FLIPPED = 0.3, 0.1


@dataclass(frozen=True, slots=True)
class Setting:
    """One problem: data, model and training."""

    name: str
    task: str
    """Name of trak_lite's model output function, for whoever takes its defaults."""
    measured: Callable[[], AbstractModelOutput]
    """Makes the model output function whose f is the output that scores are to predict."""
    make_model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    """Gives train inputs and labels, target inputs and labels."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of outputs and labels."""
    optimizer: str
    learning_rate: float
    weight_decay: float
    batch_size: int
    epochs: int
    checkpoint_epochs: tuple[int, ...]
    """Ends of the epochs after which the run on all data saves a checkpoint; the last is the final model."""
    subsets: int
    """Half-subsets of the ground truth."""
    stack: int
    """Models that train at once."""


def digest(*arrays: Tensor) -> str:
    """Return a digest of the values, which identifies the cached ground truth."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(str(tuple(array.shape)).encode() + array.numpy().tobytes())
    return found.hexdigest()[:16]


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return noisy images ``(N, 1, 8, 8)`` with labels of which a tenth is wrong, and targets with clean labels."""
    from sklearn.datasets import load_digits

    found, rng = load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(found.target))[: NUM_TRAIN + NUM_TARGETS]
    images = found.images[order] / 16 + NOISE * rng.standard_normal((len(order), 8, 8))
    labels = found.target[order]
    wrong = rng.choice(NUM_TRAIN, int(FLIPPED * NUM_TRAIN), replace=False)
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, len(wrong))) % 10
    x, y = torch.from_numpy(images).float().unsqueeze(1), torch.from_numpy(labels).long()
    return x[:NUM_TRAIN], y[:NUM_TRAIN], x[NUM_TRAIN:], y[NUM_TRAIN:]


@cache
def flipped_rows() -> np.ndarray:
    """Return a mask of the train rows with wrong labels, ``(N,)``."""
    from sklearn.datasets import load_digits

    order = np.random.default_rng(0).permutation(len(load_digits().target))[:NUM_TRAIN]
    return load_digits().target[order] != digits()[1].numpy()


def mlp() -> nn.Module:
    """Return the 64-128-64-10 perceptron."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def cnn() -> nn.Module:
    """Return a small network of two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


_IMAGES = {
    "task": "image_classification",
    "measured": ImageClassificationModelOutput,
    "data": digits,
    "loss": functional.cross_entropy,
    "optimizer": "SGD",
    "weight_decay": 0.0,
    "batch_size": 50,
}
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            name="digits_mlp",
            make_model=mlp,
            learning_rate=0.05,
            epochs=30,
            checkpoint_epochs=(1, 2, 4, 6, 9, 12, 16, 20, 25, 30),
            subsets=160,
            stack=80,
            **_IMAGES,
        ),
        Setting(
            name="digits_cnn",
            make_model=cnn,
            learning_rate=0.05,
            epochs=30,
            checkpoint_epochs=(1, 2, 4, 6, 9, 12, 16, 20, 25, 30),
            subsets=160,
            stack=20,
            **_IMAGES,
        ),
        Setting(
            name="python_lm",
            task="causal_language_modeling",
            measured=partial(CausalLanguageModelingModelOutput, output="margin"),
            make_model=language.pretrained_gpt,
            data=language.chunks,
            loss=language.next_byte_loss,
            optimizer="AdamW",
            learning_rate=2e-3,
            weight_decay=0.01,
            batch_size=10,
            epochs=4,
            checkpoint_epochs=(1, 2, 3, 4),
            subsets=80,
            stack=1,
        ),
    )
}
