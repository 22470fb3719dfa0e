"""Runs of the product on a device, and what they are compared by."""

import numpy as np
import torch
from device_models import make
from torch import nn

from trak_lite import Attributor, verify
from trak_lite.methods import TRAK

CPU = torch.device("cpu")
PLAIN = TRAK(damping=None, layout="stored")
REGROUPED = {"cnn", "clip"}
"""Cases with a matrix of 64 columns or more, whose factors are sketched in another order on accelerators."""


def attributor(name, device, path=None, *, place=True, **settings):
    """Return an attributor of a case and the case, its model on the device."""
    case = make(name)
    if place:
        case.model.to(device)
    given = {"dtype": "float32", "proj_dim": 8, "batch_size": 5, "collate": case.collate, **settings}
    return Attributor(case.model, case.task, path, device=device, progress=False, **given), case


def checkpoints(name, count=2):
    state, found = make(name).model.state_dict(), []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        noise = {k: torch.randn(v.shape, generator=generator) for k, v in state.items()}
        found.append({k: v + 0.05 * noise[k] if v.is_floating_point() else v for k, v in state.items()})
    return found


def retraining(case, device):
    """Return what trains a model of an ``mlp`` case on some of its rows, for two steps on the device."""
    inputs, labels = (tensor.to(device) for tensor in case.train.tensors)

    def train(rows, seed):
        model = make("mlp").model.to(device)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
        return model

    return train


def numbers_in(value):
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers_in(value[key])]
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item)]
    return [value] if isinstance(value, float | int) and np.isfinite(value) else []


def verification(where, folder=None):
    """Return the scores of an ``mlp`` case, and the numbers of their verdict by models that are retrained."""
    made, case = attributor("mlp", where)
    made.featurize(case.train)
    scores = made.score(case.targets, name="t")
    train = retraining(case, where)
    verdict = verify(scores, train, case.targets, budget=12, calibrate=True, train_id="x")
    return {"scores": scores.numpy().copy(), "verdict": np.array(numbers_in(verdict.to_json()))}


def stored(made):
    found = {}
    with made._workspace.reading() as store:
        for path in sorted(store.table_names()):
            table = store.open_table(path)
            for column in table.spec.columns:
                found[f"{path}/{column.name}"] = np.array(table.read(column.name))
    return found


def outcome(name, device, **settings):
    """Return everything that featurizing and scoring a case gives; the model must be left as it was."""
    made, case = attributor(name, device, **settings)
    before = {key: (value.device, value.clone()) for key, value in case.model.state_dict().items()}
    made.featurize(case.train)
    scores = made.score(case.targets, name="t")
    found = {**stored(made), "scores": scores.numpy().copy(), "self": scores.self_influence()}
    for key, (where, value) in before.items():
        now = case.model.state_dict()[key]
        assert now.device == where
        assert torch.equal(now, value), key
    return found


def assert_same(found, expected, device, *, fused=False, share=None):
    """Equal bits on the stand-in, which computes as the CPU does; equal up to rounding on a GPU.

    Args:
        found: Arrays by name.
        expected: The same from the CPU.
        device: Where ``found`` comes from.
        fused: The CPU has fused kernels for this, the stand-in has none, or the CPU adds in another order (the
            features of :data:`REGROUPED`): equal up to rounding.
        share: The rounding, in shares of the largest number.
    """
    exact = device.type == "stand_in" and not fused and share is None
    share = share or (1e-5 if device.type == "stand_in" else 1e-3)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.isfinite(value).all(), key
        rounding = 0 if exact else share * max(float(np.abs(value).max()), 1e-30)
        np.testing.assert_allclose(found[key], value, rtol=0, atol=rounding, err_msg=key)


def assert_same_on_both(device, run, **options):
    assert_same(run(device), run(CPU), device, **options)
