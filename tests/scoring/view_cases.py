"""Rows that are given: a model whose gradients are drawn numbers, and what they score by plain NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.methods import TRAK, GaussNewton, GradCos, GradDot
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.types import OutputTerms

METHODS = {
    "GaussNewton": partial(GaussNewton, damping=1.0),
    "TRAK": partial(TRAK, damping=1.0, layout="stored"),
    "GradDot": GradDot,
    "GradCos": GradCos,
}
"""Methods that need no fit, with a damping of 1 where they have one, and segments as they are stored."""
KERNELS = ("GaussNewton", "TRAK")
WITH_LAYOUT = ("GaussNewton", "TRAK", "GradCos")
DEFAULT = GaussNewton(damping=1.0)
WIDTHS = (3, 2)


class Given(nn.Module):
    """A sample holds a row of every checkpoint: the one of the present checkpoint is the gradient of the output."""

    def __init__(self, widths):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(width, 1, bias=False) for width in widths)
        self.widths = widths
        self.register_buffer("number", torch.tensor(0))

    def forward(self, rows):
        columns = rows[:, self.number].split(self.widths, dim=1)
        return sum(part(x)[:, 0] for part, x in zip(self.parts, columns, strict=True))


class GivenTerms(AbstractModelOutput):
    """The output of the model; q and w are columns of the samples."""

    def evaluate(self, model_call, batch):
        rows, q, w = batch
        number = model_call.buffers["number"]
        return OutputTerms(model_call(rows), q[:, number], w[:, number])


@dataclass
class Drawn:
    """Features of every checkpoint: train ``(C, N, K)``, targets ``(C, M, K)``, q and w ``(C, N)``."""

    train: np.ndarray
    targets: np.ndarray
    q: np.ndarray
    w: np.ndarray
    widths: tuple[int, ...] = WIDTHS

    def attributor(self, path=None, *, featurized=True, **changes):
        """Return an attributor whose stored rows are those of ``train``."""
        settings = {"projector": "none", "dtype": "float32", "layout": "module", "method": DEFAULT, **changes}
        made = Attributor(Given(self.widths), GivenTerms(), path, progress=False, **settings)
        if featurized:
            self.featurize(made)
        return made

    def samples(self):
        return samples(self.train, self.q, self.w)

    def featurize(self, made, **options):
        state = Given(self.widths).state_dict()
        states = [{**state, "number": torch.tensor(c)} for c in range(len(self.train))]
        made.featurize(Rows(self.samples(), name="train", batch_size=512), states, **options)

    def scores(self, method=None, **options):
        return scores_of(self.attributor(), self.targets, method=method, **options)

    def part(self, checkpoints=slice(None), rows=slice(None), targets=slice(None)):
        """Some checkpoints, train rows and targets, in any order."""
        q, w = self.q[checkpoints][:, rows], self.w[checkpoints][:, rows]
        return Drawn(self.train[checkpoints][:, rows], self.targets[checkpoints][:, targets], q, w)

    def scaled(self, factors):
        columns = np.repeat(factors, self.widths).astype(np.float32)
        return Drawn(self.train * columns, self.targets * columns, self.q, self.w)


def samples(rows, q, w):
    arrays = (rows.swapaxes(0, 1), q.T, w.T)
    return TensorDataset(*(torch.from_numpy(np.ascontiguousarray(a, dtype=np.float32)) for a in arrays))


def scores_of(made, targets, name="test", **options):
    """Score targets that are given as rows ``(C, M, K)``."""
    zeros = np.zeros(targets.shape[:2])
    data = Rows(samples(targets, zeros, zeros), batch_size=512)
    return made.score(data, name, **options)


def drawn(num_checkpoints=3, num_rows=20, num_targets=4, seed=0):
    generator = np.random.default_rng(seed)
    normal = [generator.normal(size=(num_checkpoints, count, 5)) for count in (num_rows, num_targets)]
    uniform = [generator.uniform(0.1, 1, size=(num_checkpoints, num_rows)) for _ in range(2)]
    return Drawn(*(array.astype(np.float32) for array in (*normal, *uniform)))


def checkpoint_products(rows, name="GaussNewton", damping=1.0, joint=False):
    """Return what each checkpoint says without q: ``(C, N, M)``, segment by segment, row by row."""
    ends = np.cumsum(rows.widths)
    segments = [(0, ends[-1])] if joint else [*zip(ends - rows.widths, ends, strict=True)]
    products = np.zeros((len(rows.train), rows.train.shape[1], rows.targets.shape[1]))
    for c in range(len(rows.train)):
        for start, stop in segments:
            x = rows.train[c][:, start:stop].astype(np.float64)
            t = rows.targets[c][:, start:stop].astype(np.float64)
            if name == "GradCos":
                norms = (np.linalg.norm(part, axis=1, keepdims=True) for part in (x, t))
                # Rows of int4 may be zero in a segment.
                x, t = (p / np.where(norm > 0, norm, 1.0) for p, norm in zip((x, t), norms, strict=True))
            inverse = np.eye(stop - start)
            if name in KERNELS:
                weights = rows.w[c].astype(np.float64) if name == "GaussNewton" else np.ones(len(x))
                gram = x.T @ (x * weights[:, None])
                unit = np.trace(gram) / (stop - start) * np.eye(stop - start)
                inverse = np.linalg.inv(gram + damping * unit)
            products[c] += x @ inverse @ t.T
    return products


def with_q(products, rows, q, weights=None):
    """Combine what checkpoints say, by the definition."""
    a = np.full(len(products), 1 / len(products)) if weights is None else np.array(weights)
    mean = rows.q.astype(np.float64).mean(0)[None]
    factors = {"outside": mean, "inside": rows.q, "off": np.ones((1, 1))}[q]
    return np.einsum("c,cnm->nm", a, products * factors[:, :, None])
