"""Every computer x output function x projector x kernel, end to end, against loops and dense NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from modelout_cases import BUILDERS
from torch import Tensor, nn
from torch.utils.data import Dataset

from trak_lite import Attributor
from trak_lite.data.batches import take_rows
from trak_lite.featurizing.fisher import FisherFits, FisherSettings
from trak_lite.gradient_computers import GRADIENT_COMPUTERS
from trak_lite.modelout_functions import ModelCall
from trak_lite.projectors import PROJECTORS, AbstractProjector
from trak_lite.testing.modelout import ModelOutputCase

K = 6
TRAIN_ROWS, TARGETS = [0, 1, 2, 3], [2, 0]


@pytest.fixture(autouse=True)
def _few_drawn_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is what scores are made of a Fisher gram, not how close that is."""
    monkeypatch.setattr(
        "trak_lite.featurizing.session.FisherSettings", partial(FisherSettings, samples_per_feature=1)
    )


class BatchRows(Dataset[Any]):
    """The samples of a ready-made batch."""

    def __init__(self, batch: Any, rows: list[int]) -> None:
        self.batch, self.rows = batch, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.rows[index])

    def collate(self, rows: list[Tensor]) -> Any:
        return take_rows(self.batch, torch.stack(rows).tolist())


MATRICES: dict[str, dict[str, np.ndarray]] = {}
"""By settings, checkpoint and parameters: a projection depends on nothing else."""


def matrices_of(
    projector: AbstractProjector, shapes: dict[str, tuple[int, ...]], model_id: int
) -> dict[str, np.ndarray]:
    """The projection as explicit matrices: what it makes of every unit vector."""
    key = json.dumps([projector.fingerprint(), shapes, model_id])
    if key not in MATRICES:
        MATRICES[key] = {name: matrix_of(projector, name, shapes, model_id) for name in shapes}
    return MATRICES[key]


def matrix_of(
    projector: AbstractProjector, name: str, shapes: dict[str, tuple[int, ...]], model_id: int
) -> np.ndarray:
    size = int(np.prod(shapes[name]))
    grads = {other: torch.zeros(size, *shape, dtype=torch.float64) for other, shape in shapes.items()}
    grads[name] = torch.eye(size, dtype=torch.float64).reshape(size, *shapes[name])
    return projector.project(grads, model_id).numpy()


def output_of(case: ModelOutputCase) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: case.task.evaluate(ModelCall(model), batch).output


def expected_scores(
    case: ModelOutputCase, states: list[dict[str, Tensor]], attributor: Attributor
) -> np.ndarray:
    """Scores from one gradient at a time, dense matrices and np.linalg."""
    names = list(attributor.parameters)
    per_checkpoint: dict[str, list[np.ndarray]] = {"train": [], "target": [], "q": [], "w": []}
    for model_id, state in enumerate(states):
        case.model.load_state_dict(state)
        singles = [take_rows(case.batch, [row]) for row in TRAIN_ROWS]
        grads = reference.per_sample_gradients(case.model, output_of(case), singles, names)
        matrices = matrices_of(attributor.projector, attributor.parameters, model_id)
        features = reference.features(grads, matrices)
        per_checkpoint["train"].append(features)
        per_checkpoint["target"].append(features[TARGETS])
        terms = [case.task.evaluate(ModelCall(case.model), single) for single in singles]
        per_checkpoint["q"].append(np.array([float(t.out_to_loss_grad) for t in terms]))
        per_checkpoint["w"].append(np.array([float(t.loss_curvature) for t in terms]))
    return native_scores(per_checkpoint, attributor)


def native_scores(per_checkpoint: dict[str, list[np.ndarray]], attributor: Attributor) -> np.ndarray:
    """Segment by segment, q where the kernel has it by default; a Fisher gram as it is kept (see test_fisher)."""
    segments = [(s.start, s.stop) for s in attributor.layout.segments]
    weighting, damping = attributor.kernel.weighting, attributor.kernel.damping
    if weighting != "fisher":
        return reference.kernel_scores(
            *(per_checkpoint[part] for part in ("train", "q", "w", "target")),
            segments=segments,
            damping=damping,
            weighting=weighting,
            where_q="outside" if weighting == "none" else "inside",
        )
    total = np.zeros((len(TRAIN_ROWS), len(TARGETS)))
    for model_id, (train, q, target) in enumerate(
        zip(*(per_checkpoint[part] for part in ("train", "q", "target")), strict=True)
    ):
        with attributor._workspace.reading() as store:
            grams = FisherFits(store).grams(f"ckpt-{model_id}", attributor.layout, device=attributor.device)
        for (start, stop), gram in zip(segments, grams, strict=True):
            matrix = gram.double().numpy()
            if not matrix.any():
                continue  # rows of zeros score nothing, and their kernel has no inverse
            damped = matrix + damping * np.trace(matrix) / (stop - start) * np.eye(stop - start)
            total += q[:, None] * (train[:, start:stop] @ np.linalg.solve(damped, target[:, start:stop].T))
    return total / len(per_checkpoint["q"])


@pytest.mark.parametrize("kernel", ["curvature", "trak"])
@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_scores_equal_the_reference(
    build: Callable[[], ModelOutputCase], computer: str, projector: str, kernel: str
) -> None:
    case = build()
    if kernel == "curvature" and not case.task.has_curvature:
        kernel = "auto"  # "fisher" or "trak": the named error of the other choice has a test of its own
    assert_scores_equal_the_reference(case, gradient_computer=computer, projector=projector, kernel=kernel)


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_scores_with_one_kernel_for_the_whole_row_equal_the_reference(
    build: Callable[[], ModelOutputCase], projector: str
) -> None:
    assert_scores_equal_the_reference(build(), projector=projector, layout="joint")


def assert_scores_equal_the_reference(case: ModelOutputCase, **settings: Any) -> None:
    first = {name: value.clone() for name, value in case.model.state_dict().items()}
    states = [first, {name: value * 0.7 for name, value in first.items()}]
    train, targets = BatchRows(case.batch, TRAIN_ROWS), BatchRows(case.batch, TARGETS)
    attributor = Attributor(
        case.model,
        case.task,
        None,
        proj_dim=K,
        dtype="float32",
        damping=0.1,
        collate=train.collate,
        **settings,
    )

    attributor.featurize(train, checkpoints=states, batch_size=3)
    scores = attributor.score(targets).numpy()

    expected = expected_scores(case, states, attributor)
    assert scores.shape == (len(TRAIN_ROWS), len(TARGETS))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
