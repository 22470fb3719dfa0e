"""A verdict belongs to the training that it was made with: changed ones are noticed, and processes share the work."""

import shutil
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from forked import forkserver
from tiny_runs import labelled
from torch import nn

import trak_lite
from trak_lite import Attributor
from trak_lite.unrolled import SGD, Recipe

N, M, BUDGET, RESAMPLES = 24, 5, 6, 20
DEFAULTS = resolve_name("trak_lite.evaluation.datamodeling:compared_scores").__kwdefaults__
TRAIN, OTHER_TRAIN, TARGETS = labelled(N, 0), labelled(N, 2), labelled(M, 1)
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
        bent = inputs[indices] + config.get("bend", 0.0) * inputs[indices] ** 2
        model.weight += config["lr"] * wanted.T @ bent
    return model


def closure(value):
    def fit(indices, seed):
        return value

    return fit


@dataclass(frozen=True)
class Settings:
    lr: float
    data: torch.Tensor

    def fit(self, indices, seed):
        return self.lr


DIFFERENT = [
    lambda indices, seed: 1,
    lambda indices, seed: 2,
    *map(closure, (1, 1.0, "1", (1, 2), torch.ones(2), torch.zeros(2), np.ones(2), closure(1))),
    partial(closure(1), 1),
    partial(closure(1), seed=1),
    Settings(0.1, torch.ones(2)).fit,
    Settings(0.2, torch.ones(2)).fit,
    Settings(0.1, torch.zeros(2)).fit,
    torch.relu,
    torch.sigmoid,
    nn.Linear,
]


def described(function):
    """What a recipe tells of its loss."""
    return Recipe(build, function, TRAIN, SGD(0.1), batch_size=1, epochs=1).identity()["loss"]


@pytest.mark.quick
def test_other_source_settings_or_data_are_another_training_and_what_changes_while_it_trains_is_not():
    assert len({repr(described(function)) for function in DIFFERENT}) == len(DIFFERENT)
    model, calls, counts = nn.Linear(2, 2), [], {}
    before = [described(closure(thing)) for thing in (model, calls, counts)]
    model.weight.data.add_(1.0)
    calls.append(1)
    counts["a"] = 1
    assert [described(closure(thing)) for thing in (model, calls, counts)] == before

    def again(indices, seed):
        return again(indices, later)  # calls itself, and reads what is not there yet

    before = described(again)
    later = 1
    assert before["values"] == [{"again": before["function"]}, "'empty'"]
    assert described(again)["values"][1] == repr(later)


EDITS = {
    "dict in a partial": "lr = partial(dict.get, {'a': LR}, 'a')",
    "chain of helpers": (
        "".join(f"def h{i}(): return h{i + 1}()\n" for i in range(12)) + "def h12(): return LR\nlr = h0"
    ),
    "closure over a namespace": "def make(ns):\n    return lambda: ns.lr\nlr = make(types.SimpleNamespace(lr=LR))",
    "method of a base class": "class B:\n    def __call__(self): return LR\nclass H(B): pass\nlr = H()",
    "attribute of an object": "class H:\n    def get(self): return self.v\nh = H(); h.v = LR\nlr = h.get",
    "file": "Path(FOLDER, 'r').write_text(str(LR))\ndef lr(): return float(Path(FOLDER, 'r').read_text())",
    "another module": (
        "sys.modules['rates'] = types.SimpleNamespace(v=LR)\ndef lr():\n    import rates\n    return rates.v"
    ),
    "train set": "def lr(): return 0.5\ndata = TRAIN if LR == 0.5 else OTHER_TRAIN",
}


def edited(edit, lr, folder):
    """Return a training whose learning rate comes from a module that was written with this value."""
    own = {"types": types, "Path": Path, **globals(), "data": TRAIN}
    own |= {"FOLDER": str(folder), "__name__": "edited"}
    fit = "def fit(indices, seed): v = float(lr()); return train(indices, seed, {'lr': v, 'bend': v - 0.5}, data)"
    exec(f"{EDITS[edit]}\n{fit}".replace("LR", repr(lr)), own)
    return own["fit"]


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    monkeypatch.setitem(DEFAULTS, "num_resamples", RESAMPLES)
    CALLS.clear()


def attributor(path):
    return Attributor(build(), "image_classification", path, proj_dim=8, progress=False)


def verify(made, train_fn, **settings):
    return trak_lite.verify(made.scores("t"), train_fn, TARGETS, budget=BUDGET, **settings)


@pytest.fixture(scope="module")
def scored_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("scored") / "a.zarr"
    made = attributor(path)
    made.featurize(TRAIN)
    made.score(TARGETS, "t")
    return path


