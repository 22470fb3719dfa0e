"""A verdict belongs to the training that it was made with: changed ones are noticed, and processes share the work."""

import argparse
import collections
import dataclasses
import datetime
import enum
import fractions
import functools
import json
import os
import shutil
import sys
import types
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

EDITS = {
    "namespace": "ns = argparse.Namespace(lr=LR)\ndef lr(): return ns.lr",
    "simple namespace": "def make(ns):\n    return lambda: ns.lr\nlr = make(types.SimpleNamespace(lr=LR))",
    "deque": "values = collections.deque([LR])\ndef lr(): return values[0]",
    "cached helper": "@functools.cache\ndef lr(): return LR",
    "static method": "class H:\n    @staticmethod\n    def get(): return LR\ndef lr(): return H.get()",
    "class method": "class H:\n    @classmethod\n    def get(cls): return LR\ndef lr(): return H.get()",
    "property": "class H:\n    @property\n    def v(self): return LR\nh = H()\ndef lr(): return h.v",
    "method of a base class": "class B:\n    def __call__(self): return LR\nclass H(B): pass\nlr = H()",
    "attribute of a base class": (
        "class B:\n    v = LR\nclass H(B):\n    def __call__(self): return self.v\nlr = H()"
    ),
    "special method": ("class H:\n    def __iter__(self): yield LR\nh = H()\ndef lr(): return next(iter(h))"),
    "metaclass": (
        "class M(type):\n    @property\n    def v(cls): return LR\nclass H(metaclass=M): pass\ndef lr(): return H.v"
    ),
    "descriptor": (
        "class D:\n    def __get__(self, a, b): return LR\nclass H:\n    v = D()\ndef lr(): return H().v"
    ),
    "chain of helpers": (
        "".join(f"def h{i}(): return h{i + 1}()\n" for i in range(12)) + "def h12(): return LR\nlr = h0"
    ),
    "deeply nested dict": (
        f"c = {'{0:' * 10}LR{'}' * 10}\ndef lr():\n    v = c\n    while isinstance(v, dict): v = v[0]\n    return v"
    ),
    "enumeration": "class E(enum.Enum):\n    LR = LR\ndef lr(): return E.LR.value",
    "dataclass": "@dataclasses.dataclass\nclass C:\n    v: float\nc = C(LR)\ndef lr(): return c.v",
    "slots": "class C:\n    __slots__ = ('v',)\nc = C(); c.v = LR\ndef lr(): return c.v",
    "environment": "os.environ['A_RATE'] = str(LR)\ndef lr(): return float(os.environ['A_RATE'])",
    "file": "Path(FOLDER, 'r').write_text(str(LR))\ndef lr(): return json.loads(Path(FOLDER, 'r').read_text())",
    "path in a partial": (
        "p = Path(FOLDER, 'p')\np.write_text(str(LR))\nlr = partial(lambda p: float(p.read_text()), p)"
    ),
    "bytearray": "b = bytearray(str(LR).encode())\ndef lr(): return float(b.decode())",
    "memoryview": "b = memoryview(np.array([LR]))\ndef lr(): return b[0]",
    "single dispatch": "@functools.singledispatch\ndef get(x): return LR\ndef lr(): return get(1)",
    "partial method": (
        "class H:\n    def f(self, v): return v\n    g = functools.partialmethod(f, LR)\ndef lr(): return H().g()"
    ),
    "attribute of a module": (
        "class M(nn.Module):\n    pass\nm = M()\nm.config = types.SimpleNamespace(v=LR)\ndef lr(): return m.config.v"
    ),
    "long list": "v = [0.5] * 1999 + [LR]\ndef lr(): return v[-1]",
    "long list of namespaces": (
        "v = [types.SimpleNamespace(v=LR) for _ in range(2000)]\ndef lr(): return v[-1].v"
    ),
    "name in a string": "ALR = LR\ndef lr(): return globals()['A' + 'LR']",
    "lambda in a dict": "v = {'a': lambda: LR}\ndef lr(): return v['a']()",
    "decorator": ("def deco(f):\n    def g(): return f()\n    return g\n@deco\ndef lr(): return LR"),
    "array of objects": "v = np.array([LR, 'x'], object)\ndef lr(): return v[0]",
    "parameter": "v = nn.ParameterDict({'lr': torch.tensor(LR)})\ndef lr(): return float(v['lr'].detach())",
    "timedelta": "v = datetime.timedelta(seconds=LR)\ndef lr(): return v.total_seconds()",
    "fraction": "v = fractions.Fraction(LR)\ndef lr(): return float(v)",
    "another module": (
        "sys.modules['rates'] = types.SimpleNamespace(v=LR)\ndef lr():\n    import rates\n    return rates.v"
    ),
    "generator": "v = iter([LR] * 99)\ndef lr(): return next(v)",
}


