"""CIFAR-10 with the ResNet-9 of TRAK's quickstart, with group instead of batch normalisation.

torchvision downloads the data on first use. ``source: stand-in`` generates noise of the same shape instead, to try
the whole run in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NUM_STAND_IN = 48
Source = Literal["torchvision", "stand-in"]


@cache
def images_and_labels(source: Source, root: str, part: str) -> tuple[NDArray[np.uint8], list[int]]:
    """Return images ``(N, 32, 32, 3)`` and labels of the ``train`` or ``test`` part."""
    if source == "stand-in":
        rng = np.random.default_rng(["train", "test"].index(part))
        labels = rng.integers(0, 10, NUM_STAND_IN)
        noise = rng.integers(0, 156, (NUM_STAND_IN, 32, 32, 3))
        return (noise + 10 * labels[:, None, None, None]).astype(np.uint8), labels.tolist()
    from torchvision.datasets import CIFAR10

    found = CIFAR10(root, train=part == "train", download=True)
    return found.data, found.targets


def tensors(source: Source, root: str, part: str, count: int | None) -> TensorDataset:
    """Return the first images of a part, normalised, ``(N, 3, 32, 32)``, with their labels."""
    images, labels = images_and_labels(source, root, part)
    pixels = torch.from_numpy(images[:count]).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return TensorDataset((pixels - mean) / std, torch.tensor(labels[:count]))


class Residual(nn.Sequential):
    """Layers whose input is added to their output."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + layers(x)``."""
        return x + super().forward(x)


def conv(c_in: int, c_out: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> nn.Module:
    """Return convolution, group normalisation and ReLU."""
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel, stride, padding, bias=False), nn.GroupNorm(8, c_out), nn.ReLU()
    )


def build_model(width: int = 64) -> nn.Module:
    """Return the ResNet-9.

    Args:
        width: Channels of the first layer, a multiple of 8.
    """
    w = width
    return nn.Sequential(
        conv(3, w),
        conv(w, 2 * w, 5, 2, 2),
        Residual(conv(2 * w, 2 * w), conv(2 * w, 2 * w)),
        conv(2 * w, 4 * w),
        nn.MaxPool2d(2),
        Residual(conv(4 * w, 4 * w), conv(4 * w, 4 * w)),
        conv(4 * w, 2 * w, padding=0),
        nn.AdaptiveMaxPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(2 * w, 10, bias=False),
    )


def train_data(
    source: Source = "torchvision", root: str = "data/cifar10", num_train: int | None = None
) -> TensorDataset:
    """Return the train set.

    Args:
        source: ``torchvision``, or ``stand-in`` for noise.
        root: Folder for the downloaded files.
        num_train: Number of images, from the first; null uses all 50,000.
    """
    return tensors(source, root, "train", num_train)


def target_data(
    source: Source = "torchvision", root: str = "data/cifar10", num_targets: int | None = 1000
) -> TensorDataset:
    """Return test images.

    Args:
        source: ``torchvision``, or ``stand-in`` for noise.
        root: Folder for the downloaded files.
        num_targets: Number of images, from the first; null uses all 10,000.
    """
    return tensors(source, root, "test", num_targets)


def train(
    indices: NDArray[np.int64],
    seed: int,
    *,
    source: Source = "torchvision",
    root: str = "data/cifar10",
    num_train: int | None = None,
    width: int = 64,
    epochs: int = 24,
    num_checkpoints: int = 5,
) -> Iterator[dict[str, Tensor]]:
    """Train on some rows and yield the weights along the run.

    Args:
        indices: Rows of the train set.
        seed: Seed of weights and order.
        source: ``torchvision``, or ``stand-in`` for noise.
        root: Folder for the downloaded files.
        num_train: Number of images.
        width: Channels of the first layer.
        epochs: Passes over the rows.
        num_checkpoints: Number of checkpoints to yield, evenly spaced; the last has the final weights.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = torch.as_tensor(indices)
    images, labels = (tensor[rows].to(device) for tensor in train_data(source, root, num_train).tensors)
    torch.manual_seed(seed)
    model = build_model(width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    batches = -(-len(labels) // 512)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs * batches)
    save_after = set(np.linspace(0, epochs, num_checkpoints + 1).round().astype(int)[1:].tolist())
    for epoch in range(1, epochs + 1):
        for batch in torch.randperm(len(labels), device=device).split(512):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
        if epoch in save_after:
            yield model.state_dict()


def render(index: int, *, source: Source = "torchvision", root: str = "data/cifar10") -> NDArray[np.uint8]:
    """Return the image of a train row, ``(32, 32, 3)``."""
    return images_and_labels(source, root, "train")[0][index]


def render_target(
    index: int, *, source: Source = "torchvision", root: str = "data/cifar10"
) -> NDArray[np.uint8]:
    """Return the image of a target, ``(32, 32, 3)``."""
    return images_and_labels(source, root, "test")[0][index]
