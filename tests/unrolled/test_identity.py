"""Stored runs and scores are used again for the same training alone."""

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from torch.utils.data import TensorDataset
from unrolled_cases import CLASSES, WIDTH, N, loss, margin, recipe, replayed, targets, vectors

from trak_lite import Attributor
from trak_lite.errors import ManifestMismatchError, ReadOnlyStoreError, StoreError
from trak_lite.methods import Unrolled
from trak_lite.unrolled import SGD, Adam, TrainingRun, unrolled


def network(activation, p=0.1):
    def build(seed):
        return nn.Sequential(nn.Linear(WIDTH, 7), activation, nn.Dropout(p), nn.Linear(7, CLASSES)).double()

    return build


class Own(nn.GELU):
    """Another class with the same settings."""


BASE = {"model_fn": network(nn.GELU())}
CHANGES = [
    ("data.num_rows", {"data": TensorDataset(*vectors(N + 1, 0))}),
    ("data.tensors", {"data": TensorDataset(*vectors(N, 9))}),
    ("loss", {"loss_fn": lambda model, batch: 2 * loss(model, batch)}),
    ("optimizer.name", {"optimizer": Adam(lr=0.2)}),
    ("optimizer.momentum", {"optimizer": SGD(lr=0.2, momentum=0.1)}),
    ("optimizer.weight_decay", {"optimizer": SGD(lr=0.2, weight_decay=0.1)}),
    ("seed", {"seed": 1}),
    ("steps", {"epochs": 3}),
    ("batch_size", {"batch_size": 5, "epochs": None, "steps": 6}),
    ("accumulate", {"accumulate": 2}),
    ("clip_norm", {"clip_norm": 1.0}),
    ("schedule", {"schedule": lambda step: 1.0}),
    ("trained", {"grad_wrt": ["3.*"]}),
    ("modules", {"model_fn": network(nn.GELU(approximate="tanh"))}),
    ("modules", {"model_fn": network(Own())}),
    ("modules", {"model_fn": network(nn.GELU(), 0.2)}),
    ("modules", {"model_fn": lambda seed: network(nn.GELU())(seed).eval()}),
]


@pytest.mark.parametrize(("part", "change"), CHANGES)
def test_another_training_at_the_same_path_is_refused_and_the_part_is_named(part, change, tmp_path):
    """A repetition would notice most of them too, and would not name them."""
    recipe(**BASE).train(tmp_path)
    with pytest.raises(
        ManifestMismatchError, match=rf" {re.escape(part)}\S* is .* there, .* here.*another folder"
    ):
        recipe(**{**BASE, **change}).train(tmp_path)


@pytest.mark.quick
def test_row_weights_are_a_part_of_the_training_and_ones_are_none(tmp_path):
    run = recipe(**BASE).train(tmp_path)
    with pytest.raises(ManifestMismatchError, match="row_weights"):
        recipe(**BASE).train(tmp_path, weights=np.linspace(0, 1, N))
    again = recipe(**{**BASE, "data": TensorDataset(*vectors(N, 0))}).train(tmp_path, weights=np.ones(N))
    assert again.digest == run.digest


def test_stored_scores_are_found_without_a_replay(tmp_path, monkeypatch):
    """The first and the last stored segment are repeated: once for the run, once for its scores."""
    first = unrolled(recipe(epochs=4).train(tmp_path), targets(), margin, name="few")
    steps, step = [], TrainingRun.step
    monkeypatch.setattr(TrainingRun, "step", lambda run, *args: steps.append(args[1]) or step(run, *args))
    again = unrolled(recipe(epochs=4).train(tmp_path), targets(), margin, name="few")
    assert again.numpy().tobytes() == first.numpy().tobytes()
    assert again.stored
    assert again.settings == first.settings
    assert steps == 2 * [0, 1, 2, 3, 8, 9, 10, 11]


PLAIN = """
import torch
from torch.utils.data import default_collate
from trak_lite import Rows
def loss(model, batch): return entropy(model, batch)
def build(seed): return nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, CLASSES)).double()
def task(model, batch): return margin(model, batch)
schedule, data, optimizer = None, TensorDataset(*vectors(N, 0)), SGD(lr=0.2)
"""
FORWARD = """
def build(seed): return nn.Sequential(nn.Linear(WIDTH, 7), Act(), nn.Linear(7, CLASSES)).double()
"""
EDITS = {
    "global of the loss": "def loss(model, batch): return V * entropy(model, batch)",
    "middle step of a schedule": "def schedule(step): return V if step == 5 else 1.0",
    "late step of the optimizer": (
        "class O(SGD):\n    def update(self, p, g, slots, *, lr, number):\n"
        "        return p - (V if number > 9 else 1.0) * lr * g, {}\noptimizer = O(0.2)"
    ),
    "base class of a module": (
        "class B(nn.Module):\n    def forward(self, x): return torch.tanh(V * x)\nclass Act(B): pass"
        + FORWARD
    ),
    "list of a module": (
        "class Act(nn.Module):\n    def __init__(self): super().__init__(); self.v = [V]\n"
        "    def forward(self, x): return torch.tanh(self.v[0] * x)" + FORWARD
    ),
    "hook of a module": (
        "class Act(nn.GELU):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_forward_hook(lambda module, x, y: V * y)" + FORWARD
    ),
    "buffer": (
        "class Act(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('v', torch.tensor(V), persistent=False)\n"
        "    def forward(self, x): return torch.tanh(self.v * x)" + FORWARD
    ),
    "initial weights": (
        "def build(seed):\n    model = nn.Linear(WIDTH, CLASSES).double()\n"
        "    model.weight.data.mul_(V)\n    return model"
    ),
    "transform of the data": (
        "class D(TensorDataset):\n    def __getitem__(self, index):\n        x, y = super().__getitem__(index)\n"
        "        return V * x, y\ndata = D(*vectors(N, 0))"
    ),
    "collate function": (
        "def collate(samples):\n    x, y = default_collate(samples)\n    return V * x, y\n"
        "data = Rows(TensorDataset(*vectors(N, 0)), collate=collate)"
    ),
    "helper of the task": "def h(): return V\ndef task(model, batch): return h() * margin(model, batch)",
}
"""Each is another part of a training or a task; that each is noticed whatever holds it, retraining tests."""


