"""A verdict belongs to the training that it was made with: changed ones are noticed, and processes share the work."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import forkserver
from torch import nn
from torch.utils.data import TensorDataset

import trak_lite
from trak_lite import Attributor
from trak_lite.errors import ManifestMismatchError
from trak_lite.retraining import calibrated
from trak_lite.retraining import subsets as retraining

N, M, BUDGET, RESAMPLES = 24, 5, 6, 20


def dataset(count, seed):
    generator = np.random.default_rng(seed)
    inputs = torch.from_numpy(generator.normal(size=(count, 4)).astype(np.float32))
    return TensorDataset(inputs, torch.from_numpy(generator.integers(3, size=count)))


TRAIN, OTHER_TRAIN, TARGETS = dataset(N, 0), dataset(N, 2), dataset(M, 1)
CALLS = []


def build():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def train(indices, seed, config, data=TRAIN):
    """Take one step, by the rule of least squares: weights that depend on rows, data and learning rate."""
    CALLS.append(indices)
    inputs, labels = data.tensors
    model = build()
    with torch.no_grad():
        wanted = nn.functional.one_hot(labels[indices], 3).float() - model(inputs[indices])
        model.weight += (
            config["lr"] * wanted.T @ (inputs[indices] + config.get("bend", 0.0) * inputs[indices] ** 2)
        )
    return model


LEARNING_RATE = 0.5


def reads_a_global(indices, seed):
    return train(indices, seed, {"lr": LEARNING_RATE})


def helper(indices, seed):
    return train(indices, seed, {"lr": 0.5})


def calls_a_helper(indices, seed):
    return helper(indices, seed)


def other_helper(indices, seed):
    return train(indices, seed, {"lr": -0.1, "bend": 3.0})


class Trainer:
    def __init__(self, lr):
        self.config = {"lr": lr}

    def __call__(self, indices, seed):
        return train(indices, seed, self.config)

    def fit(self, indices, seed):
        return train(indices, seed, self.config)


def closure(lr):
    config = {"lr": lr}

    def fit(indices, seed):
        return train(indices, seed, config)

    return fit


def with_float(indices, seed, lr):
    return train(indices, seed, {"lr": lr})


KINDS = {
    "learning rate in a dict": lambda lr: partial(train, config={"lr": lr}),
    "global variable": lambda lr: reads_a_global,
    "callable object": Trainer,
    "bound method": lambda lr: Trainer(lr).fit,
    "edited helper": lambda lr: calls_a_helper,
    "closure over a dict": closure,
    "another train set": lambda lr: partial(
        train, config={"lr": 0.5}, data=TRAIN if lr == 0.5 else OTHER_TRAIN
    ),
    "learning rate in a partial": lambda lr: partial(with_float, lr=lr),
}


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    monkeypatch.setattr(calibrated, "_NUM_RESAMPLES", RESAMPLES)
    monkeypatch.setattr(retraining, "_confirmed", {})
    CALLS.clear()


def attributor(path):
    return Attributor(build(), "image_classification", path, proj_dim=8, progress=False)


def scored(path):
    made = attributor(path)
    made.featurize(TRAIN)
    made.score(TARGETS, "t")
    return made


def verify(made, train_fn, **settings):
    return trak_lite.verify(made.scores("t"), train_fn, TARGETS, budget=BUDGET, **settings)


def as_another_process(monkeypatch):
    monkeypatch.setattr(retraining, "_confirmed", {})
    CALLS.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_of_another_training_is_not_returned(kind, tmp_path, monkeypatch):
    made, make = scored(tmp_path / "a.zarr"), KINDS[kind]
    verify(made, make(0.5))
    monkeypatch.setitem(globals(), "LEARNING_RATE", -0.1)
    monkeypatch.setitem(globals(), "helper", other_helper)
    CALLS.clear()

    again = verify(made, make(-0.1))

    assert BUDGET <= len(CALLS) <= BUDGET + 2, "one is repeated, twice where nothing known was changed"
    assert again == verify(scored(tmp_path / "b.zarr"), make(-0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_training_trains_nothing_again_and_one_in_another_process(kind, tmp_path, monkeypatch):
    made, make = scored(tmp_path / "a.zarr"), KINDS[kind]
    first = verify(made, make(0.5))
    CALLS.clear()
    assert verify(made, make(0.5)) == first
    assert CALLS == []

    as_another_process(monkeypatch)
    assert verify(attributor(tmp_path / "a.zarr"), make(0.5)) == first
    assert len(CALLS) == 1


def reads_a_file(indices, seed, file):
    return train(indices, seed, {"lr": float(Path(file).read_text())})


@pytest.mark.parametrize("named", [False, True])
def test_a_change_that_nothing_shows_is_found_by_repeating_one_training(named, tmp_path, monkeypatch):
    file = tmp_path / "lr"
    file.write_text("0.5")
    given = {"train_id": "mine"} if named else {}
    made = scored(tmp_path / "a.zarr")
    verify(made, partial(reads_a_file, file=str(file)), **given)
    file.write_text("-0.1")
    as_another_process(monkeypatch)

    if named:
        with pytest.raises(ManifestMismatchError, match=r"another training: repeated for subset 0.*train_id"):
            verify(made, partial(reads_a_file, file=str(file)), **given)
        return
    assert verify(made, partial(reads_a_file, file=str(file))) == verify(
        scored(tmp_path / "b.zarr"), partial(reads_a_file, file=str(file))
    )


def never_the_same(indices, seed):
    model = train(indices, seed, {"lr": 0.5})
    with torch.no_grad():
        model.weight += torch.from_numpy(np.random.default_rng().normal(size=(3, 4)).astype(np.float32))
    return model


def test_a_training_that_is_not_deterministic_is_said_to_be(tmp_path, monkeypatch):
    made = scored(tmp_path / "a.zarr")
    first = verify(made, never_the_same)
    as_another_process(monkeypatch)

    with pytest.warns(
        RuntimeWarning, match="not deterministic: .* give different outputs .*Seed all random numbers"
    ):
        again = verify(attributor(tmp_path / "a.zarr"), never_the_same)

    assert again == first
    assert len(CALLS) == 2


def test_retraining_into_one_path_refuses_another_training(tmp_path):
    masks = np.random.default_rng(0).random((4, N)) < 0.5
    config = {"lr": 0.5}

    def outputs(model):
        return model(TARGETS.tensors[0]).sum(1)

    retraining.retrain(partial(train, config=config), masks, outputs, path=tmp_path / "r")
    config["lr"] = -0.1

    with pytest.raises(ManifestMismatchError, match=r"1 captured values have changed: .*config\.lr"):
        retraining.retrain(partial(train, config=config), masks, outputs, path=tmp_path / "r")


def verify_beside_others(path, log, meeting):
    """Verify in a process of its own; its second training waits for that of the other process."""
    torch.set_num_threads(1)
    calibrated._NUM_RESAMPLES = RESAMPLES
    calls = []

    def meeting_train(indices, seed):
        calls.append(indices)
        with open(log, "a") as file:
            file.write(f"{indices.tolist()}\n")
        if len(calls) == 2:
            meeting.wait(300)
        return train(indices, seed, {"lr": 0.5})

    print(verify(attributor(path), meeting_train, train_id="together").to_json())


def test_two_processes_share_the_retrainings(tmp_path):
    scored(tmp_path / "a.zarr")
    context = forkserver()
    meeting = context.Barrier(2)
    workers = [
        context.Process(
            target=verify_beside_others, args=(str(tmp_path / "a.zarr"), str(tmp_path / "log"), meeting)
        )
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert [worker.exitcode for worker in workers] == [0, 0]
    trained = (tmp_path / "log").read_text().splitlines()
    assert len(set(trained)) == BUDGET
    assert len(trained) <= BUDGET + 1, "at most the first model by both, every other one by one"
    verdict = attributor(tmp_path / "a.zarr").scores("t").verdict
    alone = scored(tmp_path / "b.zarr")
    assert verdict == verify(alone, partial(train, config={"lr": 0.5}))
