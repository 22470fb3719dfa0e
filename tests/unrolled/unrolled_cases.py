"""Small float64 trainings, and derivatives by row weights from differences of repeated trainings."""

import copy
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from trak_lite.unrolled import SGD, Recipe, unrolled

N, WIDTH, CLASSES, TARGETS = 11, 6, 3, 4


class Dicts(Dataset):
    """A dataset of dictionaries, which counts the samples that were loaded."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels, self.loads = inputs, labels, 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.loads += 1
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def vectors(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def halves(count, seed):
    inputs, labels = vectors(count, seed)
    return TensorDataset(inputs.float(), labels)


def mlp(seed, width=7, activation=nn.GELU):
    return nn.Sequential(nn.Linear(WIDTH, width), activation(), nn.Linear(width, CLASSES)).double()


def dropping(seed):
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Dropout(0.4), nn.Linear(9, CLASSES)).double()


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def margin(model, batch):
    """One number per row: the logit of the label minus that of the next class."""
    logits = model(batch[0])
    rows = torch.arange(len(logits))
    return logits[rows, batch[1]] - logits[rows, (batch[1] + 1) % CLASSES]


def dict_margin(model, batch):
    return margin(model, (batch.pop("inputs"), batch.pop("labels")))


def recipe(model_fn=mlp, loss_fn=loss, data=None, optimizer=None, **settings):
    data = TensorDataset(*vectors(N, 0)) if data is None else data
    optimizer = SGD(lr=0.2) if optimizer is None else optimizer
    return Recipe(model_fn, loss_fn, data, optimizer, **{"batch_size": 4, "epochs": 2, **settings})


def targets(count=TARGETS):
    return TensorDataset(*vectors(count, 1))


def replayed(run, data=None, task=margin, **settings):
    return unrolled(run, targets() if data is None else data, task, **settings).numpy()


def differences(made, rows, data=None, function=margin, weights=None, h=5e-4):
    """Return df/dw of some rows, (rows, M), from differences of fourth order between repeated trainings."""
    base = np.ones(len(made.rows)) if weights is None else np.asarray(weights, float)
    data = targets() if data is None else data
    batch = default_collate([data[i] for i in range(len(data))])

    def at(row, step):
        model = made.train(weights=base + step * np.eye(len(base))[row]).model()
        with torch.no_grad():
            return function(model, copy.copy(batch)).numpy()

    slopes = [8 * (at(row, h) - at(row, -h)) - (at(row, 2 * h) - at(row, -2 * h)) for row in rows]
    return np.stack(slopes) / (12 * h)


def assert_close(found, expected, rtol=1e-6):
    """Equal to a relative error; an entry near zero may have that of the median entry."""
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.median(np.abs(expected)))


changed = replace
