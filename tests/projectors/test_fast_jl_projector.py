"""Projections by an installed ``fast_jl``: around its limits, tested before use, replaced where it fails.

The extension needs a GPU; here a module with its functions and its limits takes its place on CPU tensors.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import sys
from types import ModuleType

import pytest
import torch
from projection_cases import random32 as random

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import (
    BasicProjector,
    CudaProjector,
    GaussianProjector,
    RademacherProjector,
)
from trak_lite.projectors.dense import fast_jl as wrapper
from trak_lite.projectors.dense.fast_jl import FastJLProjector
from trak_lite.testing.projectors import RandomProjectorTests
from trak_lite.types import DenseBlock

MULTIPROCESSORS = 4


class FakeFastJL(ModuleType):
    """The extension's six functions: the same limits, float16 inputs, a matrix that depends on the tiles."""

    def __init__(self) -> None:
        super().__init__("fast_jl")
        self.calls: list[tuple[str, tuple[int, ...], int, int, int]] = []
        for kind in ("rademacher", "normal"):
            for rows in (8, 16, 32):
                name = f"project_{kind}_{rows}"
                setattr(self, name, functools.partial(self.project, name, kind, rows))

    def project(
        self,
        name: str,
        kind: str,
        rows: int,
        grads: torch.Tensor,
        proj_dim: int,
        seed: int,
        num_feature_tiles: int,
    ) -> torch.Tensor:
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
        return self.product(grads, signs(kind, grads.shape[1], proj_dim, seed, num_feature_tiles))

    def product(self, grads: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return grads.half().float() @ matrix.to(grads.device)


@functools.lru_cache(maxsize=64)
def signs(kind: str, features: int, proj_dim: int, seed: int, tiles: int) -> torch.Tensor:
    tiles = min(features, tiles)
    length = -(-features // tiles)
    parts = []
    for tile in range(tiles):
        generator = torch.Generator().manual_seed((seed + 359124577 * tile) % 2**32)
        normal = torch.randn(length, proj_dim, generator=generator)
        parts.append(normal.half().float() if kind == "normal" else normal.sign())
    return torch.cat(parts)[:features]


def use(fake: ModuleType, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fast_jl", fake)
    monkeypatch.setattr(wrapper, "multiprocessors", lambda device: MULTIPROCESSORS)


@pytest.fixture
def fake(monkeypatch, untested):
    module = FakeFastJL()
    use(module, monkeypatch)
    return module


@pytest.fixture
def untested():
    """No device has been tested yet, and none has been after the test."""
    wrapper.fast_jl_engine.cache_clear()
    yield
    wrapper.fast_jl_engine.cache_clear()


def matrix_of(call) -> torch.Tensor:
    name, shape, proj_dim, seed, tiles = call
    return signs(name.split("_")[1], shape[1], proj_dim, seed, tiles)


def ready(fake: FakeFastJL, proj_dim: int, **options) -> FastJLProjector:
    """A projector whose self-test is over."""
    projector = FastJLProjector(proj_dim, **options)
    fake.calls.clear()
    return projector


# ---- one map


class TestFastJLProjector(RandomProjectorTests):
    @pytest.fixture(autouse=True)
    def _installed(self, fake):
        self.fake = fake

    def make_projector(self, proj_dim, *, seed):
        return FastJLProjector(proj_dim, seed=seed)

    def test_projection_is_linear(self):
        """As far as float16 goes: the extension rounds gradients to 11 bits."""
        x, y = {"w": random(4, 30)}, {"w": random(4, 30, seed=1)}
        projector = self.make_projector(24, seed=0)
        combined = projector.project({"w": 2.5 * x["w"] - 0.5 * y["w"]}, 0)

        expected = 2.5 * projector.project(x, 0) - 0.5 * projector.project(y, 0)
        torch.testing.assert_close(combined, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("proj_type", ["rademacher", "normal"])
def test_features_are_the_extensions_divided_by_the_root_of_k(fake, proj_type):
    projector = ready(fake, 512, proj_type=proj_type)
    grads = random(5, 40)
    features = projector.project(grads, 0)

    (call,) = fake.calls
    assert call[0] == f"project_{proj_type}_8"
    expected = grads @ matrix_of(call) / math.sqrt(512)
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-3)


def test_seeds_models_names_and_kinds_have_seeds_of_their_own(fake):
    grads = random(1, 20)
    for proj_type in ("rademacher", "normal"):
        for seed in (0, -1, 2**64):
            projector = FastJLProjector(512, seed=seed, proj_type=proj_type)
            for model_id, name in ((0, "a"), (1, "a"), (0, "b")):
                projector.project({name: grads}, model_id)

    ours = [call[3] for call in fake.calls if call[1] == (1, 20)]
    assert len(ours) == 18
    assert len(set(ours)) == 18


# ---- around its limits


@pytest.mark.parametrize(("proj_dim", "columns"), [(1, 512), (511, 512), (512, 512), (513, 1024)])
def test_any_k_is_the_first_columns_of_the_next_multiple_of_512(fake, proj_dim, columns):
    projector = ready(fake, proj_dim)
    grads = random(3, 30)
    features = projector.project(grads, 0)

    (call,) = fake.calls
    assert features.shape == (3, proj_dim)
    assert call[2] == columns
    expected = grads @ matrix_of(call)[:, :proj_dim] / math.sqrt(proj_dim)
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("num_rows", "calls"),
    [(1, [(8, 1)]), (8, [(8, 8)]), (9, [(16, 9)]), (17, [(32, 17)]), (70, [(32, 32), (32, 32), (8, 6)])],
)
def test_rows_are_projected_8_16_or_32_at_a_time(fake, num_rows, calls):
    projector = ready(fake, 16)
    projector.project(random(num_rows, 20), 0)

    assert [(int(name.split("_")[2]), shape[0]) for name, shape, *_ in fake.calls] == calls


def test_no_call_addresses_more_than_32_bits():
    assert 32 * wrapper._MOST_ENTRIES < 2**32


def test_long_parameters_are_cut_in_chunks_with_seeds_of_their_own(fake, monkeypatch):
    projector = ready(fake, 512)
    grads = random(40, 50)
    short = projector.project(grads[:, :20], 0)
    monkeypatch.setattr(wrapper, "_MOST_ENTRIES", 20)
    fake.calls.clear()
    features = projector.project(grads, 0)

    assert [shape for _, shape, *_ in fake.calls] == [(n, p) for p in (20, 20, 10) for n in (32, 8)]
    chunks = [matrix_of(call) for call in fake.calls[::2]]
    assert len({call[3] for call in fake.calls}) == 3
    expected = grads @ torch.cat(chunks) / math.sqrt(512)
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(short, grads[:, :20] @ chunks[0] / math.sqrt(512), rtol=1e-3, atol=2e-3)


def test_a_tile_is_never_without_entries(fake):
    projector = ready(fake, 8)
    for num_entries, tiles in ((1, 1), (256, 1), (257, 2), (5000, MULTIPROCESSORS)):
        projector.project(random(2, num_entries), 0)
        assert fake.calls[-1][4] == tiles


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_of_gradients_is_taken(fake, dtype):
    projector = ready(fake, 64)
    grads = random(3, 40, dtype=dtype)
    features = projector.project(grads, 0)

    assert features.dtype == torch.float32
    expected = grads.double() @ matrix_of(fake.calls[0])[:, :64].double() / 8
    torch.testing.assert_close(features.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("exponent", [-140, -100, -24, 0, 20, 100])
def test_gradients_of_any_size_keep_their_bits(fake, exponent):
    """Float16 alone gives inf above 65504 and zero below 6e-8."""
    grads = random(4, 40)
    grads = grads * (grads.abs() > 0.1)
    scale = torch.tensor([2.0]).double().pow(exponent).float()  # the smallest are subnormal
    projector = ready(fake, 64)
    features = projector.project(grads * scale, 0)

    expected = (grads * scale).double() @ matrix_of(fake.calls[0])[:, :64].double() / 8
    tolerance = 1e-3 * float(expected.abs().max())
    torch.testing.assert_close(features.double(), expected, rtol=0, atol=tolerance)


def test_rows_of_very_different_size_are_scaled_one_by_one(fake):
    grads = random(3, 40) * torch.tensor([[1e-9], [1.0], [1e9]])
    projector = ready(fake, 64)
    features = projector.project(grads, 0).double()

    expected = grads.double() @ matrix_of(fake.calls[0])[:, :64].double() / 8
    size = expected.abs().amax(1, keepdim=True)
    torch.testing.assert_close(features / size, expected / size, rtol=0, atol=1e-3)


def test_a_power_of_two_changes_no_bit_of_the_features(fake):
    projector = ready(fake, 64)
    grads = random(3, 40)

    assert torch.equal(projector.project(2.0**40 * grads, 0), 2.0**40 * projector.project(grads, 0))


def test_a_row_of_zeros_has_features_of_zero(fake):
    grads = random(3, 40)
    grads[1] = 0

    assert not ready(fake, 16).project(grads, 0)[1].any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_its_row_alone(fake, value):
    grads = random(3, 40)
    grads[1, 5] = value
    features = ready(fake, 16).project(grads, 0)

    assert features.isfinite().all(1).tolist() == [True, False, True]


def test_gradients_that_are_not_contiguous_are_taken(fake):
    projector = ready(fake, 16)
    grads = random(40, 6).T

    assert torch.equal(projector.project(grads, 0), projector.project(grads.contiguous(), 0))


def test_parameters_without_entries_add_nothing(fake):
    projector = ready(fake, 16)

    assert torch.equal(projector.project(torch.zeros(3, 0), 0), torch.zeros(3, 16))
    assert fake.calls == []


def test_a_chosen_dtype_is_the_dtype_of_the_features(fake):
    assert FastJLProjector(16, dtype=torch.float16).project(random(2, 9), 0).dtype == torch.float16
    with pytest.raises(InvalidInputError, match="dtype must be a floating-point dtype"):
        FastJLProjector(16, dtype=torch.int32)


# ---- the fingerprint


def test_the_fingerprint_names_the_map_and_the_multiprocessors(fake, monkeypatch):
    fingerprint = FastJLProjector(16, seed=3).fingerprint()

    assert fingerprint == {
        "kind": "fast_jl_rademacher",
        "proj_dim": 16,
        "seed": 3,
        "version": 1,
        "scaled": True,
        "multiprocessors": MULTIPROCESSORS,
    }
    wrapper.fast_jl_engine.cache_clear()
    monkeypatch.setattr(wrapper, "multiprocessors", lambda device: 132)
    assert FastJLProjector(16, seed=3).fingerprint() == {**fingerprint, "multiprocessors": 132}
    normal = FastJLProjector(16, seed=3, proj_type="normal").fingerprint()
    assert normal["kind"] == "fast_jl_normal"


def test_a_store_made_with_the_extension_refuses_this_packages_matrix(fake):
    assert FastJLProjector(16).fingerprint() != RademacherProjector(16).fingerprint()


# ---- the self-test


def test_the_self_test_runs_once_per_device_and_distribution(fake):
    FastJLProjector(16)
    tested = len(fake.calls)
    FastJLProjector(1024, seed=1)
    assert tested > 0
    assert len(fake.calls) == tested

    FastJLProjector(16, proj_type="normal")
    assert len(fake.calls) == 2 * tested


def test_the_self_test_calls_all_functions_with_a_tile_per_multiprocessor(fake):
    FastJLProjector(16)

    assert {name for name, *_ in fake.calls} == {f"project_rademacher_{rows}" for rows in (8, 16, 32)}
    assert {tiles for *_, tiles in fake.calls} == {MULTIPROCESSORS}


class Zero(FakeFastJL):
    """What a launch that failed unnoticed leaves."""

    def product(self, grads, matrix):
        return torch.zeros(grads.shape[0], matrix.shape[1])


class WrongScale(FakeFastJL):
    def product(self, grads, matrix):
        return 1.5 * super().product(grads, matrix)


class LastEntryUnread(FakeFastJL):
    def product(self, grads, matrix):
        return super().product(grads[:, :-1], matrix[:-1])


class Random(FakeFastJL):
    def product(self, grads, matrix):
        return super().product(grads, matrix[:, torch.randperm(matrix.shape[1])])


class Biased(FakeFastJL):
    def product(self, grads, matrix):
        return super().product(grads, matrix) + 0.01


class Nonlinear(FakeFastJL):
    def product(self, grads, matrix):
        return super().product(grads.abs(), matrix)


class Hides(FakeFastJL):
    """Inf and nan come out as numbers."""

    def product(self, grads, matrix):
        return super().product(grads.nan_to_num(0.0, 0.0, 0.0), matrix)


class Spreads(FakeFastJL):
    def product(self, grads, matrix):
        features = super().product(grads, matrix)
        return features if features.isfinite().all() else torch.full_like(features, math.nan)


class OtherFor32(FakeFastJL):
    def project(self, name, kind, rows, grads, proj_dim, seed, num_feature_tiles):
        return super().project(name, kind, rows, grads, proj_dim, seed + (rows == 32), num_feature_tiles)


class Raises(FakeFastJL):
    def product(self, grads, matrix):
        raise RuntimeError("provided PTX was compiled with an unsupported toolchain")


class Incomplete(FakeFastJL):
    def __init__(self):
        super().__init__()
        del self.project_rademacher_16


FAULTS = {
    Zero: "squared norms of features were off",
    WrongScale: "squared norms of features were off",
    LastEntryUnread: "squared norms of features were off",
    Random: "6 rows had other features than the same 6 rows before",
    Biased: "a row of zeros had features other than zero",
    Nonlinear: "the features of x - 2 y were not",
    Hides: "a gradient of inf gave finite features",
    Spreads: "a gradient of inf spoiled the features of other rows",
    OtherFor32: "24 rows had other features than the same 6 rows before",
    Raises: "raised RuntimeError: provided PTX was compiled",
    Incomplete: "raised AttributeError: .*project_rademacher_16",
}


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_extension_is_replaced_with_one_warning(faulty, monkeypatch, untested, caplog):
    use(faulty(), monkeypatch)
    with caplog.at_level(logging.WARNING, "trak_lite"):
        first, second = (FastJLProjector(16, seed=seed) for seed in (0, 1))

    assert len(caplog.records) == 1
    assert re.search(FAULTS[faulty], caplog.text)
    grads = random(3, 20)
    assert torch.equal(first.project(grads, 0), RademacherProjector(16).project(grads, 0))
    assert second.fingerprint() == RademacherProjector(16, seed=1).fingerprint()


# ---- where it cannot be used


def test_without_a_gpu_the_projector_is_this_packages_own(untested, caplog):
    with caplog.at_level(logging.WARNING, "trak_lite"):
        projector = FastJLProjector(16, seed=2, device="cpu")

    assert "fast_jl is not used on cpu: it needs an NVIDIA GPU" in caplog.text
    grads = random(3, 20)
    assert torch.equal(projector.project(grads, 0), RademacherProjector(16, seed=2).project(grads, 0))
    normal = FastJLProjector(16, seed=2, device="cpu", proj_type="normal")
    assert normal.fingerprint() == GaussianProjector(16, seed=2).fingerprint()


def test_without_the_extension_the_warning_says_how_to_install_it(monkeypatch, untested, caplog):
    use(None, monkeypatch)
    with caplog.at_level(logging.WARNING, "trak_lite"):
        FastJLProjector(16)

    assert "it cannot be imported" in caplog.text
    assert "pip install --no-build-isolation fast-jl" in caplog.text


def test_an_extension_built_for_another_torch_is_replaced(monkeypatch, untested, caplog):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "fast_jl":
                raise ImportError("undefined symbol: _ZN3c10")

    use(FakeFastJL(), monkeypatch)
    monkeypatch.delitem(sys.modules, "fast_jl")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with caplog.at_level(logging.WARNING, "trak_lite"):
        FastJLProjector(16)

    assert "it cannot be imported (undefined symbol: _ZN3c10)" in caplog.text


def test_an_error_of_another_kind_on_import_is_not_hidden(monkeypatch, untested):
    class Raising:
        def find_spec(self, name, path=None, target=None):
            if name == "fast_jl":
                raise MemoryError

    use(FakeFastJL(), monkeypatch)
    monkeypatch.delitem(sys.modules, "fast_jl")
    monkeypatch.setattr(sys, "meta_path", [Raising(), *sys.meta_path])
    with pytest.raises(MemoryError):
        FastJLProjector(16)


def test_no_device_but_a_gpu_has_multiprocessors():
    assert wrapper.multiprocessors(torch.device("cpu")) is None
    assert wrapper.multiprocessors(torch.device("meta")) is None


def test_an_unknown_distribution_is_refused():
    with pytest.raises(InvalidInputError, match="Did you mean 'rademacher'"):
        FastJLProjector(16, proj_type="rademachr")


# ---- under the original's name


def cuda_projector(**options) -> CudaProjector:
    arguments = dict(grad_dim=20, proj_dim=16, seed=3, proj_type="rademacher", device=None, max_batch_size=8)
    return CudaProjector(**{**arguments, **options})


def test_the_original_name_uses_the_extension_only_when_asked(fake):
    assert cuda_projector().fingerprint()["kind"] == "dense_rademacher"
    assert fake.calls == []
    fingerprint = cuda_projector(use_fast_jl=True).fingerprint()
    assert fingerprint == {**FastJLProjector(16, seed=3).fingerprint(), "scaled": False}


def test_the_original_name_gives_unscaled_features_with_its_number_of_rows_per_call(fake):
    projector = cuda_projector(use_fast_jl=True)
    fake.calls.clear()
    grads = random(10, 20)
    features = projector.project(grads, 1)

    assert [(name, shape[0]) for name, shape, *_ in fake.calls] == [
        ("project_rademacher_8", 8),
        ("project_rademacher_8", 2),
    ]
    native = FastJLProjector(16, seed=3).project(grads, 1)
    torch.testing.assert_close(features, 4 * native)


def test_the_original_name_falls_back_to_the_map_of_the_other_original_names(untested):
    projector = cuda_projector(use_fast_jl=True, device="cpu")
    basic = BasicProjector(20, 16, 3, "rademacher", "cpu")

    assert projector.fingerprint() == basic.fingerprint()
    assert torch.equal(projector.project(random(2, 20), 0), basic.project(random(2, 20), 0))


def test_a_number_of_rows_that_the_extension_does_not_have_is_refused():
    with pytest.raises(InvalidInputError, match=r"fast_jl projects \[8, 16, 32\] rows at a time, got 64"):
        cuda_projector(use_fast_jl=True, max_batch_size=64)


def test_blocks_of_some_rows_are_added_in_their_place(fake):
    projector = ready(fake, 16)
    grads = random(40, 5)
    accumulator = projector.accumulator(40, model_id=0, parameters={"w": (5,)})
    accumulator.add(DenseBlock("w", grads[33:], start=33))
    accumulator.add(DenseBlock("w", grads[:33]))

    torch.testing.assert_close(accumulator.features(), projector.project({"w": grads}, 0))


# ---- on a GPU


@pytest.mark.cuda
def test_the_installed_extension_passes_its_self_test(untested):
    pytest.importorskip("fast_jl", reason="needs an installed fast_jl")
    projector = FastJLProjector(1000)

    assert projector.fingerprint()["kind"] == "fast_jl_rademacher"
    grads = random(40, 5000).cuda()
    features = projector.project(grads, 0)
    assert torch.equal(features, projector.project(grads, 0))
    inner = (features @ features.T - grads @ grads.T) / 5000
    assert float(inner.abs().max()) < 0.35


@pytest.mark.cuda
def test_on_any_stream_the_extension_sees_what_the_caller_wrote(monkeypatch, untested):
    monkeypatch.setitem(sys.modules, "fast_jl", FakeFastJL())
    projector = FastJLProjector(512)
    host = random(8, 100_000)
    expected = projector.project(host.cuda(), 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        features = projector.project(host.cuda(), 0)
        features = features + 0

    torch.cuda.synchronize()
    assert torch.equal(features, expected)
