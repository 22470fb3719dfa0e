"""Modules whose gradients are zero, or too small for float32, add nothing to scores, which stay finite."""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Refine, methods

GENERATOR = torch.Generator().manual_seed(0)
TRAIN, TARGETS = (
    TensorDataset(torch.randn(n, 6, generator=GENERATOR), torch.randint(3, (n,), generator=GENERATOR))
    for n in (20, 4)
)
METHODS = {
    "GaussNewton": methods.GaussNewton(),
    "Fisher": methods.Fisher(),
    "TRAK": methods.TRAK(damping=0.1, layout="stored"),
    "EKFAC": methods.EKFAC(),
    "CG": methods.CG(),
    "LiSSA": methods.LiSSA(damping=30.0, depth=20, rows=10),
    "TracIn": methods.TracIn(),
    "GradCos": methods.GradCos(),
}


class Faint(nn.Module):
    """Logits of two linear layers, of which one is scaled; a third one is dead."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.side, self.dead = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.scale = scale

    def forward(self, x):
        return self.head(x) + self.side(x) * self.scale + torch.relu(self.dead(x) - 1e4)


@cache
def featurized(scale):
    """Every method reads the same rows."""
    return attributor(scale)


@cache
def without(scale):
    return attributor(scale, grad_wrt=["head.*"])


def attributor(scale, **changes):
    settings = {"projector": "none", "dtype": "float32", "progress": False, "layout": "module", **changes}
    made = Attributor(Faint(scale), "image_classification", None, **settings)
    made.featurize(TRAIN)
    return made


@pytest.mark.parametrize("scale", [0.0, 1e-41, 1e-21])
@pytest.mark.parametrize("name", METHODS)
def test_scores_are_those_without_the_vanishing_modules(name, scale):
    found = featurized(scale).score(TARGETS, method=METHODS[name]).numpy()

    assert np.isfinite(found).all()
    if name not in ("Fisher", "LiSSA", "GradCos"):  # labels, vectors or cosines that depend on all modules
        expected = without(scale).score(TARGETS, method=METHODS[name]).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["EKFAC", "CG", "GradCos"])
def test_streamed_and_refined_scores_are_finite(name):
    made = featurized(1e-41)

    assert np.isfinite(made.stream_scores(TRAIN, TARGETS, method=METHODS[name]).numpy()).all()
    refined = made.score(
        TARGETS, method="GaussNewton", refine=Refine(candidates=5, method=METHODS[name])
    ).top(3)
    assert np.isfinite(refined.scores).all()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "modules"), [("GaussNewton", ["'side'", "'dead'"]), ("EKFAC", ["side.weight"])]
)
def test_the_modules_are_named_once(name, modules, caplog):
    made = attributor(1e-21)
    with caplog.at_level(logging.WARNING, "trak_lite"):
        made.score(
            TARGETS, method=METHODS[name], dense=name != "GaussNewton", k=3 if name == "GaussNewton" else None
        )

    (record,) = [one for one in caplog.records if "nothing" in one.message]
    assert all(module in record.message for module in modules)
    assert "head" not in record.message


def test_a_deep_plain_network_has_finite_scores():
    torch.manual_seed(0)
    deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(40)], nn.Linear(4, 3))
    for layer in deep:
        layer.weight.data *= 0.2  # gradients of the first ones are beneath the numbers of float32
    data = TensorDataset(TRAIN.tensors[0][:, :4], TRAIN.tensors[1])
    made = Attributor(deep, "image_classification", None, dtype="float32", progress=False)
    made.featurize(data)

    assert np.isfinite(made.score(data).numpy()).all()
