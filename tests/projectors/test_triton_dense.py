"""The Triton kernel for dense Rademacher products: in the interpreter, compiled without a GPU, and on one."""

from __future__ import annotations

import logging
import math
import subprocess
import sys

import numpy as np
import projection_reference as reference
import pytest
import torch
from projection_cases import random32 as random
from triton_interpreter import fresh_kernels, interpreted

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import BasicProjector, GaussianProjector, RademacherProjector
from trak_lite.projectors._kernels import usable_kernels
from trak_lite.projectors.dense import projectors as dense
from trak_lite.projectors.random.entries import RademacherEntries
from trak_lite.projectors.random.hash import Stream, hash_words_, key32, parameter_key, wrap32
from trak_lite.testing.projectors import ProjectorTests

CPU = torch.device("cpu")
KEY = parameter_key(3, 1, "weight", Stream.RADEMACHER)
hash_word = tl = None  # set by the test that needs them: a kernel sees only names of its module


@pytest.fixture(scope="module")
def interpreter():
    pytest.importorskip("triton", reason="needs triton, which the test extra installs on Linux")
    with fresh_kernels(interpret=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_KERNEL_DEVICES", frozenset({"cpu"}))
        yield


@pytest.fixture
def kernel(interpreter):
    from trak_lite.projectors.dense import triton as _triton_dense

    return _triton_dense


@pytest.fixture
def forget_choices():
    """Each device's choice of a kernel is made anew, and again after the test."""
    usable_kernels.cache_clear()
    yield
    usable_kernels.cache_clear()


def torch_signs(num_entries: int, proj_dim: int, start: int = 0, device: torch.device = CPU) -> torch.Tensor:
    entries = RademacherEntries(proj_dim, num_entries, device)
    out = torch.empty(num_entries, entries.width(proj_dim), device=device)
    return entries.draw_(out, KEY, start)[:, :proj_dim]


def kernel_product(kernel, rows: torch.Tensor, proj_dim: int, start: int = 0, **options) -> torch.Tensor:
    total = torch.zeros(rows.shape[0], proj_dim, device=rows.device)
    kernel.add_signed_product_(total, rows, KEY, start, **options)
    return total


def assert_rounded(actual: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor) -> None:
    """The product in float64, within the rounding of a float32 sum of these magnitudes."""
    expected = rows.double() @ matrix.double()
    bound = 2**-22 * math.sqrt(max(1, rows.shape[1])) * rows.double().abs().sum(1, keepdim=True)
    assert bool(((actual.double() - expected).abs() <= bound).all())


# ---- in the interpreter


@interpreted
@pytest.mark.parametrize("start", [0, 5, 2**32 - 64, 2**33 + 7])
def test_hash_words_are_those_of_torch(kernel, start, monkeypatch):
    import triton.language

    from trak_lite.projectors.random import triton_hash as _triton_hash

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "tl", triton.language)
    monkeypatch.setattr(module, "hash_word", _triton_hash.hash_word)

    @_triton_hash.jit(do_not_specialize=["key", "high_key", "start"])
    def write_words(out, key, high_key, start):
        index = tl.arange(0, 64)
        words = hash_word((index + start).to(tl.uint32), key, high_key)
        tl.store(out + index, words.to(tl.int32, bitcast=True))

    words = torch.empty(64, dtype=torch.int32)
    high_key = key32(KEY, start >> 32)
    write_words[(1,)](words, wrap32(KEY), wrap32(high_key), wrap32(start))
    assert torch.equal(words, hash_words_(torch.empty(64, dtype=torch.int32), KEY, start))


