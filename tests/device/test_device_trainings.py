"""Trainings that are repeated and replayed, and what is made of their scores, on a device and on the CPU."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from device_models import NUM_TARGETS, make
from device_runs import CPU, assert_same, assert_same_on_both, attributor, numbers_in, stored
from torch import nn

from trak_lite import calibrate, calibrated_scores, verify_run
from trak_lite.cli import main
from trak_lite.methods import GradDot, Mean, TracIn, Unrolled
from trak_lite.report import write_report
from trak_lite.unrolled import SGD, Adam, AdamW, Recipe, unrolled

TASK = "image_classification"


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe(where, optimizer=None, *, dropout=False, **settings):
    def model(seed):
        body = make("mlp").model
        return nn.Sequential(nn.Dropout(0.2), body).to(where) if dropout else body.to(where)

    given = {"batch_size": 5, "epochs": 2, **settings}
    return Recipe(model, losses, make("mlp").train, optimizer or SGD(lr=0.1), **given)


def scored(where):
    made, case = attributor("mlp", where)
    made.featurize(case.train)
    return made, case, made.score(case.targets, name="t")


def trainings_and_their_replays(where, folder, optimizer, **settings):
    made = recipe(where, optimizer, **settings)
    trained, again = made.train(folder / where.type), made.train(folder / where.type)
    found = {f"weights {key}": value.numpy(force=True) for key, value in trained.model().state_dict().items()}
    scores = unrolled(again, make("mlp").targets, TASK, block=2, name="t")
    return {**found, "scores": scores.numpy(), "smooth": np.array(trained.metasmoothness())}


def replays_of_a_language_model(where, folder):
    def loss(model, batch):
        logits = model(batch[0])[:, :-1].transpose(1, 2)
        return nn.functional.cross_entropy(logits, batch[0][:, 1:], reduction="none").mean(1)

    case = make("gpt")
    made = Recipe(lambda _: make("gpt").model.to(where), loss, case.train, SGD(lr=0.1), batch_size=7, steps=3)
    return {"scores": unrolled(made.train(), case.targets, lambda *given: -loss(*given)).numpy()}


def scores_of_replays_beside_stored_rows(where, folder):
    made, case, _ = scored(where)
    runs = [recipe(where, seed=seed).train() for seed in (0, 1)]
    several = unrolled(runs, case.targets, TASK)
    found = {"several": several.numpy(), "errors": several.standard_error()}
    for number, method in enumerate((Unrolled(*runs), Mean(GradDot(), Unrolled(runs[0])))):
        found[f"method {number}"] = made.score(case.targets, name="t", method=method).numpy().copy()
    return found


def calibration_by_a_teacher(where, folder):
    _, case, scores = scored(where)
    teacher = unrolled(recipe(where).train(), case.targets, TASK)
    found = calibrate(scores, teacher, num_subsets=20)
    kept = replace(found, kept=True)
    return {"weights": np.array(found.weights), "scores": calibrated_scores(scores, kept)}


def checkpoints_of_a_run(where, folder):
    trained = recipe(where, Adam(lr=0.02)).train(folder / where.type)
    made, case = attributor("mlp", where)
    made.featurize(case.train, trained.checkpoints(2))
    scores = made.score(case.targets, name="t", method=TracIn(learning_rates=(0.1, 0.2)))
    return {**stored(made), "scores": scores.numpy()}


OPTIMIZERS = [
    {"optimizer": SGD(lr=0.1, momentum=0.9), "clip_norm": 0.5},
    {"optimizer": Adam(lr=0.02, eps_root=1e-6), "accumulate": 2, "schedule": lambda step: 1 / (1 + step)},
    {"optimizer": AdamW(lr=0.02, eps_root=1e-6), "dropout": True},
]


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        *((trainings_and_their_replays, settings) for settings in OPTIMIZERS),
        (replays_of_a_language_model, {}),
        (scores_of_replays_beside_stored_rows, {}),
        (calibration_by_a_teacher, {}),
        (checkpoints_of_a_run, {}),
    ],
)
def test_runs_give_what_they_give_on_the_cpu(run, settings, device, tmp_path):
    """Derivatives through several steps carry rounding on."""
    assert_same_on_both(device, lambda where: run(where, tmp_path, **settings), fused=True)


def test_a_run_is_continued_on_another_device(device, tmp_path):
    made, targets = recipe(CPU), make("mlp").targets
    made.train(tmp_path / "run")
    on_device = replace(made, model_fn=lambda seed: make("mlp").model.to(device)).train(tmp_path / "run")
    scores = {"scores": unrolled(on_device, targets, TASK, name="t").numpy()}
    assert_same(scores, {"scores": unrolled(made.train(), targets, TASK).numpy()}, device, fused=True)


def test_verification_by_one_run(device):
    verdicts = []
    for where in (device, CPU):
        trained, case = recipe(where, batch_size=7).train(), make("mlp")
        scores = unrolled(trained, case.targets, TASK)
        verdict = verify_run(scores, trained, case.targets, budget=8, task=TASK)
        verdicts.append(numbers_in(verdict.to_json()))
    np.testing.assert_allclose(*verdicts, rtol=0, atol=1e-3)


def test_reports(device, tmp_path):
    pages = []
    for where in (device, CPU):
        _, case, scores = scored(where)
        inputs = [row[0].to(where).view(2, 5) for row in case.train]
        path = tmp_path / f"{where.type}.html"
        write_report(scores, path, train_render=inputs.__getitem__, target_render="target {}".format)
        scores.gallery([0], k=2)
        pages.append(re.sub(r"data:image/png;base64,[^\"]*", "", path.read_text()))
    assert f"target {NUM_TARGETS - 1}" in pages[0]
    assert len(pages[0]) == pytest.approx(len(pages[1]), rel=0.01)


RECIPE = """
import sys
sys.path.insert(0, {here!r})
import torch
from device_models import make

DEVICE = torch.device({device!r})

def build_model():
    return make("mlp").model.to(DEVICE)

def train_data():
    return make("mlp").train

def target_data():
    return make("mlp").targets

def training():
    from test_device_trainings import SGD, recipe
    return recipe(DEVICE, SGD(lr=0.5), batch_size=7)

def train(indices, seed):
    from device_runs import retraining
    yield retraining(make("mlp"), DEVICE)(indices, seed).state_dict()

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
    assert said[0] == said[1] != []
