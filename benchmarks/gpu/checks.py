"""Parts ``tests`` and ``features``: the tests that need a GPU, and features against those of the CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_gradients import CASES
from benchmarks.gpu.bench import Bench, NotHere
from benchmarks.measuring import ROOT
from trak_lite.featurizing.passes import compute_features
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import CallableModelOutput
from trak_lite.projectors import AbstractProjector, CountSketchProjector
from trak_lite.projectors.select import select_projector
from trak_lite.projectors.sketch.base import triton_kernels
from trak_lite.types import DenseBlock

Case = Callable[[Bench], dict[str, Any]]

# ---------------------------------------------------------------- tests

TEST_SECONDS = 60  # after which pytest is interrupted and what has run counts
SKETCHES, DENSE = ("tests/projectors/test_triton_sketch.py", "tests/projectors/test_triton_dense.py")


def test_cases(small: bool) -> dict[str, Case]:
    """The kernels' tests, those of tests/device, which all need an accelerator, and all others with the marker."""
    files = {
        "sketches": [SKETCHES],
        "dense projections": [DENSE],
        "rules of devices": ["tests/device/test_device_rules.py"],
        "other rooms": _marked_files({SKETCHES, DENSE}),
        "paths": ["tests/device/test_device_paths.py"],
        "models": ["tests/device/test_device_models.py"],
    }
    names = ("sketches", "rules of devices") if small else files
    return {name: partial(run_tests, files[name]) for name in names}


def _marked_files(without: set[str]) -> list[str]:
    """Return the other files with tests that have the marker ``cuda``."""
    found = sorted(
        path for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text("utf-8")
    )
    return [name for path in found if (name := path.relative_to(ROOT).as_posix()) not in without]


def run_tests(paths: list[str], bench: Bench) -> dict[str, Any]:
    """Run the tests of some files that need an accelerator; return counts, and failures with their messages."""
    of_device = paths[0].startswith("tests/device/")
    if not (of_device or bench.is_cuda):
        raise NotHere(f"these tests need CUDA, the device is {bench.device.type}")
    options = ["-m", "cuda"] if bench.is_cuda else []
    if bench.small:
        options += ["-k", "a_batch_that_comes or torch_has"]
    workers = str(min(8, (os.cpu_count() or 1) // 2))  # one file after the other would take minutes
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "--tb=line", "-rfE", *options, *paths]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, ended = process.communicate(timeout=TEST_SECONDS)[0], True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then reports what has run
        output, ended = process.communicate(timeout=20)[0], False
    return {**summary(output), "ended": ended}


def summary(output: str) -> dict[str, Any]:
    """Return the counts in pytest's output and the lines of its failures."""
    lines = output.splitlines()
    counted = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|deselected|error)", line)]
    if not counted:
        raise RuntimeError("pytest ended without counts: " + " ".join(lines[-3:])[:300])
    counts = {
        kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", counted[-1])
    }
    failures = [line[:300] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return {"passed": 0, "failed": 0, **counts, "failures": failures}


# ---------------------------------------------------------------- features

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
PROJECTORS = ("rademacher", "gaussian", "two_sided", "mask", "grass")
SHAPES = {"vector": (3_000_001,), "matrix": (1000, 1200), "convolution": (128, 64, 3, 3), "bias": (257,)}
SMALL_SHAPES = {"vector": (40_001,), "matrix": (30, 40), "convolution": (8, 4, 3, 3), "bias": (7,)}
PROJ_DIMS = (512, 2048)
ROWS = 5
TOLERANCE = 1e-5  # of projections of equal gradients
MODEL_TOLERANCE = 2e-2  # of features: a ReLU or max-pool that ties the other way in float32


def feature_cases(small: bool) -> dict[str, Case]:
    models = ("cnn", "mlp") if small else ("cnn", "gpt", "mlp", "resnet9_gn", "vit", "lstm")
    return {
        **{f"countsketch {dtype}": partial(same_bits, dtype) for dtype in DTYPES},
        **{f"model {name}": partial(same_features, name) for name in models},
        **{name: partial(same_projection, name) for name in PROJECTORS},
    }


def drawn_gradients(dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return gradients of several shapes on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(ROWS, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def project(projector: AbstractProjector, grads: dict[str, Tensor]) -> Tensor:
    """Return the features of dense gradients."""
    shapes = {name: tuple(grad.shape[1:]) for name, grad in grads.items()}
    accumulator = projector.accumulator(ROWS, model_id=0, parameters=shapes)
    for name, grad in grads.items():
        accumulator.add(DenseBlock(name, grad))
    return accumulator.features()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the error in the Frobenius norm."""
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


def same_bits(dtype: str, bench: Bench) -> dict[str, Any]:
    """Compare CountSketch features of dense gradients, which must have the bits of the CPU."""
    grads = drawn_gradients(DTYPES[dtype], SMALL_SHAPES if bench.small else SHAPES)
    there = {name: grad.to(bench.device) for name, grad in grads.items()}
    equal, errors = [], []
    for proj_dim in PROJ_DIMS:
        expected = project(CountSketchProjector(proj_dim), grads)
        found = project(CountSketchProjector(proj_dim), there)
        equal.append(torch.equal(found.cpu(), expected))
        errors.append(relative_error(found, expected))
    by_triton = triton_kernels(there["matrix"].flatten(1)) is not None
    return {"equal": all(equal), "relative_error": max(errors), "by": "triton" if by_triton else "torch"}


def same_projection(name: str, bench: Bench) -> dict[str, Any]:
    """Compare features of equal dense gradients up to rounding."""
    grads = drawn_gradients(torch.float32, SMALL_SHAPES)
    there = {key: grad.to(bench.device) for key, grad in grads.items()}
    expected = project(select_projector(name, proj_dim=512), grads)
    found = project(select_projector(name, proj_dim=512), there)
    error = relative_error(found, expected)
    return {"relative_error": error, "tolerance": TOLERANCE, "within": error <= TOLERANCE}


def same_features(name: str, bench: Bench) -> dict[str, Any]:
    """Compare features of a model's gradients, with the forward and backward pass on the device."""
    torch.manual_seed(0)
    make_model, make_batch, output = CASES[name]
    model, batch = make_model().eval(), tuple(part[:8] for part in make_batch())
    found = []
    for device in (torch.device("cpu"), bench.device):
        computer = HookGradientComputer(model.to(device), CallableModelOutput(output))
        moved = tuple(part.to(device) for part in batch)
        features, _, _ = compute_features(
            computer, CountSketchProjector(512), moved, model_id=0, rows=np.arange(8), what="benchmark"
        )
        found.append(features.cpu())
    error = relative_error(found[1], found[0])
    return {"relative_error": error, "tolerance": MODEL_TOLERANCE, "within": error <= MODEL_TOLERANCE}
