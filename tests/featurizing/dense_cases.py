"""Scores by dense matrices in float64: plain rows, inverses per block of parameters, and recorded labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from trak_lite import Attributor, Refine, Rows
from trak_lite.errors import StateError
from trak_lite.modelout_functions import resolve_task
from trak_lite.store import ZarrFeatureStore

Array = np.ndarray


def columns(path, table="ckpt-0"):
    with ZarrFeatureStore.open(path, mode="r") as store:
        opened = store.open_table(table)
        return {column.name: opened.read(column.name) for column in opened.spec.columns}


def projection(projector, shapes, model_id=0):
    """The projection as explicit matrices: what it makes of every unit vector."""
    found = {}
    for name, own in shapes.items():
        size = int(np.prod(own))
        units = {other: torch.zeros(size, *shape, dtype=torch.float64) for other, shape in shapes.items()}
        units[name] = torch.eye(size, dtype=torch.float64).view(size, *own)
        found[name] = projector.project(units, model_id).numpy()
    return found


@dataclass
class Plain:
    """Gradients of f that nothing changed, flat in the order of the model."""

    train: Array
    """``(N, P)``."""
    q: Array
    """``(N,)``."""
    targets: Array
    """``(M, P)``."""
    places: dict[str, Array]
    """Columns of every parameter, in its shape."""

    def solved(self, blocks, damping, *, absolute=False):
        """Return (H + lambda)^-1 g' of the targets ``(M, P)``, over blocks of columns and their matrices."""
        found = np.zeros_like(self.targets)
        for places, matrix in blocks:
            own = damping if absolute else damping * np.trace(matrix) / len(matrix)
            if own:  # else no train row has a gradient there
                damped = matrix + own * np.eye(len(matrix))
                found[:, places] = np.linalg.solve(damped, self.targets[:, places].T).T
        return found

    def scores(self, blocks, damping, *, absolute=False):
        """Return q g (H + lambda)^-1 g' ``(N, M)``."""
        return self.q[:, None] * (self.train @ self.solved(blocks, damping, absolute=absolute).T)


def plain_rows(model, task, train, targets, folder):
    made = Attributor(model, task, folder / "plain.zarr", projector="none", dtype="float32", progress=False)
    made.featurize(train)
    made.score(targets, "t", method="GradDot")
    rows = columns(folder / "plain.zarr")
    starts = np.cumsum([0, *(int(np.prod(shape)) for shape in made.parameters.values())])
    places = {
        name: np.arange(start, start + int(np.prod(shape))).reshape(shape)
        for (name, shape), start in zip(made.parameters.items(), starts[:-1], strict=True)
    }
    features = columns(folder / "plain.zarr", "targets/t/ckpt-0")["features"]
    wide = (part.astype(float) for part in (rows["features"], rows["out_to_loss"], features))
    return Plain(*wide, places)


def streamed(model, task, train, targets, method, **settings):
    max_bytes = {"max_bytes": settings.pop("max_bytes")} if "max_bytes" in settings else {}
    made = Attributor(model, task, None, progress=False, **settings)
    return made.stream_scores(train, targets, method=method, **max_bytes)


def scored_in_every_way(model, train, targets, method, path, max_bytes, rtol=1e-4):
    """Scores of stored rows; those of parts of the targets, of candidates and of a reopened store are the same.

    Stored targets are found again without the train data. Returns the scores and what made them, in this order.
    """
    made = Attributor(model, "image_classification", path, projector="none", dtype="float32", progress=False)
    made.featurize(train)
    stored = made.score(Rows(targets, batch_size=2), "t", method=method).numpy()
    parts = streamed(model, "image_classification", train, targets, method, max_bytes=max_bytes)
    refined = made.score(targets, refine=Refine(candidates=len(train), method=method))
    for found in (parts, refined):
        close(found.numpy(), stored, rtol)
    again = Attributor.open(path, model, progress=False)
    np.testing.assert_array_equal(again.scores("t", method=method).numpy(), stored)
    np.testing.assert_array_equal(again.score(targets, "t", method=method).numpy(), stored)
    with pytest.raises(StateError, match=f"{method.name} has to be fitted to the train data"):
        again.score(targets, "new", method=method)
    return stored, made, parts, refined, again


def close(found, expected, rtol=1e-4):
    atol = 0.1 * rtol * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found), expected, rtol=rtol, atol=atol)


def gradients(model, outputs):
    """The gradient of each of the outputs ``(B, *shape)``, by one backward pass each."""
    named = dict(model.named_parameters())
    rows = [torch.autograd.grad(o, [*named.values()], retain_graph=True, allow_unused=True) for o in outputs]
    return {
        name: np.stack([(torch.zeros_like(p) if row[i] is None else row[i]).numpy() for row in rows])
        for i, (name, p) in enumerate(named.items())
    }


def recording(task, monkeypatch, before=lambda drawn: None):
    """A task, and the batches with drawn labels that it has returned; ``before`` may raise."""
    made, drawn = resolve_task(task), list[Any]()
    draw = made.sample_labels

    def sample_labels(*given):
        before(drawn)
        drawn.append(draw(*given))
        return drawn[-1]

    monkeypatch.setattr(made, "sample_labels", sample_labels)
    return made, drawn


def in_batches(data, size):
    return Rows(data, batch_size=size, name="rows")
