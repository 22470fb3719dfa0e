"""Dense projectors: within their memory budget; a K of one feature, and seeds of any size. Others are laws."""

import functools
import weakref

import pytest
import torch
from projection_cases import Operators, assert_close, random, random_gradients

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import GaussianProjector, RademacherProjector

KINDS = {"rademacher": RademacherProjector, "gaussian": GaussianProjector}
BUDGET = 600_000
gradients = functools.partial(
    random_gradients, {"conv": (3, 2, 2), "scale": (), "bias": (5,), "empty": (0, 4)}
)


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


@pytest.fixture
def buffers(monkeypatch):
    """Counts the bytes of live buffers of matrices and workspaces: ``now`` and ``most``."""
    GaussianProjector(4).project(random(1, 3), 0)  # quantiles are shared by the whole process
    count = {"now": 0, "most": 0}

    def release(nbytes):
        count["now"] -= nbytes

    def counted(*shape, dtype, device):
        with torch.inference_mode(False):
            buffer = torch.empty(shape, dtype=dtype, device=device)
        weakref.finalize(buffer, release, buffer.nbytes)
        count["now"] += buffer.nbytes
        count["most"] = max(count["most"], count["now"])
        return buffer

    for module in ("random.hash", "dense.matrices"):
        monkeypatch.setattr(f"trak_lite.projectors.{module}.empty_buffer", counted)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_entries", [200, 1000, 3000])
def test_no_more_than_the_budget_is_ever_held(make, dtype, num_entries, buffers):
    grads = {"a": random(4, num_entries, dtype=dtype), "b": random(4, 300, dtype=dtype)}
    projector, held = make(100, memory_budget=BUDGET), []
    with Operators() as seen:
        for model_id in (0, 1):
            projector.project(grads, model_id)
            held.append(buffers["now"])
    assert held[0] == held[1] > 0  # another model takes the place of the last one
    assert BUDGET / 8 < buffers["most"] <= BUDGET
    assert seen.nbytes <= BUDGET
    projector.free_memory()
    assert buffers["now"] == 0


def test_only_what_does_not_fit_is_drawn_again(make):
    """Words of the hash are counted by the operation that makes them."""
    grads = {"a": random(4, 3000, dtype=torch.float32)}
    drawn = {}
    for budget in (BUDGET, 1 << 30):
        projector, counts = make(100, memory_budget=budget), []
        for model_id in (0, 0, 1):
            with Operators() as seen:
                projector.project(grads, model_id)
            counts.append(seen.words)
        drawn[budget] = counts
    first, again, other = drawn[1 << 30]
    assert (again, first) == (0, other)
    first, again, other = drawn[BUDGET]
    kept = 3000 * (1 - again / first)
    assert first == other
    assert BUDGET / 4 / 512 < kept < BUDGET / 400  # a row takes 400 or, padded, 512 bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", [300_000, 600_000, 5_000_000])
def test_features_do_not_depend_on_the_memory_budget(make, dtype, budget):
    """Beyond the rounding of a product that is summed in other pieces; also after inference mode."""
    grads = {"a": random(5, 2000, dtype=dtype), "b": random(5, 70, dtype=dtype)}
    whole = make(100, memory_budget=1 << 30).project(grads, 0)
    projector = make(100, memory_budget=budget)
    with torch.inference_mode():
        inside = projector.project(grads, 0)
    assert_close(inside.clone(), whole, 1e-12 if dtype == torch.float64 else 1e-5)
    assert torch.equal(projector.project(grads, 0), inside)  # drawn, and kept
    wide = projector.project({name: grad.double() for name, grad in grads.items()}, 0)
    assert_close(wide, whole, 1e-12 if dtype == torch.float64 else 1e-5)


def test_gradients_of_another_dtype_are_cast_in_pieces(make, monkeypatch):
    monkeypatch.setattr("trak_lite.projectors.dense.matrices._CAST_BYTES", 64)
    grads = torch.full((4, 100), 60_000.0).half()  # two of them overflow float16
    assert_close(make(16).project(grads, 0), make(16).project(grads.double(), 0), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_chosen_dtype_is_the_dtype_of_the_features(make, dtype):
    grads = gradients(dtype=torch.float32)
    features = make(12, dtype=dtype).project(grads, 0)
    assert features.dtype == dtype
    exact = make(12).project({name: grad.double() for name, grad in grads.items()}, 0)
    assert_close(features, exact, {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype])


def test_a_memory_budget_too_small_for_one_row_is_refused_with_the_least_that_works(make):
    with pytest.raises(InvalidInputError, match="Give at least") as caught:
        make(1000, memory_budget=1000)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    tight = make(1000, memory_budget=least).project(random(2, 40), 0)
    assert_close(tight, make(1000).project(random(2, 40), 0), 1e-12)
    with pytest.raises(InvalidInputError, match="memory_budget"):
        make(1000, memory_budget=least - 1)


@pytest.mark.cuda
def test_gradients_on_the_cpu_are_copied_to_the_projectors_gpu_in_pieces(monkeypatch):
    monkeypatch.setattr("trak_lite.projectors.dense.matrices._COPY_BYTES", 1000)
    rows = random(4, 1000, dtype=torch.float32)
    features = RademacherProjector(64, device="cuda").project(rows, 0)
    assert features.is_cuda
    assert_close(features.cpu(), RademacherProjector(64).project(rows, 0), 1e-4)
