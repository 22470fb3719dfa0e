"""What is decided where nothing is said, and what stores say that were made when other things were decided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from tiny_runs import labelled, perceptron
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.gradient_computers import GRADIENT_COMPUTERS
from trak_lite.methods import TRAK, Fisher
from trak_lite.modelout_functions import CausalLanguageModelingModelOutput
from trak_lite.projectors import CountSketchProjector
from trak_lite.store import open_store

N, M = 30, 4


TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)


def attributor(path: Path | None = None, task: Any = "image_classification", **changes: Any) -> Attributor:
    return Attributor(perceptron(), task, path, **{"proj_dim": 8, "dtype": "float32", **changes})


@pytest.mark.parametrize(
    ("modules", "proj_dim"), [(1, 2048), (3, 2048), (16, 2048), (17, 1024), (75, 256), (600, 64)]
)
def test_the_default_width_of_a_module_falls_with_their_number(modules, proj_dim):
    net = nn.Sequential(*(nn.Linear(50, 50) for _ in range(modules)))
    made = Attributor(net, "regression", None)
    assert made.projector.proj_dim == proj_dim
    assert made.layout.width == modules * proj_dim
    assert Attributor(net, "regression", None, layout="joint").layout.width == 2048
    own = CountSketchProjector(8)  # its layout is its own
    assert Attributor(net, "regression", None, projector=own).layout.width == 8


@pytest.mark.parametrize("products", ["ieee", "tf32"])
@pytest.mark.parametrize("name", sorted(GRADIENT_COMPUTERS))
def test_a_computer_that_is_named_is_asked_for_its_fingerprint_without_being_made(
    name, products, monkeypatch, tmp_path
):
    made = attributor(tmp_path / "a.zarr", gradient_computer=name, float32_products=products)
    made.featurize(TRAIN)
    computer = GRADIENT_COMPUTERS[name](
        model=made.model, task=made.task, grad_dim=1, float32_products=products
    )
    with open_store(str(tmp_path / "a.zarr")) as store:
        stored = store.manifest
    expected = {**computer.fingerprint(), **made.normalization.fingerprint()}
    assert stored.fingerprint["gradients"] == expected
    assert stored.made_with["float32_products"] == computer.float32_products
    made.score(TARGETS, "t")
    monkeypatch.setattr(GRADIENT_COMPUTERS[name], "__init__", None)
    made.drop_scores("t")


@pytest.mark.parametrize(
    "proj_dim", [4, 96]
)  # fewer and more features than rows, which have kernels of their own
@pytest.mark.parametrize("layout", ["module", "joint"])
def test_scores_by_default_are_those_of_the_default_damping_with_q_outside(tmp_path, layout, proj_dim):
    made = attributor(tmp_path / "a.zarr", proj_dim=proj_dim, layout=layout)
    states = perceptron().state_dict()
    made.featurize(TRAIN, [states, {k: -1.5 * v for k, v in states.items()}])
    scores = made.score(TARGETS, "test")
    with open_store(str(tmp_path / "a.zarr")) as store:
        train = [store.open_table(f"ckpt-{c}") for c in range(2)]
        names = ("features", "out_to_loss", "loss_curvature")
        rows, q, w = ([table.read(name).astype(float) for table in train] for name in names)
        targets = [
            store.open_table(f"targets/test/ckpt-{c}").read("features").astype(float) for c in range(2)
        ]
    assert len(made.layout.segments) == (2 if layout == "module" else 1)
    segments = [(s.start, s.stop) for s in made.layout.segments]
    expected = reference.kernel_scores(rows, q, w, targets, segments=segments)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    itself = np.diagonal(reference.kernel_scores(rows, q, w, rows, segments=segments))
    np.testing.assert_allclose(scores.self_influence(), itself, rtol=1e-4, atol=1e-5 * itself.max())


@pytest.mark.quick
def test_q_is_outside_for_methods_with_a_kernel_and_inside_for_sums_of_gradient_products():
    made = attributor()
    made.featurize(TRAIN)
    methods = (TRAK(damping=None), "GradDot", "GaussNewton", "GradCos")
    found = [made.score(TARGETS, method=method).settings["q"] for method in methods]
    assert found == ["outside", "inside", "outside", "off"]


def test_another_method_has_its_own_default_damping_also_after_reopening(tmp_path):
    path, plain = tmp_path / "a.zarr", TRAK(damping=None, layout="stored")
    made = attributor(path, method=Fisher(damping=3.0))
    made.featurize(TRAIN)
    opened = Attributor.open(path, perceptron())
    assert opened.method == made.method == Fisher(damping=3.0)
    assert Attributor.open(path, perceptron(), method="Fisher").method == Fisher()
    assert Attributor.open(path, perceptron(), method=plain).method == plain
    assert Attributor.open(path, perceptron(), method=replace(plain, damping=2.0)).method.damping == 2.0
    assert opened.score(TARGETS, method="GaussNewton").settings["damping"] is None
    assert opened.score(TARGETS).settings["damping"] == 3.0


def test_where_a_kernel_is_too_wide_to_be_fitted_unasked_the_method_is_the_plain_one():
    head = nn.Linear(2, 2100)  # 6300 gradient entries, which "none" keeps
    for projector, method in (("none", TRAK(damping=None, layout="stored")), ("auto", Fisher())):
        assert Attributor(head, "causal_language_modeling", None, projector=projector).method == method


@pytest.mark.quick
def test_a_store_opens_with_the_settings_of_its_task(tmp_path):
    """Also where they were the default of a time, and no longer are."""
    ids = torch.randint(5, (6, 4), generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 5))
    task = CausalLanguageModelingModelOutput(output="margin")
    made = Attributor(net, task, tmp_path / "a.zarr", proj_dim=4)
    made.featurize(TensorDataset(ids, ids))
    opened = Attributor.open(tmp_path / "a.zarr", net)
    assert opened.task.settings() == {"output": "margin", "shift": True}
    assert opened.featurize(TensorDataset(ids, ids)).rows_written == 0
