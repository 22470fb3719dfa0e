"""Trainings that are looked on: what is stored of them, rows that use up random numbers, and what is left of these."""

import random
from typing import Any

import numpy as np
import torch
from late import Late

from trak_lite.methods import TRAK

zarr = Late("zarr")
EXACT = {
    "projector": "none", "method": TRAK(damping=None, layout="stored"), "dtype": "float32",
    "progress": False,
}  # fmt: skip


def stored_rows(path, checkpoint=0):
    return np.asarray(zarr.open(path, mode="r")[f"ckpt-{checkpoint}/features"][:], dtype=np.float64)


class Restless(torch.utils.data.Dataset[Any]):
    """The same rows at every visit, which use up random numbers of every kind on their way."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        torch.rand(1)
        np.random.rand()  # noqa: NPY002 - the state that others draw from
        random.random()
        return self.rows[index]


def random_states():
    numpy = np.random.get_state()[1].tolist()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), numpy, random.getstate()]