@pytest.fixture
def made(scored_store, tmp_path):
    """An attributor with scores and without retrainings."""
    return attributor(shutil.copytree(scored_store, tmp_path / "a.zarr"))


@pytest.fixture
def other(scored_store, tmp_path):
    """The same in another store."""
    return attributor(shutil.copytree(scored_store, tmp_path / "b.zarr"))


@pytest.mark.parametrize("edit", EDITS)
def test_the_verdict_is_that_of_the_present_training(edit, made, other, tmp_path, monkeypatch):
    """In the same attributor, and in one that is opened later, as by another process."""
    monkeypatch.setitem(sys.modules, "rates", None)
    old = verify(made, edited(edit, 0.5, tmp_path))
    CALLS.clear()
    new = verify(made, edited(edit, -0.1, tmp_path))
    assert BUDGET <= len(CALLS) <= BUDGET + 2, "one is repeated, twice where nothing known was changed"
    assert new == verify(other, edited(edit, -0.1, tmp_path)) != old
    assert verify(attributor(made.path), edited(edit, 0.5, tmp_path)) == old


def test_the_same_training_is_repeated_once_and_not_at_all_by_its_name(made):
    def training():
        return partial(train, config={"lr": 0.5})

    first, named = verify(made, training()), verify(made, training(), train_id="first")
    for one in (made, attributor(made.path)):
        CALLS.clear()
        again = verify(one, training())
        assert again == first
        assert len(CALLS) == 1
        assert "Trained again, to compare: subset 0, seed 0 (12 rows); outputs differ by 0" in str(again)
        assert one.scores("t").verdict.compared == again.compared
        again = verify(one, training(), train_id="first")
        assert again == named == first
        assert len(CALLS) == 1
        assert "train_id 'first' were used; no training was repeated" in str(again)


def noisy(config):
    """A training with noise that its seed does not decide: each call has other noise, the same in every test run."""
    calls = []

    def fit(indices, seed):
        model = train(indices, seed, config)
        calls.append(indices)
        with torch.no_grad():
            noise = np.random.default_rng(len(calls)).normal(size=(3, 4)).astype(np.float32)
            model.weight += config["noise"] * torch.from_numpy(noise)
        return model

    return fit


@pytest.mark.parametrize(("lr", "noise"), [(0.5005, 0.0), (-3.0, 0.01)])
def test_a_small_change_is_noticed_and_one_far_beyond_noise(made, lr, noise):
    training = noisy(config := {"lr": 0.5, "noise": noise})
    verify(made, training)
    config["lr"] = lr
    CALLS.clear()
    verify(made, training)
    assert len(CALLS) == 2 + BUDGET


def test_a_change_for_later_seeds_is_noticed(made):
    """One training is repeated for every seed, each on another subset."""
    config = {"lr": 0.5}

    def later(indices, seed):
        return train(indices, seed, config if seed == 7 else {"lr": 0.5})

    old = verify(made, later, seeds=(3, 5, 7))
    CALLS.clear()
    assert verify(made, later, seeds=(3, 5, 7)) == old
    assert len({tuple(rows) for rows in CALLS}) == len(CALLS) == 3
    config["lr"] = -0.1
    assert verify(made, later, seeds=(3, 5, 7)) != old


def test_a_training_that_is_not_deterministic_is_said_to_be(made):
    training = noisy({"lr": 0.5, "noise": 1.0})
    first = verify(made, training)
    CALLS.clear()
    said = "not deterministic: .* give different outputs .*Seed all random numbers"
    with pytest.warns(RuntimeWarning, match=said):
        again = verify(attributor(made.path), training)
    assert again == first
    assert len(CALLS) == 2


def verify_beside_others(path, log, meeting):
    """Verify in a process of its own; its second training waits for that of the other process."""
    torch.set_num_threads(1)
    DEFAULTS["num_resamples"] = RESAMPLES
    calls = []

    def meeting_train(indices, seed):
        calls.append(indices)
        with open(log, "a") as file:
            file.write(f"{indices.tolist()}\n")
        if len(calls) == 2:
            meeting.wait(300)
        return train(indices, seed, {"lr": 0.5})

    print(verify(attributor(path), meeting_train, train_id="together").to_json())


def test_two_processes_share_the_retrainings(made, other, tmp_path):
    context = forkserver()
    given = str(tmp_path / "a.zarr"), str(tmp_path / "log"), context.Barrier(2)
    workers = [context.Process(target=verify_beside_others, args=given) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    trained = (tmp_path / "log").read_text().splitlines()
    assert len(set(trained)) == BUDGET
    assert len(trained) <= BUDGET + 1, "at most the first model by both, every other one by one"
    assert made.scores("t").verdict == verify(other, partial(train, config={"lr": 0.5}))
