"""Features and scores on a device are those on the CPU: models, engines, projectors, methods, dtypes."""

from __future__ import annotations

import pytest
import torch
from device_runs import REGROUPED, assert_same, outcome

from trak_lite import clip
from trak_lite.methods import TRAK
from trak_lite.projectors import PROJECTORS

CPU = torch.device("cpu")
PLAIN = TRAK(damping=None, layout="stored")
MODELS = ["mlp", "cnn", "vit", "gpt", "lstm", "gru", "rnn", "regression", "multilabel", "binary", "clip"]


def assert_as_on_the_cpu(name, device, **settings):
    found, expected = (outcome(name, where, **settings) for where in (device, CPU))
    assert_same(found, expected, device, fused=name in REGROUPED)


@pytest.mark.parametrize("name", MODELS)
def test_default_settings(name, device):
    assert_as_on_the_cpu(name, device)


@pytest.mark.parametrize("engine", ["hook", "functional", "iterative"])
@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_engines(name, engine, device):
    assert_as_on_the_cpu(name, device, gradient_computer=engine)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("name", "engine"),
    [("lstm", "functional"), ("lstm", "iterative"), ("gru", "iterative"), ("rnn", "iterative")],
)
def test_engines_that_run_recurrent_layers_whole(name, engine, device):
    # The CPU has fused kernels for these layers, which round in other places.
    found, expected = (outcome(name, where, gradient_computer=engine) for where in (device, CPU))
    assert_same(found, expected, device, fused=True)


@pytest.mark.parametrize("projector", PROJECTORS)
def test_projectors(projector, device):
    assert_as_on_the_cpu("mlp", device, projector=projector)


@pytest.mark.parametrize("projector", [name for name in PROJECTORS if name != "none"])
def test_projectors_of_tied_embeddings(projector, device):
    assert_as_on_the_cpu("gpt", device, projector=projector)


@pytest.mark.parametrize("layout", ["joint", "module"])
@pytest.mark.parametrize(
    ("name", "method"),
    [("mlp", PLAIN), ("mlp", "GaussNewton"), ("mlp", "Fisher"), ("gpt", PLAIN), ("gpt", "Fisher")],
    ids=str,
)
def test_methods(name, method, layout, device):
    assert_as_on_the_cpu(name, device, method=method, layout=layout)


@pytest.mark.parametrize("normalize", ["unit", clip(1.0), clip(1.0, scope="module")], ids=str)
def test_normalisations(normalize, device):
    assert_as_on_the_cpu("gpt", device, normalize=normalize, store_norms=True)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_storage_dtypes(dtype, device):
    assert_as_on_the_cpu("mlp", device, dtype=dtype)


@pytest.mark.parametrize("name", ["mlp", "clip"])
def test_a_model_that_is_elsewhere_comes_back(name, device):
    assert_as_on_the_cpu(name, device, place=False)
