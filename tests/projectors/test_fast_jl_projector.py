"""Projections by an installed ``fast_jl``: around its limits, tested before use, replaced where it fails.

The extension needs a GPU; here a module with its functions and its limits takes its place on CPU tensors.
"""

import functools
import logging
import math
import re
import sys
from types import ModuleType

import pytest
import torch
from projection_cases import random32 as random

from trak_lite.projectors import (
    BasicProjector,
    CudaProjector,
    FastJLProjector,
    GaussianProjector,
    RademacherProjector,
)
from trak_lite.projectors.dense import fast_jl as wrapper
from trak_lite.testing import RandomProjectorTests

MULTIPROCESSORS = 4


class FakeFastJL(ModuleType):
    """The extension's six functions: the same limits, float16 inputs, a matrix that depends on the tiles."""

    def __init__(self, product=None):
        super().__init__("fast_jl")
        self.calls: list[tuple[str, tuple[int, ...], int, int, int]] = []
        self.product = product or multiplied
        for kind in ("rademacher", "normal"):
            for rows in (8, 16, 32):
                name = f"project_{kind}_{rows}"
                setattr(self, name, functools.partial(self.project, name, kind, rows))

    def project(self, name, kind, rows, grads, proj_dim, seed, num_feature_tiles):
        assert grads.dim() == 2, "input must be 2D"
        assert grads.is_contiguous(), "input must be contiguous"
        assert grads.dtype in (torch.float16, torch.float32), "input must be fp16 or fp32"
        assert 1 <= grads.shape[0] <= rows
        assert rows * grads.shape[1] < 2**32, "wrong addresses"
        assert 0 <= seed < 2**32
        assert num_feature_tiles >= 1
        if proj_dim % 512:
            raise ValueError("Invalid Number of JL dimensions it has to be a multiple of 512")
        self.calls.append((name, tuple(grads.shape), proj_dim, seed, num_feature_tiles))
        return self.product(grads, signs(kind, grads.shape[1], proj_dim, seed, num_feature_tiles), rows)


def multiplied(grads, matrix, rows=8):
    return grads.half().float() @ matrix.to(grads.device)


@functools.lru_cache(maxsize=64)
def signs(kind, features, proj_dim, seed, tiles):
    tiles = min(features, tiles)
    length = -(-features // tiles)
    parts = []
    for tile in range(tiles):
        generator = torch.Generator().manual_seed((seed + 359124577 * tile) % 2**32)
        normal = torch.randn(length, proj_dim, generator=generator)
        parts.append(normal.half().float() if kind == "normal" else normal.sign())
    return torch.cat(parts)[:features]


@pytest.fixture
def use(monkeypatch):
    """Installs a module in the place of the extension; no device has been tested yet, and none after the test."""

    def installed(fake, count=MULTIPROCESSORS):
        if isinstance(fake, FakeFastJL) and torch.cuda.is_available():
            pytest.skip(
                "what takes the place of the extension computes on the CPU, and projects on a GPU here"
            )
        monkeypatch.setitem(sys.modules, "fast_jl", fake)
        monkeypatch.setattr(wrapper, "multiprocessors", lambda device: count)
        wrapper._tested.cache_clear()

    wrapper._tested.cache_clear()
    yield installed
    wrapper._tested.cache_clear()


@pytest.fixture
def fake(use):
    module = FakeFastJL()
    use(module)
    return module


def matrix_of(call):
    name, shape, proj_dim, seed, tiles = call
    return signs(name.split("_")[1], shape[1], proj_dim, seed, tiles)


def ready(fake, proj_dim, **options):
    """A projector whose self-test is over."""
    projector = FastJLProjector(proj_dim, **options)
    fake.calls.clear()
    return projector


def assert_float16_close(found, expected):
    """As far as float16 goes: the extension rounds gradients to 11 bits, each row by itself."""
    size = expected.double().abs().amax(1, keepdim=True)
    torch.testing.assert_close(found.double() / size, expected.double() / size, rtol=0, atol=1e-3)


# ---- one map
class TestFastJLProjector(RandomProjectorTests):
    num_seeds = 50

    @pytest.fixture(autouse=True)
    def _installed(self, fake):
        self.fake = fake

    def make_projector(self, proj_dim, *, seed):
        return FastJLProjector(proj_dim, seed=seed)

    def test_projection_is_linear(self):
        x, y = random(4, 30), random(4, 30, seed=1)
        projector = self.make_projector(24, seed=0)
        expected = 2.5 * projector.project(x, 0) - 0.5 * projector.project(y, 0)
        assert_float16_close(projector.project(2.5 * x - 0.5 * y, 0), expected)


ROWS = {1: [8], 8: [8], 9: [16], 17: [32], 70: [32, 32, 8]}


@pytest.mark.parametrize("proj_type", ["rademacher", "normal"])
@pytest.mark.parametrize(
    ("num_rows", "num_entries", "proj_dim", "columns", "tiles"),
    [
        *((num_rows, 20, 16, 512, 1) for num_rows in ROWS),
        *((1, n, 8, 512, tiles) for n, tiles in ((1, 1), (256, 1), (257, 2), (5000, MULTIPROCESSORS))),
        *((1, 30, k, columns, 1) for k, columns in ((1, 512), (511, 512), (512, 512), (513, 1024))),
    ],
)
def test_features_are_the_first_columns_of_the_extensions_divided_by_the_root_of_k(
    fake, num_rows, num_entries, proj_dim, columns, tiles, proj_type
):
    """8, 16 or 32 rows at a time, and no tile without entries."""
    grads = random(num_rows, num_entries)
    features = ready(fake, proj_dim, proj_type=proj_type).project(grads, 0)
    assert [call[0] for call in fake.calls] == [f"project_{proj_type}_{rows}" for rows in ROWS[num_rows]]
    assert {(call[2], call[4]) for call in fake.calls} == {(columns, tiles)}
    assert sum(call[1][0] for call in fake.calls) == num_rows
    expected = grads @ matrix_of(fake.calls[0])[:, :proj_dim] / math.sqrt(proj_dim)
    atol = 4e-3 if proj_dim == 1 else 2e-3 if num_entries < 100 else 2e-2
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=atol)


