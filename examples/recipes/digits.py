"""A small CNN on scikit-learn's digits with 10 % of the train labels flipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite.modelout_functions import ModelCall
from trak_lite.unrolled import SGD, Recipe

NUM_TRAIN = 1500
FLIPPED = 0.10


@cache
def load_data(data_seed: int) -> tuple[TensorDataset, TensorDataset, NDArray[np.bool_]]:
    """Return the train set with flipped labels, the held-out set, and a mask of the flipped train labels."""
    digits = load_digits()
    rng = np.random.default_rng(data_seed)
    order = rng.permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order] / 16.0).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target[order]).long()
    flipped = np.zeros(NUM_TRAIN, dtype=bool)
    flipped[rng.choice(NUM_TRAIN, int(FLIPPED * NUM_TRAIN), replace=False)] = True
    shift = torch.from_numpy(rng.integers(1, 10, NUM_TRAIN))
    train_labels = torch.where(
        torch.from_numpy(flipped), (labels[:NUM_TRAIN] + shift) % 10, labels[:NUM_TRAIN]
    )
    train = TensorDataset(images[:NUM_TRAIN], train_labels)
    return train, TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:]), flipped


def build_model() -> nn.Module:
    """Return a small CNN for 8x8 images, about 20,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 28),
        nn.ReLU(),
        nn.Linear(28, 10),
    )


def train_data(data_seed: int = 0) -> TensorDataset:
    """Return the train set.

    Args:
        data_seed: Seed of the split and of the flipped labels.
    """
    return load_data(data_seed)[0]


def target_data(data_seed: int = 0) -> TensorDataset:
    """Return the held-out set."""
    return load_data(data_seed)[1]


def train(
    indices: NDArray[np.int64], seed: int, *, data_seed: int = 0, epochs: int = 30, num_checkpoints: int = 5
) -> Iterator[dict[str, Tensor]]:
    """Train on some rows and yield the weights along the run.

    Args:
        indices: Rows of the train set.
        seed: Seed of weights and order.
        data_seed: Seed of the split and of the flipped labels.
        epochs: Passes over the rows.
        num_checkpoints: Number of checkpoints to yield, evenly spaced; the last has the final weights.
    """
    rows = torch.as_tensor(indices)
    images, labels = (tensor[rows] for tensor in train_data(data_seed).tensors)
    torch.manual_seed(seed)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    save_after = set(np.linspace(0, epochs, num_checkpoints + 1).round().astype(int)[1:].tolist())
    for epoch in range(1, epochs + 1):
        for batch in torch.randperm(len(labels)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        if epoch in save_after:
            yield model.state_dict()


def training(*, data_seed: int = 0, epochs: int = 30) -> Recipe:
    """Return a training that can be replayed: a small learning rate, GELU and average pooling make it smooth.

    Args:
        data_seed: Seed of the split and of the flipped labels.
        epochs: Passes over the rows.
    """
    return Recipe(
        smooth_model,
        row_losses,
        train_data(data_seed),
        SGD(lr=0.01, momentum=0.9),
        batch_size=50,
        epochs=epochs,
    )


def smooth_model(seed: int) -> nn.Module:
    """Return the CNN with smooth operations; the training seeds its weights."""
    del seed
    smooth = {nn.ReLU: nn.GELU(), nn.MaxPool2d: nn.AvgPool2d(2)}
    return nn.Sequential(*(smooth.get(type(layer), layer) for layer in build_model()))


def row_losses(model: ModelCall, batch: Sequence[Tensor]) -> Tensor:
    """Return the cross-entropy of every row, ``(B,)``."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, reduction="none")


def render(index: int, *, data_seed: int = 0) -> NDArray[np.float32]:
    """Return the image of a train row, ``(8, 8)``, dark on light."""
    return 1 - train_data(data_seed)[index][0][0].numpy()


def render_target(index: int, *, data_seed: int = 0) -> NDArray[np.float32]:
    """Return the image of a target, ``(8, 8)``, dark on light."""
    return 1 - target_data(data_seed)[index][0][0].numpy()


def columns(*, data_seed: int = 0) -> dict[str, Tensor]:
    """Return the label of every train row; the pages of ``serve`` filter by it."""
    return {"label": train_data(data_seed).tensors[1]}


def predict(model: nn.Module, sample: Sequence[Tensor]) -> dict[str, float | int]:
    """Return what the pages of ``serve`` show as the model's output for a sample."""
    image, label = sample
    probabilities = model(image.unsqueeze(0))[0].softmax(0)
    best = int(probabilities.argmax())
    return {"label": int(label), "prediction": best, "its probability": float(probabilities[best])}
