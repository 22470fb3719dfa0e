"""Small float64 trainings, and derivatives by row weights from differences of repeated trainings."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite.unrolled import SGD, Recipe

N, WIDTH, CLASSES, TARGETS = 11, 6, 3, 4


class Dicts(torch.utils.data.Dataset):
    """A dataset of dictionaries."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def vectors(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 6, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(13, (count, 6), generator=generator),)


def mlp(seed):
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, CLASSES)).double()


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def margin(model, batch):
    """One number per row: the logit of the label minus that of the next class."""
    logits = model(batch[0])
    rows = torch.arange(len(logits))
    return logits[rows, batch[1]] - logits[rows, (batch[1] + 1) % CLASSES]


def recipe(model_fn=mlp, loss_fn=loss, data=None, optimizer=None, **settings):
    data = TensorDataset(*vectors(N, 0)) if data is None else data
    optimizer = SGD(lr=0.2) if optimizer is None else optimizer
    return Recipe(model_fn, loss_fn, data, optimizer, **{"batch_size": 4, "epochs": 2, **settings})


def targets(make=vectors):
    return TensorDataset(*make(TARGETS, 1))


def outputs(made, weights, data, function):
    """f of every target after a training with these row weights."""
    model = made.train(weights=weights).model()
    batch = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    with torch.no_grad():
        return function(model, batch).numpy()


def differences(made, rows, data, function, weights=None, h=5e-4):
    """Return df/dw of some rows, (rows, M), from differences of fourth order between repeated trainings."""
    base = np.ones(len(made.rows)) if weights is None else np.asarray(weights, float)

    def at(row, step):
        return outputs(made, base + step * np.eye(len(base))[row], data, function)

    return np.stack(
        [(8 * (at(row, h) - at(row, -h)) - (at(row, 2 * h) - at(row, -2 * h))) / (12 * h) for row in rows]
    )


def drawn(made, count=3, seed=0):
    """Some random train rows."""
    return np.random.default_rng(seed).choice(len(made.rows), count, replace=False)


def changed(made, **settings):
    return replace(made, **settings)
