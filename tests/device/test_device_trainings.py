"""Trainings that are repeated and replayed, and what is made of their scores, on a device and on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from device_models import NUM_TARGETS, make
from device_runs import assert_same, attributor, numbers_in, stored
from torch import nn

from trak_lite import calibrate, calibrated_scores, verify
from trak_lite.cli import main
from trak_lite.methods import GradDot, Mean, TracIn, Unrolled
from trak_lite.report import write_report
from trak_lite.unrolled import SGD, Adam, AdamW, Recipe, unrolled

CPU = torch.device("cpu")


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe(where, name="mlp", optimizer=None, *, dropout=False, **settings):
    def model(seed):
        body = make(name).model
        return nn.Sequential(nn.Dropout(0.2 * dropout), body).to(where) if dropout else body.to(where)

    optimizer = SGD(lr=0.1) if optimizer is None else optimizer
    return Recipe(model, losses, make(name).train, optimizer, **{"batch_size": 5, "epochs": 2, **settings})


def assert_close_on_both(device, run):
    """Derivatives through several steps carry rounding on."""
    assert_same(run(device), run(CPU), device, fused=True)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (SGD(lr=0.1, momentum=0.9), {"clip_norm": 0.5}),
        (Adam(lr=0.02, eps_root=1e-6), {"accumulate": 2, "schedule": lambda step: 1 / (1 + step)}),
        (AdamW(lr=0.02, eps_root=1e-6), {"dropout": True}),
    ],
    ids=["SGD", "Adam", "AdamW"],
)
def test_trainings_and_their_replays(optimizer, settings, device, tmp_path):
    def run(where):
        path = tmp_path / where.type
        made = recipe(where, optimizer=optimizer, **settings)
        trained = made.train(path)
        again = made.train(path)
        scores = unrolled(again, make("mlp").targets, "image_classification", block=2, name="t")
        found = {
            f"weights {key}": value.numpy(force=True) for key, value in trained.model().state_dict().items()
        }
        return {**found, "scores": scores.numpy(), "smooth": np.array(trained.metasmoothness())}

    assert_close_on_both(device, run)


def test_replays_of_a_language_model(device):
    def run(where):
        case = make("gpt")

        def loss(model, batch):
            ids = batch[0]
            logits = model(ids)[:, :-1].transpose(1, 2)
            return nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)

        def output(model, batch):
            return -loss(model, batch)

        made = Recipe(
            lambda seed: make("gpt").model.to(where), loss, case.train, SGD(lr=0.1), batch_size=7, steps=3
        )
        return {"scores": unrolled(made.train(), case.targets, output).numpy()}

    assert_close_on_both(device, run)


def test_a_run_is_continued_on_another_device(device, tmp_path):
    made = recipe(CPU)
    made.train(tmp_path / "run")
    on_device = replace(made, model_fn=lambda seed: make("mlp").model.to(device)).train(tmp_path / "run")
    scores = unrolled(on_device, make("mlp").targets, "image_classification", name="t").numpy()
    expected = unrolled(made.train(), make("mlp").targets, "image_classification").numpy()
    assert_same({"scores": scores}, {"scores": expected}, device, fused=True)


def test_scores_of_replays_beside_stored_rows(device):
    def run(where):
        made, case = attributor("mlp", where)
        made.featurize(case.train)
        runs = [recipe(where, seed=seed).train() for seed in (0, 1)]
        several = unrolled(runs, case.targets, "image_classification")
        found = {"several": several.numpy(), "errors": several.standard_error()}
        for number, method in enumerate((Unrolled(*runs), Mean(GradDot(), Unrolled(runs[0])))):
            scores = made.score(case.targets, name="t", method=method)
            found[f"method {number}"] = scores.numpy().copy()
        return found

    assert_close_on_both(device, run)


def test_verification_by_one_run(device):
    def run(where):
        trained = recipe(where, batch_size=7).train()
        case = make("mlp")
        scores = unrolled(trained, case.targets, "image_classification")
        verdict = verify(
            scores, trained, case.targets, protocol="one-run", budget=8, task="image_classification"
        )
        return {"verdict": np.array(numbers_in(verdict.to_json()))}

    found, expected = run(device), run(CPU)
    np.testing.assert_allclose(found["verdict"], expected["verdict"], rtol=0, atol=1e-3)


def test_calibration_by_a_teacher(device):
    def run(where):
        made, case = attributor("mlp", where)
        made.featurize(case.train)
        scores = made.score(case.targets, name="t")
        trained = recipe(where).train()
        teacher = unrolled(trained, case.targets, "image_classification")
        found = calibrate(scores, teacher, num_subsets=20)
        kept = replace(found, kept=True)
        return {"weights": np.array(found.weights), "scores": calibrated_scores(scores, kept)}

    assert_close_on_both(device, run)


def test_checkpoints_of_a_run_make_rows(device, tmp_path):
    def run(where):
        trained = recipe(where, optimizer=Adam(lr=0.02)).train(tmp_path / where.type)
        made, case = attributor("mlp", where)
        made.featurize(case.train, trained.checkpoints(2))
        scores = made.score(case.targets, name="t", method=TracIn(learning_rates=(0.1, 0.2)))
        return {**stored(made), "scores": scores.numpy()}

    assert_close_on_both(device, run)


def test_reports(device, tmp_path):
    def run(where):
        made, case = attributor("mlp", where)
        made.featurize(case.train)
        scores = made.score(case.targets, name="t")
        path = write_report(
            scores,
            tmp_path / f"{where.type}.html",
            train_render=lambda row: case.train[row][0].to(where).view(2, 5),
            target_render=lambda row: f"target {row}",
        )
        scores.gallery([0], k=2)
        return path.read_text()

    pages = [re.sub(r"data:image/png;base64,[^\"]*", "", run(where)) for where in (device, CPU)]
    assert f"target {NUM_TARGETS - 1}" in pages[0]
    assert len(pages[0]) == pytest.approx(len(pages[1]), rel=0.01)


RECIPE = """
import sys
sys.path.insert(0, {here!r})
import torch
from torch import nn
from device_models import make

DEVICE = torch.device({device!r})

def build_model():
    return make("mlp").model.to(DEVICE)

def train_data():
    return make("mlp").train

def target_data():
    return make("mlp").targets

def losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

def training():
    from trak_lite.unrolled import SGD, Recipe
    return Recipe(lambda seed: build_model(), losses, train_data(), SGD(lr=0.5), batch_size=7, epochs=2)

def train(indices, seed):
    inputs, labels = (tensor[torch.as_tensor(indices)].to(DEVICE) for tensor in train_data().tensors)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + 0.1 * seed)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        yield model.state_dict()

def render(index):
    return f"row {{index}}"
"""
CONFIG = """\
recipe: recipe.py
path: {folder}/run.zarr
checkpoints: {folder}/trained
task: image_classification
device: {device}
proj_dim: 16
score:
  name: held-out
"""


@pytest.mark.parametrize("command", ["run", "unroll"])
def test_commands(command, device, tmp_path, capsys):
    said = []
    for where in (device, CPU):
        folder = tmp_path / where.type
        folder.mkdir()
        here = str(Path(__file__).parent)
        (folder / "recipe.py").write_text(RECIPE.format(here=here, device=str(where)))
        (folder / "run.yaml").write_text(CONFIG.format(folder=folder, device=where))
        assert main([command, str(folder / "run.yaml")]) == 0
        said.append(re.findall(r"^target \d.*$", capsys.readouterr().out, re.MULTILINE))
    assert said[0] == said[1]