# ---- around its limits
def test_long_parameters_are_cut_in_chunks_with_seeds_of_their_own(fake, monkeypatch):
    """The real limit, part of the definition, keeps 32 rows below 2**32 entries."""
    projector, grads = ready(fake, 512), random(40, 50)
    short = projector.project(grads[:, :20], 0)
    assert wrapper._MOST_ENTRIES == 1 << 24
    monkeypatch.setattr(wrapper, "_MOST_ENTRIES", 20)
    fake.calls.clear()
    features = projector.project(grads, 0)
    assert [shape for _, shape, *_ in fake.calls] == [(n, p) for p in (20, 20, 10) for n in (32, 8)]
    chunks = [matrix_of(call) for call in fake.calls[::2]]
    assert len({call[3] for call in fake.calls}) == 3
    assert_float16_close(features, grads @ torch.cat(chunks) / math.sqrt(512))
    assert_float16_close(short, grads[:, :20] @ chunks[0] / math.sqrt(512))


def test_without_entries_the_extension_is_not_called(fake):
    assert torch.equal(ready(fake, 8).project(torch.zeros(3, 0), 0), torch.zeros(3, 8))
    assert fake.calls == []


GRADIENTS = {
    "float64": random(4, 40).double(),
    "float16": random(4, 40).half(),
    "bfloat16": random(4, 40).bfloat16(),
    "not contiguous": random(40, 4).T,
    "rows of very different size": random(4, 40) * torch.tensor([[1e-9], [1.0], [1e9], [1e-30]]),
    **{f"2**{e}": random(4, 40).round(decimals=1) * 2.0**e for e in (-140, -100, -24, 20, 100)},
}
"""Float16 alone gives inf above 65504 and zero below 6e-8; the smallest are subnormal numbers of float32."""


