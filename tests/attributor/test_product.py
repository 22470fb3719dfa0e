"""Computers, output functions, projectors and kernels, end to end, against loops and dense NumPy.

Every pair of these occurs, and every computer with every projector on every kind of model.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import reference
import torch
from dense_cases import projection
from modelout_cases import BUILDERS
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from trak_lite import Attributor, Rows
from trak_lite.gradient_computers import GRADIENT_COMPUTERS
from trak_lite.methods import TRAK, GaussNewton
from trak_lite.modelout_functions import ModelCall
from trak_lite.projectors import PROJECTORS

K = 6
TRAIN_ROWS, TARGETS = [0, 1, 2, 3], [2, 0]
USED = {}
"""Projectors and the shapes that they were used with, by settings."""
PLAIN, CURVED = TRAK(damping=0.1, layout="stored"), GaussNewton(damping=0.1)


def take_rows(batch, rows):
    if is_dataclass(batch):
        return replace(batch, **{f.name: take_rows(getattr(batch, f.name), rows) for f in fields(batch)})
    return tree_map(lambda tensor: tensor[rows] if tensor.dim() else tensor, batch)


class BatchRows(Dataset[Any]):
    """The samples of a ready-made batch."""

    def __init__(self, batch, rows):
        self.batch, self.rows = batch, rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(self.rows[index])

    def collate(self, rows):
        return take_rows(self.batch, torch.stack(rows).tolist())


@cache
def matrices_of(key, model_id):
    """The projection as explicit matrices: it depends on nothing but settings, shapes and the checkpoint."""
    projector, shapes = USED[key]
    return projection(projector, shapes, model_id)


def output_of(case):
    return lambda model, batch: case.task.evaluate(ModelCall(model), batch).output


def expected_terms(case, states, attributor):
    """What scores are made from, per checkpoint, from one gradient at a time and dense matrices."""
    names = list(attributor.parameters)
    per_checkpoint: dict[str, list[np.ndarray]] = {"train": [], "target": [], "q": [], "w": []}
    for model_id, state in enumerate(states):
        case.model.load_state_dict(state)
        singles = [take_rows(case.batch, [row]) for row in TRAIN_ROWS]
        grads = reference.per_sample_gradients(case.model, output_of(case), singles, names)
        key = json.dumps([attributor.projector.fingerprint(), attributor.parameters])
        USED[key] = attributor.projector, attributor.parameters
        matrices = matrices_of(key, model_id)
        features = reference.features(grads, matrices)
        per_checkpoint["train"].append(features)
        per_checkpoint["target"].append(features[TARGETS])
        terms = [case.task.evaluate(ModelCall(case.model), single) for single in singles]
        per_checkpoint["q"].append(np.array([float(t.out_to_loss_grad) for t in terms]))
        per_checkpoint["w"].append(np.array([float(t.loss_curvature) for t in terms]))
    return per_checkpoint


def native_scores(per_checkpoint, attributor, method):
    """Segment by segment, q where the method has it by default."""
    return reference.kernel_scores(
        *(per_checkpoint[part] for part in ("train", "q", "w", "target")),
        segments=[(s.start, s.stop) for s in attributor.layout.segments],
        damping=method.kernel.damping,
        weighting=method.weighting,
    )


def first_of_shapes():
    """The first output function of each set of parameter shapes: all that a projector knows of a model."""
    found: dict[str, str] = {}
    for name, build in BUILDERS.items():
        shapes = {key: tuple(value.shape) for key, value in build().model.named_parameters()}
        found.setdefault(str(shapes), name)
    return set(found.values())


FIRST = first_of_shapes()
COMPUTERS = list(GRADIENT_COMPUTERS)
TRIPLES = [
    pytest.param(build, computer, projector, id=f"{name}-{computer}-{projector}")
    for row, (name, build) in enumerate(BUILDERS.items())
    for column, projector in enumerate(PROJECTORS)
    for turn, computer in enumerate(COMPUTERS)
    if name in FIRST or turn == (row + column) % len(COMPUTERS)
]
"""All triples of the first functions, all pairs of the others."""


@pytest.mark.parametrize("layout", ["auto", "joint"])
@pytest.mark.parametrize(("build", "computer", "projector"), TRIPLES)
def test_scores_equal_the_reference(build, computer, projector, layout):
    """Those of the attributor's method, and those of another one that reads the same rows."""
    case, methods = build(), (PLAIN, CURVED) if computer == "functional" else (CURVED, PLAIN)
    settings = {"gradient_computer": computer, "projector": projector, "layout": layout}
    if not case.task.has_curvature:
        methods = (PLAIN,)  # the named error of the other choice has a test of its own
    first = {name: value.clone() for name, value in case.model.state_dict().items()}
    states = [first, {name: value * 0.7 for name, value in first.items()}]
    train, targets = BatchRows(case.batch, TRAIN_ROWS), BatchRows(case.batch, TARGETS)
    settings = {"proj_dim": K, "dtype": "float32", "collate": train.collate, **settings}
    attributor = Attributor(case.model, case.task, None, method=methods[0], **settings)

    attributor.featurize(Rows(train, batch_size=3), checkpoints=states)
    found = [attributor.score(targets).numpy()]
    found += [attributor.score(targets, method=method).numpy() for method in methods[1:]]

    terms = expected_terms(case, states, attributor)
    for method, scores in zip(methods, found, strict=True):
        expected = native_scores(terms, attributor, method)
        assert scores.shape == (len(TRAIN_ROWS), len(TARGETS))
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
