"""The Triton kernel for dense Rademacher products, interpreted and on a GPU. Compiled: test_triton_sketch.py."""

import math
import subprocess
import sys

import pytest
import torch
import triton_cases
from projection_cases import Operators, assert_close
from projection_cases import random32 as random
from triton_cases import KEY, interpreted, kernels_of, signs_of, use_on

from trak_lite.projectors import BasicProjector, GaussianProjector, RademacherProjector

interpreter, launches = triton_cases.interpreter, triton_cases.launches
forget_choices, no_warning = triton_cases.forget_choices, triton_cases.no_warning


def kernel_product(rows, proj_dim, start=0, **options):
    total = torch.zeros(rows.shape[0], proj_dim, device=rows.device)
    kernels_of().dense.add_signed_product_(total, rows, KEY, start, **options)
    return total


# ---- in the interpreter
STARTS = [2**31 - 20, 2**32 - 20, 2**32, 2**33 - 1]
"""The high word of an index goes into the key."""


@interpreted
@pytest.mark.parametrize(
    ("proj_dim", "start"), [*((k, 0) for k in (1, 31, 33, 128, 161)), *((33, start) for start in STARTS)]
)
def test_rows_of_the_identity_give_the_signs_bit_for_bit(proj_dim, start):
    assert torch.equal(kernel_product(torch.eye(40), proj_dim, start), signs_of(40, proj_dim, start))


GRADIENTS = {
    **{str(shape): random(*shape) for shape in ((1, 1), (3, 31), (33, 130), (2, 257))},
    **{str(dtype): random(3, 50, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
    "many launches": random(2, 300),
    "rows in groups": random(9, 20),
    "transposed": random(50, 4).T,
    "every second entry": random(4, 100)[:, ::2],
    "cut out": random(8, 60)[::2, 5:55],
    "expanded": random(1, 50).expand(4, 50),
    "beyond the sums of float16": torch.full((1, 64), 60_000.0).half(),
    "no rows": torch.zeros(0, 5),
    "no entries": torch.zeros(3, 0),
}
SETTINGS = {"many launches": {"_STEPS": (1,), "_PROGRAMS": 2}, "rows in groups": {"_MOST_ROWS": 4}}


@interpreted
@pytest.mark.parametrize("name", GRADIENTS)
def test_products_of_gradients_read_where_they_lie_are_added_up_in_float32(name, interpreter, monkeypatch):
    """Within the rounding of a float32 sum of these magnitudes, and with the bits of float32 rows."""
    for setting, value in SETTINGS.get(name, {}).items():
        monkeypatch.setattr(interpreter.dense, setting, value)
    rows, total = GRADIENTS[name], torch.ones(len(GRADIENTS[name]), 40)
    found = kernel_product(rows, 40)
    expected = rows.double() @ signs_of(rows.shape[1], 40).double()
    bound = 2**-22 * math.sqrt(max(1, rows.shape[1])) * rows.double().abs().sum(1, keepdim=True)
    assert bool(((found.double() - expected).abs() <= bound).all())
    assert torch.equal(found, kernel_product(rows.float().contiguous(), 40))
    interpreter.dense.add_signed_product_(total, rows, KEY)
    assert torch.equal(total, 1 + found)


# ---- the choice of the kernel
@interpreted
def test_a_projector_gives_the_same_features_with_and_without_the_kernel(monkeypatch, launches):
    grads = {"a": random(4, 5, 6), "b": random(4, seed=1)}
    kinds = [lambda: RademacherProjector(40, seed=2), lambda: BasicProjector(0, 40, 2, "rademacher", None)]
    for make in kinds:
        use_on(monkeypatch, "cpu")
        make().project(grads, 1)  # the first use compares the kernel's signs with those of torch
        launches.clear()
        with Operators() as seen:
            features = make().project(grads, 1)
        assert launches
        assert seen.words == 0  # no matrix is drawn
        use_on(monkeypatch)
        assert_close(features, make().project(grads, 1), 1e-6)


@interpreted
@pytest.mark.parametrize(
    ("projector", "rows"),
    [
        (RademacherProjector(8), random(2, 9, dtype=torch.float64)),
        (RademacherProjector(8, dtype=torch.float64), random(2, 9)),
        (RademacherProjector(8), random(2, 9).to(torch.float8_e5m2)),
        (GaussianProjector(8), random(2, 9)),
    ],
    ids=["float64 gradients", "float64 features", "float8 gradients", "gaussian"],
)
def test_what_the_kernel_does_not_do_stays_with_torch(projector, rows, launches):
    launches.clear()
    projector.project(rows, 0)
    assert launches == []


@interpreted
def test_tf32_reaches_the_kernel(launches):
    for precision in ("ieee", "tf32"):
        RademacherProjector(8, precision=precision).project(random(2, 9), 0)
    assert [launch["precision"] for launch in launches][-2:] == ["ieee", "tf32"]


def test_products_and_sketches_on_a_cpu_do_not_import_the_kernels():
    code = (
        "import sys, torch\n"
        "from trak_lite.projectors import CountSketchProjector, RademacherProjector\n"
        "RademacherProjector(8).project(torch.ones(2, 3), 0)\n"
        "CountSketchProjector(8).project(torch.ones(2, 3), 0)\n"
        "assert not any('triton' in name for name in sys.modules if name.startswith('trak_lite'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- on a GPU
@pytest.mark.cuda
@pytest.mark.parametrize("proj_dim", [1, 33, 512, 1000])
def test_signs_on_a_gpu_are_those_of_torch_bit_for_bit(proj_dim):
    pytest.importorskip("triton")
    for start in (0, 2**32 - 20):
        found = kernel_product(torch.eye(40, device="cuda"), proj_dim, start)
        assert torch.equal(found.cpu(), signs_of(40, proj_dim, start))


@pytest.mark.cuda
@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 8, 64, 300])
def test_features_on_a_gpu_equal_those_of_the_cpu_up_to_rounding(num_rows, dtype):
    rows = random(num_rows, 50_000, dtype=dtype)
    projector = RademacherProjector(200)
    features = projector.project(rows.cuda(), 0)
    assert_close(features.cpu(), RademacherProjector(200).project(rows, 0), 1e-4)
    assert torch.equal(features, projector.project(rows.cuda(), 0))


@pytest.mark.cuda
def test_tf32_on_a_gpu_is_within_its_rounding():
    rows = random(16, 10_000).cuda()
    exact, rounded = (RademacherProjector(256, precision=p).project(rows, 0) for p in ("ieee", "tf32"))
    assert float((rounded - exact).norm() / exact.norm()) < 2**-10