@pytest.mark.parametrize("grads", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_every_dtype_size_and_layout_keep_their_bits(fake, grads):
    features = ready(fake, 64).project(grads, 0)
    assert features.dtype == torch.float32
    assert FastJLProjector(64, dtype=torch.float16).project(grads, 0).dtype == torch.float16
    assert_float16_close(features, grads.double() @ matrix_of(fake.calls[0])[:, :64].double() / 8)


def test_a_power_of_two_changes_no_bit_of_the_features(fake):
    projector, grads = ready(fake, 64), random(3, 40)
    assert torch.equal(projector.project(2.0**40 * grads, 0), 2.0**40 * projector.project(grads, 0))


def test_rows_of_zeros_and_rows_that_are_not_finite_stay_for_themselves(fake):
    for value in (math.inf, -math.inf, math.nan):
        grads = random(4, 40)
        grads[1, 5], grads[2] = value, 0
        features = ready(fake, 16).project(grads, 0)
        assert features.isfinite().all(1).tolist() == [True, False, True, True]
        assert features.bool().any(1).tolist() == [True, True, False, True]


# ---- the fingerprint
def test_the_fingerprint_names_the_map_and_the_multiprocessors(use, fake):
    fingerprint = FastJLProjector(16, seed=3).fingerprint()
    expected = {"proj_dim": 16, "seed": 3, "version": 1, "scaled": True, "multiprocessors": MULTIPROCESSORS}
    assert fingerprint == {"kind": "fast_jl_rademacher", **expected}
    normal = FastJLProjector(16, seed=3, proj_type="normal").fingerprint()
    assert normal == {"kind": "fast_jl_normal", **expected}
    use(fake, 5)
    assert FastJLProjector(16, seed=3).fingerprint() == {**fingerprint, "multiprocessors": 5}


# ---- the self-test
def test_the_self_test_runs_once_per_device_and_distribution_with_a_tile_per_multiprocessor(fake):
    FastJLProjector(16)
    tested = list(fake.calls)
    FastJLProjector(1024, seed=1)
    assert fake.calls == tested
    assert {name for name, *_ in tested} == {f"project_rademacher_{rows}" for rows in (8, 16, 32)}
    assert {tiles for *_, tiles in tested} == {MULTIPROCESSORS}
    FastJLProjector(16, proj_type="normal")
    assert len(fake.calls) == 2 * len(tested)


def spreading(grads, matrix, rows):
    features = multiplied(grads, matrix)
    return features if features.isfinite().all() else torch.full_like(features, math.nan)


def raising(grads, matrix, rows):
    raise RuntimeError("provided PTX was compiled with an unsupported toolchain")


def incomplete():
    module = FakeFastJL()
    del module.project_rademacher_16
    return module


FAULTS = {
    "a launch that failed unnoticed": (
        lambda grads, matrix, rows: torch.zeros(len(grads), matrix.shape[1]), "squared norms of features were off"),
    "another scale": (lambda g, m, rows: 1.5 * multiplied(g, m), "squared norms of features were off"),
    "the last entry unread": (lambda g, m, rows: multiplied(g[:, :-1], m[:-1]), "squared norms of features were off"),
    "random": (lambda g, m, rows: multiplied(g, m[:, torch.randperm(m.shape[1])]),
               "6 rows had other features than the same 6 rows before"),
    "biased": (lambda g, m, rows: multiplied(g, m) + 0.01, "a row of zeros had features other than zero"),
    "not linear": (lambda g, m, rows: multiplied(g.abs(), m), "the features of x - 2 y were not"),
    "hides": (lambda g, m, rows: multiplied(g.nan_to_num(0.0, 0.0, 0.0), m), "a gradient of inf gave finite features"),
    "spreads": (spreading, "a gradient of inf spoiled the features of other rows"),
    "other for 32": (lambda g, m, rows: multiplied(g, m.roll(int(rows == 32), 0)),
                     "24 rows had other features than the same 6 rows before"),
    "raises": (raising, "raised RuntimeError: provided PTX was compiled"),
    "incomplete": (None, "raised AttributeError: .*project_rademacher_16"),
}  # fmt: skip


@pytest.mark.parametrize(("product", "message"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_extension_is_replaced_with_one_warning(product, message, use, caplog):
    use(incomplete() if product is None else FakeFastJL(product))
    with caplog.at_level(logging.WARNING, "trak_lite"):
        first, second = (FastJLProjector(16, seed=seed) for seed in (0, 1))
    assert len(caplog.records) == 1
    assert re.search(message, caplog.text)
    assert torch.equal(first.project(random(3, 20), 0), RademacherProjector(16).project(random(3, 20), 0))
    assert second.fingerprint() == RademacherProjector(16, seed=1).fingerprint()


# ---- where it cannot be used
def test_without_a_gpu_the_projector_is_this_packages_own(use, caplog):
    """The number of multiprocessors is that of no other device."""
    with caplog.at_level(logging.WARNING, "trak_lite"):
        projector = FastJLProjector(16, seed=2, device="cpu")
    assert "fast_jl is not used on cpu: it needs an NVIDIA GPU" in caplog.text
    assert projector.fingerprint() == RademacherProjector(16, seed=2).fingerprint()
    normal = FastJLProjector(16, seed=2, device="cpu", proj_type="normal")
    assert normal.fingerprint() == GaussianProjector(16, seed=2).fingerprint()
    assert FastJLProjector(16, device="meta").fingerprint()["kind"] == "dense_rademacher"


class Finder:
    """Fails to import the extension."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name == "fast_jl":
            raise self.error


def test_an_extension_that_cannot_be_imported_is_replaced_and_other_errors_are_not_hidden(
    use, monkeypatch, caplog
):
    use(None)
    with caplog.at_level(logging.WARNING, "trak_lite"):
        FastJLProjector(16)
    assert "it cannot be imported" in caplog.text
    assert "pip install --no-build-isolation fast-jl" in caplog.text
    monkeypatch.delitem(sys.modules, "fast_jl")
    before = sys.meta_path
    monkeypatch.setattr(sys, "meta_path", [Finder(ImportError("undefined symbol: _ZN3c10")), *before])
    with caplog.at_level(logging.WARNING, "trak_lite"):
        FastJLProjector(16, proj_type="normal")
    assert "it cannot be imported (undefined symbol: _ZN3c10)" in caplog.text
    monkeypatch.setattr(sys, "meta_path", [Finder(MemoryError()), *before])
    wrapper._tested.cache_clear()
    with pytest.raises(MemoryError):
        FastJLProjector(16)


# ---- under the original's name
def cuda_projector(**options):
    arguments = dict(grad_dim=20, proj_dim=16, seed=3, proj_type="rademacher", device=None, max_batch_size=8)
    return CudaProjector(**{**arguments, **options})


def test_the_original_name_uses_the_extension_only_when_asked_and_without_its_scale(fake):
    assert cuda_projector().fingerprint()["kind"] == "dense_rademacher"
    assert fake.calls == []
    projector = cuda_projector(use_fast_jl=True)
    assert projector.fingerprint() == {**FastJLProjector(16, seed=3).fingerprint(), "scaled": False}
    fake.calls.clear()
    features = projector.project(random(10, 20), 1)
    calls = [(name, shape[0]) for name, shape, *_ in fake.calls]
    assert calls == [("project_rademacher_8", 8), ("project_rademacher_8", 2)]
    torch.testing.assert_close(features, 4 * FastJLProjector(16, seed=3).project(random(10, 20), 1))


def test_the_original_name_falls_back_to_the_map_of_the_other_original_names(use):
    projector = cuda_projector(use_fast_jl=True, device="cpu")
    basic = BasicProjector(20, 16, 3, "rademacher", "cpu")
    assert projector.fingerprint() == basic.fingerprint()
    assert torch.equal(projector.project(random(2, 20), 0), basic.project(random(2, 20), 0))


# ---- on a GPU
@pytest.mark.cuda
def test_the_installed_extension_passes_its_self_test(use):
    pytest.importorskip("fast_jl", reason="needs an installed fast_jl")
    projector = FastJLProjector(1000)
    assert projector.fingerprint()["kind"] == "fast_jl_rademacher"
    grads = random(40, 5000).cuda()
    features = projector.project(grads, 0)
    assert torch.equal(features, projector.project(grads, 0))
    inner = (features @ features.T - grads @ grads.T) / 5000
    assert float(inner.abs().max()) < 0.35


@pytest.mark.cuda
def test_on_any_stream_the_extension_sees_what_the_caller_wrote(monkeypatch, use):
    monkeypatch.setitem(sys.modules, "fast_jl", FakeFastJL())
    projector = FastJLProjector(512)
    host = random(8, 100_000)
    expected = projector.project(host.cuda(), 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        features = projector.project(host.cuda(), 0)
        features = features + 0
    torch.cuda.synchronize()
    assert torch.equal(features, expected)
