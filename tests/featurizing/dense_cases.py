"""Scores by dense matrices in float64: plain rows, inverses per block of parameters, and recorded labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.modelout_functions import AbstractModelOutput, resolve_task
from trak_lite.projectors import AbstractProjector
from trak_lite.store import ZarrFeatureStore

Array = np.ndarray


def columns(path: Path, table: str = "ckpt-0") -> dict[str, Array]:
    """What a table of a store holds, by column."""
    with ZarrFeatureStore.open(path, mode="r") as store:
        opened = store.open_table(table)
        return {column.name: opened.read(column.name) for column in opened.spec.columns}


def projection(
    projector: AbstractProjector, shapes: dict[str, tuple[int, ...]], model_id: int = 0
) -> dict[str, Array]:
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

    def solved(
        self, blocks: Sequence[tuple[Array, Array]], damping: float, *, absolute: bool = False
    ) -> Array:
        """Return (H + lambda)^-1 g' of the targets ``(M, P)``, over blocks of columns and their matrices."""
        found = np.zeros_like(self.targets)
        for places, matrix in blocks:
            own = damping if absolute else damping * np.trace(matrix) / len(matrix)
            if own:  # else no train row has a gradient there
                damped = matrix + own * np.eye(len(matrix))
                found[:, places] = np.linalg.solve(damped, self.targets[:, places].T).T
        return found

    def scores(
        self, blocks: Sequence[tuple[Array, Array]], damping: float, *, absolute: bool = False
    ) -> Array:
        """Return q g (H + lambda)^-1 g' ``(N, M)``."""
        return self.q[:, None] * (self.train @ self.solved(blocks, damping, absolute=absolute).T)


def plain_rows(
    model: nn.Module, task: Any, train: TensorDataset, targets: TensorDataset, folder: Path
) -> Plain:
    """The stored rows without a projection."""
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
    return Plain(
        rows["features"].astype(float), rows["out_to_loss"].astype(float), features.astype(float), places
    )


def streamed(model: nn.Module, task: Any, train: Any, targets: Any, method: Any, **settings: Any) -> Any:
    """Scores without stored rows."""
    max_bytes = {"max_bytes": settings.pop("max_bytes")} if "max_bytes" in settings else {}
    made = Attributor(model, task, None, progress=False, **settings)
    return made.stream_scores(train, targets, method=method, **max_bytes)


def close(found: Any, expected: Array, rtol: float = 1e-4) -> None:
    np.testing.assert_allclose(
        np.asarray(found), expected, rtol=rtol, atol=0.1 * rtol * np.abs(expected).max()
    )


def gradients(model: nn.Module, outputs: Tensor) -> dict[str, Array]:
    """The gradient of each of the outputs ``(B, *shape)``, by one backward pass each."""
    named = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(o, list(named.values()), retain_graph=True, allow_unused=True) for o in outputs
    ]
    return {
        name: np.stack([(torch.zeros_like(p) if row[i] is None else row[i]).numpy() for row in rows])
        for i, (name, p) in enumerate(named.items())
    }


def recording(
    task: str, monkeypatch: pytest.MonkeyPatch, before: Callable[[list[Any]], None] = lambda drawn: None
) -> tuple[AbstractModelOutput, list[Any]]:
    """A task, and the batches with drawn labels that it has returned; ``before`` may raise."""
    made, drawn = resolve_task(task), list[Any]()
    draw = made.sample_labels

    def sample_labels(*given: Any) -> Any:
        before(drawn)
        drawn.append(draw(*given))
        return drawn[-1]

    monkeypatch.setattr(made, "sample_labels", sample_labels)
    return made, drawn


def in_batches(data: Any, size: int) -> Rows:
    return Rows(data, batch_size=size, name="rows")
