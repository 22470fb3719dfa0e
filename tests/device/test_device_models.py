"""Features and scores on a device are those on the CPU: models, engines, projectors, methods, dtypes, modes."""

from contextlib import contextmanager

import pytest
import torch
from device_models import RECURRENT
from device_runs import CPU, PLAIN, REGROUPED, assert_same, outcome

from trak_lite import clip
from trak_lite.projectors import PROJECTORS

MODELS = ["mlp", "cnn", "vit", "gpt", *RECURRENT, "regression", "multilabel", "binary", "clip"]
WHOLE = [("lstm", "functional"), ("lstm", "iterative"), ("gru", "iterative"), ("rnn", "iterative")]
"""Engines that run recurrent layers whole: the CPU has fused kernels for them, which round in other places."""
METHODS = [("mlp", PLAIN), ("mlp", "GaussNewton"), ("mlp", "Fisher"), ("gpt", PLAIN), ("gpt", "Fisher")]
NORMS = ("unit", clip(1.0), clip(1.0, scope="module"))
CASES = [
    *((name, {}) for name in MODELS),
    *((name, {"gradient_computer": e}) for e in ("hook", "functional", "iterative") for name in ("cnn", "gpt")),
    *((name, {"gradient_computer": engine}) for name, engine in WHOLE),
    *(("mlp", {"projector": projector}) for projector in PROJECTORS),
    *(("gpt", {"projector": projector}) for projector in PROJECTORS if projector != "none"),
    *((name, {"method": method, "layout": layout}) for name, method in METHODS for layout in ("joint", "module")),
    *(("gpt", {"normalize": normalize, "store_norms": True}) for normalize in NORMS),
    *(("mlp", {"dtype": dtype}) for dtype in ("float16", "int8", "int4")),
    *((name, {"place": False}) for name in ("mlp", "clip")),  # the model is elsewhere, and comes back
]  # fmt: skip


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def tf32_allowed(device):
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


IN_MODES = [
    (default_device, "mlp", {}),
    (default_device, "mlp", {"projector": "mask"}),
    (default_device, "mlp", {"projector": "grass"}),
    (default_device, "mlp", {"projector": "countsketch", "gradient_computer": "functional"}),
    (default_device, "gpt", {"method": "Fisher"}),
    (default_device, "clip", {}),
    (tf32_allowed, "mlp", {"method": "Fisher"}),
    (tf32_allowed, "mlp", {"projector": "gaussian"}),
    (tf32_allowed, "cnn", {}),
    (tf32_allowed, "gpt", {"method": PLAIN}),
    (tf32_allowed, "lstm", {}),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_features_and_scores_are_those_of_the_cpu(name, settings, device):
    if settings.get("projector") == "fast_jl" and device.type == "cuda":
        pytest.skip("fast_jl has another matrix where the extension is installed")
    fused = name in REGROUPED or (name, settings.get("gradient_computer")) in WHOLE
    assert_same(outcome(name, device, **settings), outcome(name, CPU, **settings), device, fused=fused)
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize(
    ("mode", "name", "settings"), IN_MODES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_modes_of_torch_change_nothing(mode, name, settings, device):
    with mode(device):
        found = outcome(name, device, **settings)
    assert_same(found, outcome(name, CPU, **settings), device, fused=name in REGROUPED)


@pytest.mark.parametrize("projector", ["countsketch", "mask", "gaussian", "two_sided"])
def test_rows_are_the_same_bits_in_another_run(projector, device):
    first, second = (outcome("gpt", device, projector=projector) for _ in range(2))
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert (second[key] == value).all(), key
