"""Stored runs and scores are used again for the same training alone."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from torch.utils.data import TensorDataset
from unrolled_cases import CLASSES, WIDTH, N, loss, margin, recipe, targets, vectors

from trak_lite.errors import InvalidInputError, ManifestMismatchError, ReadOnlyStoreError, StoreError
from trak_lite.unrolled import SGD, Adam, replay, unrolled

pytestmark = pytest.mark.quick


def network(activation, p=0.1):
    def build(seed):
        return nn.Sequential(nn.Linear(WIDTH, 7), activation, nn.Dropout(p), nn.Linear(7, CLASSES)).double()

    return build


def other_loss(model, batch):
    return 2 * loss(model, batch)


def initialised(seed):
    model = network(nn.GELU())(seed)
    nn.init.ones_(model[0].bias)
    return model


BASE = {"model_fn": network(nn.GELU())}
CHANGES = {
    "data": {"data": TensorDataset(*vectors(N, 5))},
    "more data": {"data": TensorDataset(*vectors(N + 1, 0))},
    "loss": {"loss_fn": other_loss},
    "optimizer": {"optimizer": Adam(lr=0.2)},
    "lr": {"optimizer": SGD(lr=0.3)},
    "momentum": {"optimizer": SGD(lr=0.2, momentum=0.1)},
    "seed": {"seed": 1},
    "steps": {"epochs": 3},
    "batch_size": {"batch_size": 5, "epochs": None, "steps": 6},
    "accumulate": {"accumulate": 2},
    "clip_norm": {"clip_norm": 1.0},
    "schedule": {"schedule": lambda step: 1.0},
    "trained": {"grad_wrt": ["3.*"]},
    "weights": {"model_fn": initialised},
    "activation": {"model_fn": network(nn.ReLU())},
    "setting of an activation": {"model_fn": network(nn.GELU(approximate="tanh"))},
    "dropout": {"model_fn": network(nn.GELU(), 0.2)},
    "mode": {"model_fn": lambda seed: network(nn.GELU())(seed).eval()},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    return path, recipe(**BASE).train(path)


@pytest.mark.parametrize("change", CHANGES)
def test_another_training_at_the_same_path_is_refused(trained, change):
    with pytest.raises(ManifestMismatchError, match="another folder"):
        recipe(**{**BASE, **CHANGES[change]}).train(trained[0])


def test_other_row_weights_are_refused(trained):
    with pytest.raises(ManifestMismatchError, match="row_weights"):
        recipe(**BASE).train(trained[0], weights=np.linspace(0, 1, N))


def test_another_forward_pass_of_a_class_of_the_same_name_is_refused(tmp_path):
    def build(power):
        class Net(nn.Linear):
            def forward(self, inputs):
                return super().forward(inputs) if power == 1 else super().forward(inputs) ** 2

        Net.power = power
        return lambda seed: Net(WIDTH, CLASSES).double()

    class Setting(nn.Linear):
        def __init__(self, scale):
            super().__init__(WIDTH, CLASSES)
            self.scale = scale

        def forward(self, inputs):
            return self.scale * super().forward(inputs)

    recipe(lambda seed: Setting(1.0).double()).train(tmp_path)
    with pytest.raises(ManifestMismatchError, match="modules"):
        recipe(lambda seed: Setting(2.0).double()).train(tmp_path)
    with pytest.raises(ManifestMismatchError, match="modules"):
        recipe(build(1)).train(tmp_path)


def test_the_same_training_is_found_in_other_words(trained):
    path, run = trained
    again = recipe(**{**BASE, "data": TensorDataset(*vectors(N, 0))}).train(path, weights=np.ones(N))

    assert again.digest == run.digest


def test_stored_scores_are_found_without_a_replay(tmp_path, monkeypatch):
    run = recipe().train(tmp_path)
    first = unrolled(run, targets(), margin, name="few")
    monkeypatch.setattr(replay, "_Replay", lambda *args, **settings: pytest.fail("a replay"))
    monkeypatch.setattr(type(run), "step", lambda *args: pytest.fail("a step"))

    again = unrolled(recipe().train(tmp_path), targets(), margin, name="few")

    assert again.numpy().tobytes() == first.numpy().tobytes()
    assert again.stored
    assert again.settings == first.settings


def test_other_targets_and_tasks_need_another_name(tmp_path):
    run = recipe().train(tmp_path)
    first = unrolled(run, targets(), margin, name="few").numpy()
    others = TensorDataset(*vectors(4, 9))

    def doubled(model, batch):
        return 2 * margin(model, batch)

    with pytest.raises(ManifestMismatchError, match="targets"):
        unrolled(run, others, margin, name="few")
    with pytest.raises(ManifestMismatchError, match="task"):
        unrolled(run, targets(), doubled, name="few")

    np.testing.assert_allclose(unrolled(run, targets(), doubled, name="twice").numpy(), 2 * first, rtol=1e-6)
    assert np.abs(unrolled(run, others, margin, name="others").numpy() - first).max() > 1e-3
    assert unrolled(run, targets(), margin, name="few").numpy().tobytes() == first.tobytes()


@pytest.mark.parametrize("settings", [{"block": 0}, {"block": 1.5}, {"max_bytes": 0}])
def test_arguments_are_checked_before_a_replay(settings):
    with pytest.raises(InvalidInputError, match=next(iter(settings))):
        unrolled(recipe().train(), targets(), margin, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"accumulate": 0}, "accumulate"),
        ({"epochs": None}, "epochs or steps"),
        ({"steps": 3}, "epochs or steps"),
        ({"epochs": 0}, "epochs"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": -1.0}, "clip_norm"),
    ],
)
def test_settings_of_a_recipe_are_checked(settings, message):
    with pytest.raises(InvalidInputError, match=message):
        recipe(**settings)


@pytest.mark.parametrize("weights", [np.ones(N - 1), np.ones((N, 1)), np.full(N, np.nan)])
def test_row_weights_are_checked(weights):
    with pytest.raises(InvalidInputError, match="one finite number per train row"):
        recipe().train(weights=weights)


class ReadOnly:
    """Refuses to make folders, to write files and to remove them, as a folder without write permission."""

    def __init__(self, monkeypatch):
        real = Path.open

        def refuse(path, *args, **settings):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        def opened(path, mode="r", *args, **settings):
            return real(path, mode, *args, **settings) if mode in ("r", "rb") else refuse(path)

        monkeypatch.setattr(Path, "open", opened)
        monkeypatch.setattr(Path, "mkdir", refuse)
        monkeypatch.setattr(Path, "replace", refuse)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    run = recipe().train(tmp_path / "run")
    ReadOnly(monkeypatch)
    for call in (
        lambda: recipe().train(tmp_path / "other"),
        lambda: unrolled(run, targets(), margin),
        run.metasmoothness,
    ):
        with pytest.raises(ReadOnlyStoreError, match=r"Permission denied\. Make the folder writable"):
            call()
    assert recipe().train(tmp_path / "run").digest == run.digest


def test_files_of_a_run_have_the_usual_permissions(tmp_path):
    run = recipe().train(tmp_path / "run")
    run.metasmoothness()
    plain = tmp_path / "plain"
    plain.touch()

    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {plain.stat().st_mode}
    assert len(files) >= 3


def test_a_state_that_may_not_be_read_is_no_damaged_one(tmp_path, monkeypatch):
    run = recipe().train(tmp_path / "run")

    real = os.open

    def refuse(path, *args, **settings):
        if str(path).endswith(".safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **settings)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(StoreError, match="right to read"):
        run.model()


def test_an_unfinished_run_is_refused(tmp_path):
    run = recipe().train(tmp_path)
    (tmp_path / "states" / f"{run.num_steps:09d}.safetensors").unlink()

    with pytest.raises(InvalidInputError, match="not finished"):
        unrolled(run, targets(), margin)