def edited(edit, lr, folder):
    """Return a training whose learning rate comes from a module that was written with this value."""
    own = {"train": train, "LR": lr, "FOLDER": str(folder), "partial": partial, "Path": Path, "np": np}
    own |= {"torch": torch, "nn": nn, "__name__": "edited"}
    used = (argparse, collections, dataclasses, datetime, enum, fractions, functools, json, os, sys, types)
    own |= {module.__name__: module for module in used}
    source = (
        EDITS[edit]
        + "\ndef fit(indices, seed): v = round(float(lr()), 6); return train(indices, seed, {'lr': v, 'bend': v - 0.5})"
    )
    exec(source.replace("LR", repr(lr)) if edit not in ("enumeration", "name in a string") else source, own)
    return own["fit"]


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    monkeypatch.setattr(calibrated, "_NUM_RESAMPLES", RESAMPLES)
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


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A store with scores and without retrainings, and the verdict of the learning rate -0.1."""
    folder = tmp_path_factory.mktemp("stored")
    scored(folder / "a.zarr")
    shutil.copytree(folder / "a.zarr", folder / "b.zarr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated, "_NUM_RESAMPLES", RESAMPLES)
        right = verify(attributor(folder / "b.zarr"), partial(train, config={"lr": -0.1, "bend": -0.6}))
    return folder / "a.zarr", right


@pytest.mark.parametrize("edit", EDITS)
def test_the_verdict_is_that_of_the_present_training(edit, stored, tmp_path, monkeypatch):
    """In the same attributor, and in one that is opened later and knows only what is stored, as another process."""
    monkeypatch.setenv("A_RATE", "")
    monkeypatch.setitem(sys.modules, "rates", None)
    path = tmp_path / "a.zarr"
    shutil.copytree(stored[0], path)
    made = attributor(path)
    old = verify(made, edited(edit, 0.5, tmp_path))

    assert verify(made, edited(edit, -0.1, tmp_path)) == stored[1] != old
    assert verify(attributor(path), edited(edit, 0.5, tmp_path)) == old


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_training_is_repeated_once_and_not_at_all_by_its_name(kind, tmp_path):
    made, make = scored(tmp_path / "a.zarr"), KINDS[kind]
    first, named = verify(made, make(0.5)), verify(made, make(0.5), train_id="first")
    for one in (made, attributor(tmp_path / "a.zarr")):
        CALLS.clear()
        again = verify(one, make(0.5))

        assert again == first
        assert len(CALLS) == 1
        assert "Trained again, to compare: subset 0, seed 0 (12 rows); outputs differ by 0" in str(again)
        assert one.scores("t").verdict.compared == again.compared
        again = verify(one, make(0.5), train_id="first")
        assert again == named == first
        assert len(CALLS) == 1
        assert "train_id 'first' were used; no training was repeated" in str(again)


def test_a_small_change_is_noticed(tmp_path):
    made, config = scored(tmp_path / "a.zarr"), {"lr": 0.5}
    verify(made, partial(train, config=config))
    config["lr"] *= 1.001
    CALLS.clear()

    verify(made, partial(train, config=config))

    assert len(CALLS) == 2 + BUDGET


def test_a_change_for_later_seeds_is_noticed(tmp_path):
    """One training is repeated for every seed, each on another subset."""
    made, config = scored(tmp_path / "a.zarr"), {"lr": 0.5}

    def later(indices, seed):
        return train(indices, seed, config if seed == 7 else {"lr": 0.5})

    old = verify(made, later, seeds=(3, 5, 7))
    CALLS.clear()
    assert verify(made, later, seeds=(3, 5, 7)) == old
    assert len({tuple(rows) for rows in CALLS}) == len(CALLS) == 3
    config["lr"] = -0.1

    assert verify(made, later, seeds=(3, 5, 7)) != old


def never_the_same(indices, seed):
    model = train(indices, seed, {"lr": 0.5})
    with torch.no_grad():
        model.weight += torch.from_numpy(np.random.default_rng().normal(size=(3, 4)).astype(np.float32))
    return model


def test_a_training_that_is_not_deterministic_is_said_to_be(tmp_path):
    made = scored(tmp_path / "a.zarr")
    first = verify(made, never_the_same)
    CALLS.clear()

    with pytest.warns(
        RuntimeWarning, match="not deterministic: .* give different outputs .*Seed all random numbers"
    ):
        again = verify(attributor(tmp_path / "a.zarr"), never_the_same)

    assert again == first
    assert len(CALLS) == 2


def test_a_change_far_beyond_the_noise_of_a_training_is_noticed(tmp_path):
    made, scale = scored(tmp_path / "a.zarr"), {"lr": 0.5, "noise": 0.01}

    def noisy(indices, seed):
        model = train(indices, seed, scale)
        with torch.no_grad():
            model.weight += scale["noise"] * torch.from_numpy(
                np.random.default_rng().normal(size=(3, 4)).astype(np.float32)
            )
        return model

    verify(made, noisy)
    scale["lr"] = -3.0
    CALLS.clear()
    verify(made, noisy)

    assert len(CALLS) == 2 + BUDGET


def test_retraining_into_one_path_refuses_another_training(tmp_path):
    masks = np.random.default_rng(0).random((4, N)) < 0.5
    config = {"lr": 0.5}

    def outputs(model):
        return model(TARGETS.tensors[0]).sum(1)

    training = partial(train, config=config)
    retraining.retrain(training, masks, outputs, path=tmp_path / "r")
    config["lr"] = -0.1

    with pytest.raises(ManifestMismatchError, match=r"another training: repeated for subset 0, .*train_id"):
        retraining.retrain(training, masks, outputs, path=tmp_path / "r")


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