def edited(edit, value):
    """Return the variables of a module that was written with a value V of what changes."""
    own = {**globals(), "V": value, "entropy": loss, "__name__": "edited"}
    exec(PLAIN + EDITS[edit], own)
    return own


def recipe_of(own, **settings):
    given = {"schedule": own["schedule"], "epochs": 4, **settings}
    return recipe(own["build"], own["loss"], own["data"], own["optimizer"], **given)


def scores_of(run, own):
    return replayed(run, task=own["task"], name="few")


@pytest.mark.parametrize("edit", EDITS)
def test_stored_scores_of_another_training_or_task_are_not_returned(edit, tmp_path):
    """With new objects, which know only what is stored, as another process."""
    old = edited(edit, 1.0)
    made = scores_of(recipe_of(old).train(tmp_path / "run"), old)
    new = edited(edit, 0.5)
    with pytest.raises(ManifestMismatchError):
        scores_of(recipe_of(new).train(tmp_path / "run"), new)
    assert not np.allclose(scores_of(recipe_of(new).train(), new), made, rtol=1e-3)
    same = edited(edit, 1.0)
    assert scores_of(recipe_of(same).train(tmp_path / "run"), same).tobytes() == made.tobytes()


@pytest.mark.parametrize(
    "edit",
    ["late step of the optimizer", "middle step of a schedule", "hook of a module", "helper of the task"],
)
def test_a_run_notices_changes_that_are_made_while_it_is_held(edit, tmp_path):
    own = edited(edit, 1.0)
    run = recipe_of(own).train(tmp_path / "run")
    made = scores_of(run, own)
    own["V"] = 0.5
    with pytest.raises(ManifestMismatchError):
        scores_of(run, own)
    own["V"] = 1.0
    assert scores_of(run, own).tobytes() == made.tobytes()


def test_a_name_of_the_training_stands_for_its_functions(tmp_path):
    """It repeats no step; another name is another training."""
    own = edited("global of the loss", 1.0)
    made = []
    for own["V"] in (1.0, 0.5):
        made.append(scores_of(recipe_of(own, train_id="first").train(tmp_path / "run"), own).tobytes())
    assert made[0] == made[1]
    with pytest.raises(ManifestMismatchError, match="train_id is 'first' there, 'second' here"):
        recipe_of(own, train_id="second").train(tmp_path / "run")


def test_runs_of_other_trainings_have_other_digests_and_scores_in_one_store(tmp_path):
    """The settings of both are the same, as far as they can be told."""
    own = edited("global of the loss", 1.0)
    first = recipe_of(own).train()
    attributor = Attributor(first.model(), margin, tmp_path / "a.zarr", proj_dim=4, progress=False)
    attributor.featurize(own["data"])
    made = attributor.score(targets(), "few", method=Unrolled(first)).numpy()
    own["V"] = 0.5
    with pytest.raises(ManifestMismatchError, match="leads to other weights"):
        attributor.score(targets(), "few", method=Unrolled(first))
    other = recipe_of(own).train()
    assert other.digest != first.digest
    assert np.abs(attributor.score(targets(), "few", method=Unrolled(other)).numpy() - made).max() > 1e-3


@pytest.mark.quick
def test_other_targets_and_tasks_need_another_name(tmp_path):
    run = recipe().train(tmp_path)
    first, others = replayed(run, name="few"), TensorDataset(*vectors(4, 9))

    def doubled(model, batch):
        return 2 * margin(model, batch)

    with pytest.raises(ManifestMismatchError, match="targets"):
        replayed(run, others, name="few")
    with pytest.raises(ManifestMismatchError, match="task"):
        replayed(run, task=doubled, name="few")
    np.testing.assert_allclose(replayed(run, task=doubled, name="twice"), 2 * first, rtol=1e-6)
    assert np.abs(replayed(run, others, name="others") - first).max() > 1e-3
    assert replayed(run, name="few").tobytes() == first.tobytes()


# --- Folders -------------------------------------------------------------------------------------------------
def denied(path, *args, **settings):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    run, opened = recipe().train(tmp_path / "run"), Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", **more: (opened if mode in ("r", "rb") else denied)(path, mode, **more),
    )
    for name in ("mkdir", "replace"):
        monkeypatch.setattr(Path, name, denied)
    for call in (lambda: recipe().train(tmp_path / "other"), lambda: replayed(run), run.metasmoothness):
        with pytest.raises(ReadOnlyStoreError, match=r"Permission denied\. Make the folder writable"):
            call()
    assert recipe().train(tmp_path / "run").digest == run.digest


def test_files_of_a_run_have_the_usual_permissions_and_one_that_may_not_be_read_is_no_damaged_one(
    tmp_path, monkeypatch
):
    run = recipe().train(tmp_path / "run")
    run.metasmoothness()
    (tmp_path / "plain").touch()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "plain").stat().st_mode}
    assert len(files) >= 3
    real = os.open

    def refuse(path, *given, **more):
        return (denied if str(path).endswith(".safetensors") else real)(path, *given, **more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(StoreError, match="right to read"):
        run.model()