@interpreted
@pytest.mark.parametrize("proj_dim", [1, 31, 33, 128, 161])
def test_rows_of_the_identity_give_the_signs_of_torch_bit_for_bit(kernel, proj_dim):
    signs = kernel_product(kernel, torch.eye(40), proj_dim)

    assert torch.equal(signs, torch_signs(40, proj_dim))
    expected = [[reference.matrix_word(KEY, i, j // 32) >> (j % 32) & 1 for j in range(1)] for i in range(40)]
    assert torch.equal(signs[:, :1], 1 - 2.0 * torch.tensor(expected))


@interpreted
@pytest.mark.parametrize("start", [2**31 - 20, 2**32 - 20, 2**32, 2**33 - 1])
def test_signs_beyond_two_to_the_32_take_the_high_word_into_the_key(kernel, start):
    signs = kernel_product(kernel, torch.eye(40), 33, start)

    assert torch.equal(signs, torch_signs(40, 33, start))


@interpreted
@pytest.mark.parametrize(("num_rows", "num_entries"), [(1, 1), (3, 31), (33, 130), (2, 257)])
def test_products_equal_the_dense_product_up_to_float32_rounding(kernel, num_rows, num_entries):
    rows = random(num_rows, num_entries)

    assert_rounded(kernel_product(kernel, rows, 70), rows, torch_signs(num_entries, 70))


@interpreted
def test_a_parameter_of_many_launches_is_summed_whole(kernel, monkeypatch):
    monkeypatch.setattr(kernel, "_STEPS", (1,))
    monkeypatch.setattr(kernel, "_PROGRAMS", 2)
    rows = random(2, 300)

    assert_rounded(kernel_product(kernel, rows, 40), rows, torch_signs(300, 40))


@interpreted
def test_many_rows_are_taken_in_groups(kernel, monkeypatch):
    monkeypatch.setattr(kernel, "_MOST_ROWS", 4)
    rows = random(9, 20)

    assert_rounded(kernel_product(kernel, rows, 8), rows, torch_signs(20, 8))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes_are_converted_to_float32(kernel, dtype):
    rows = random(3, 50, dtype=dtype)

    assert torch.equal(kernel_product(kernel, rows, 40), kernel_product(kernel, rows.float(), 40))


@interpreted
def test_float16_products_do_not_overflow(kernel):
    rows = torch.full((1, 64), 60_000.0, dtype=torch.float16)

    assert_rounded(kernel_product(kernel, rows, 16), rows, torch_signs(64, 16))


@interpreted
@pytest.mark.parametrize(
    "rows",
    [random(50, 4).T, random(4, 100)[:, ::2], random(8, 60)[::2, 5:55], random(1, 50).expand(4, 50)],
    ids=["transposed", "every second entry", "cut out", "expanded"],
)
def test_rows_with_any_strides_are_read_where_they_lie(kernel, rows):
    assert torch.equal(kernel_product(kernel, rows, 40), kernel_product(kernel, rows.contiguous(), 40))


@interpreted
def test_products_are_added_to_what_is_there(kernel):
    rows = random(2, 30)
    total = torch.ones(2, 20)
    kernel.add_signed_product_(total, rows, KEY)

    assert torch.equal(total, 1 + kernel_product(kernel, rows, 20))


@interpreted
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_row_that_is_not_finite_spoils_no_other(kernel, value):
    rows = random(3, 40)
    rows[1, 7] = value
    features = kernel_product(kernel, rows, 20)

    assert features.isfinite().all(1).tolist() == [True, False, True]


@interpreted
def test_nothing_is_added_for_no_rows_or_no_entries(kernel):
    assert kernel_product(kernel, torch.zeros(0, 5), 4).shape == (0, 4)
    assert torch.equal(kernel_product(kernel, torch.zeros(3, 0), 4), torch.zeros(3, 4))


@interpreted
@pytest.mark.parametrize("num_entries", [1, 100, 10_000, 300_000, 2_000_000_000])
@pytest.mark.parametrize("proj_dim", [1, 512, 8192, 200_000])
def test_a_launch_has_work_for_every_program_and_indices_of_32_bits(kernel, num_entries, proj_dim):
    steps, splits = kernel._launch_shape(num_entries, proj_dim)

    width = steps * kernel._BLOCK_ENTRIES
    assert (splits - 1) * width < num_entries
    assert steps == kernel._STEPS[0] or splits * kernel._STEPS[0] * kernel._BLOCK_ENTRIES < num_entries
    assert splits * width <= 2**24
    assert splits == 1 or splits * -(-proj_dim // kernel._BLOCK_COLUMNS) <= kernel._PROGRAMS


# ---- the choice of the kernel


@interpreted
class TestRademacherProjectorOnTheKernel(ProjectorTests):
    @pytest.fixture(autouse=True)
    def _small_programs(self, kernel, monkeypatch):
        monkeypatch.setattr(kernel, "_STEPS", (1,))

    def make_projector(self, proj_dim, *, seed):
        return RademacherProjector(proj_dim, seed=seed, dtype=torch.float32)


@interpreted
def test_a_projector_gives_the_same_features_with_and_without_the_kernel(monkeypatch):
    grads = {"a": random(4, 5, 6), "b": random(4, seed=1)}
    with_kernel = RademacherProjector(40, seed=2)
    features = with_kernel.project(grads, 1)
    monkeypatch.setattr(dense, "_KERNEL_DEVICES", frozenset())
    without = RademacherProjector(40, seed=2)

    torch.testing.assert_close(features, without.project(grads, 1), rtol=1e-6, atol=1e-6)
    assert with_kernel.fingerprint() == without.fingerprint()


@interpreted
def test_the_kernel_holds_no_matrix():
    projector = RademacherProjector(40)
    projector.project(random(2, 30), 0)

    assert projector._map.matrices.peak_bytes == 0


@interpreted
def test_the_original_names_use_the_kernel_too():
    projector = BasicProjector(0, 40, 0, "rademacher", None)
    projector.project(random(2, 30), 0)

    assert projector._map.matrices.peak_bytes == 0


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
def test_what_the_kernel_does_not_do_stays_with_torch(projector, rows):
    features = projector.project(rows, 0)

    assert projector._map.matrices.rows_drawn == 9
    expected = reference.matrix(
        "gaussian" if isinstance(projector, GaussianProjector) else "rademacher",
        (9, 8),
        seed=0,
        model_id=0,
        name="",
    )
    np.testing.assert_allclose(
        features.numpy(), rows.double().numpy() @ expected / math.sqrt(8), rtol=1e-5, atol=1e-6
    )


@interpreted
def test_tf32_is_another_fingerprint_and_reaches_the_kernel(kernel, monkeypatch):
    seen = []
    launch = kernel._launch
    monkeypatch.setattr(kernel, "_launch", lambda *args: (seen.append(args[-1]), launch(*args)))
    exact, rounded = RademacherProjector(8), RademacherProjector(8, precision="tf32")
    exact.project(random(2, 9), 0)
    rounded.project(random(2, 9), 0)

    assert seen == ["ieee", "tf32"]
    assert rounded.fingerprint() == {**exact.fingerprint(), "precision": "tf32"}


def test_an_unknown_precision_is_refused():
    with pytest.raises(InvalidInputError, match=r"precision must be one of \['ieee', 'tf32'\], got 'bf16'"):
        RademacherProjector(8, precision="bf16")


def test_normal_entries_have_no_tf32():
    with pytest.raises(InvalidInputError, match="is for the signs of a Rademacher projection, got normal"):
        GaussianProjector(8, precision="tf32")


@interpreted
def test_a_kernel_that_cannot_run_is_replaced_by_torch_with_one_logged_line(
    kernel, monkeypatch, caplog, forget_choices
):
    def launch(*args):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(kernel, "_launch", launch)
    rows = random(2, 30)
    with caplog.at_level(logging.WARNING, "trak_lite"):
        features = [RademacherProjector(40).project(rows, 0) for _ in range(2)]

    assert len(caplog.records) == 1
    assert "it does not run on this device (RuntimeError: Failed to find C compiler.)" in caplog.text
    assert torch.equal(features[0], features[1])
    expected = reference.matrix("rademacher", (30, 40), seed=0, model_id=0, name="") / math.sqrt(40)
    np.testing.assert_allclose(features[0].numpy(), rows.numpy() @ expected, rtol=1e-5, atol=1e-5)


@interpreted
def test_a_kernel_that_draws_other_signs_is_not_used(kernel, monkeypatch):
    monkeypatch.setattr(kernel, "_launch", lambda *args: None)

    assert kernel.why_unusable(CPU) == "it draws other signs on this device than the torch operations"


def test_without_triton_torch_makes_the_product_with_one_logged_line(monkeypatch, caplog):
    monkeypatch.setattr(dense, "_KERNEL_DEVICES", frozenset({"cpu"}))
    rows = random(2, 30)
    with fresh_kernels(interpret=True), caplog.at_level(logging.WARNING, "trak_lite"):
        monkeypatch.setitem(sys.modules, "triton", None)
        projectors = [RademacherProjector(40) for _ in range(2)]
        features = [projector.project(rows, 0) for projector in projectors]

    assert len(caplog.records) == 1
    assert "triton cannot be imported" in caplog.text
    assert torch.equal(features[0], features[1])
    assert projectors[0]._map.matrices.rows_drawn == 30


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
def test_signs_on_a_gpu_are_those_of_the_cpu_bit_for_bit(proj_dim):
    pytest.importorskip("triton")
    from trak_lite.projectors.dense import triton as _triton_dense

    for start in (0, 2**32 - 50):
        signs = kernel_product(_triton_dense, torch.eye(100, device="cuda"), proj_dim, start)
        assert torch.equal(signs.cpu(), torch_signs(100, proj_dim, start))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 8, 64, 300])
def test_features_on_a_gpu_equal_those_of_the_cpu_up_to_rounding(num_rows, dtype):
    rows = random(num_rows, 50_000, dtype=dtype)
    host = RademacherProjector(200).project(rows, 0)
    projector = RademacherProjector(200)
    features = projector.project(rows.cuda(), 0)

    assert projector._map.matrices.peak_bytes == 0, "the kernel did not run"
    torch.testing.assert_close(features.cpu(), host, rtol=1e-4, atol=1e-4 * float(host.abs().max()))


@pytest.mark.cuda
def test_features_on_a_gpu_repeat_bit_for_bit():
    rows = random(64, 100_000).cuda()
    projector = RademacherProjector(512)

    assert torch.equal(projector.project(rows, 0), projector.project(rows, 0))


@pytest.mark.cuda
def test_tf32_on_a_gpu_is_within_its_rounding():
    rows = random(16, 10_000).cuda()
    exact, rounded = (
        RademacherProjector(256, precision=precision).project(rows, 0) for precision in ("ieee", "tf32")
    )

    assert float((rounded - exact).norm() / exact.norm()) < 2**-10


@pytest.mark.cuda
def test_gradients_on_the_cpu_are_copied_to_the_projectors_gpu(monkeypatch):
    monkeypatch.setattr(dense, "_COPY_BYTES", 1000)
    rows = random(4, 1000)
    features = RademacherProjector(64, device="cuda").project(rows, 0)

    assert features.is_cuda
    host = RademacherProjector(64).project(rows, 0)
    torch.testing.assert_close(features.cpu(), host, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_the_kernel_runs_on_the_gpu_that_the_gradients_are_on():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rows = random(4, 1000)
    with torch.cuda.device(0):
        features = RademacherProjector(64).project(rows.to("cuda:1"), 0)

    host = RademacherProjector(64).project(rows, 0)
    torch.testing.assert_close(features.cpu(), host, rtol=1e-4, atol=1e-4)
