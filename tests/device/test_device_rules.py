"""What CUDA refuses, does later or does in another order, and what is to come out all the same."""

import warnings

import numpy as np
import pytest
import torch
from device_models import RECURRENT, Recurrent, make
from device_runs import CPU, PLAIN, assert_same, attributor, outcome, stored, verification
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from trak_lite import Attributor, Rows, token_scores
from trak_lite.core.devices import add_at_, float32_products, full_float32, in_float64, wide_dtype
from trak_lite.data.batches import move_batch
from trak_lite.errors import NonFiniteError
from trak_lite.featurizing import gradient_norms
from trak_lite.featurizing.kronecker.curvature import Eigenbasis
from trak_lite.gradient_computers import GRADIENT_COMPUTERS, collect_gradients, comparison, self_check
from trak_lite.gradient_computers.randomness import RandomState
from trak_lite.linalg.topk import TopK
from trak_lite.methods import CG, LiSSA
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.types import FactoredBlock


# ---- the stand-in has CUDA's rules
def test_the_stand_in_refuses_what_cuda_refuses(device, imitation, second_device):
    here = torch.ones(3, device=device)
    for refused, message in (
        (lambda: here + torch.ones(3), "same device"),
        (lambda: here + torch.ones(3, device=second_device), "same device"),
        (lambda: torch.randn(3, device=device, generator=torch.Generator()), "generator"),
    ):
        with pytest.raises(RuntimeError, match=message):
            refused()
    assert torch.equal((here * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))
    for kind, _ in RECURRENT.values():  # no backward in eval mode
        output = Recurrent(kind).eval().to(device)(make("lstm").train.tensors[0].to(device))
        with pytest.raises(RuntimeError, match="training mode"):
            output.sum().backward()


def test_the_stand_in_defers_copies_counts_and_rounds_products_where_tf32_is_allowed(device, imitation):
    values, synchronize = torch.arange(4.0, device=device), torch.get_device_module(device).synchronize
    copied = values.to("cpu", non_blocking=True)
    assert copied.isnan().all()
    synchronize()
    assert copied.tolist() == [0, 1, 2, 3]
    source, before = torch.ones(4).pin_memory(), imitation.overwritten()
    source.to(device, non_blocking=True)
    source.zero_()
    synchronize()
    assert imitation.overwritten() == before + 1
    before = imitation.kernels(), imitation.waits()
    float((torch.ones(2, device=device) + 1).sum())
    assert imitation.kernels() > before[0]
    assert imitation.waits() == before[1] + 1
    x, weight = torch.randn(8, 8), nn.Conv2d(1, 2, 3).weight.detach()
    image = x.view(1, 1, 8, 8)
    exact = nn.functional.conv2d(image, weight)
    assert not torch.equal(nn.functional.conv2d(image.to(device), weight.to(device)).cpu(), exact)
    assert torch.equal((x.to(device) @ x.to(device)).cpu(), x @ x)


# ---- default devices, copies that are not waited for, loaders, random numbers
class Doubled(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        inputs, label = self.rows[row]
        return inputs.to(torch.get_default_device()) * torch.ones(()), label


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, range(len(d))), Doubled], ids=["Subset", "own"])
def test_datasets_of_any_kind_are_read_with_a_default_device(wrap, device):
    torch.set_default_device(device)
    try:
        made, case = attributor("mlp", device)
        assert made.featurize(wrap(case.train)).rows_written == len(case.train)
    finally:
        torch.set_default_device(None)


def test_a_batch_that_comes_to_the_cpu_is_waited_for(device):
    values = torch.arange(1 << 20, device=device)
    assert torch.equal(move_batch(values, CPU), torch.arange(1 << 20))
    case = make("mlp")
    moved = TensorDataset(*(tensor.to(device) for tensor in case.train.tensors))
    made = Attributor(case.model, case.task, None, dtype="float32", proj_dim=8, batch_size=5, progress=False)
    made.featurize(moved)
    expected = outcome("mlp", CPU)
    for key, value in stored(made).items():
        np.testing.assert_array_equal(value, expected[key])


def test_a_loader_keeps_what_it_says_of_memory(device):
    rows = Rows(DataLoader(Subset(make("mlp").train, range(6)), batch_size=3, pin_memory=True))
    for _, batch in rows.batches([np.arange(3), np.arange(3, 6)]):
        assert all(tensor.is_pinned() for tensor in batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(rows.batches([np.arange(3)])))


def test_random_numbers_of_a_device_are_drawn_again(device):
    like = torch.empty(4, device=device)
    state = RandomState.of([like])
    drawn = like.uniform_().clone()
    assert state.has_moved()
    with state.replayed():
        assert torch.equal(like.uniform_(), drawn)


def test_a_bad_score_on_a_device_is_found_at_the_end(device):
    best = TopK(2, 1)
    for first, value in ((0, 1.0), (2, float("nan")), (4, float("inf"))):
        block = torch.zeros(2, 2, device=device)
        block[1, 1] = value
        best.update(first, block)
    with pytest.raises(NonFiniteError, match="train row 3 for target 1 is nan"):
        best.result()


# ---- devices without float64
@pytest.fixture
def no_float64(imitation):
    imitation.set_float64(False)
    wide_dtype.cache_clear()
    yield
    imitation.set_float64(True)
    wide_dtype.cache_clear()


def test_the_widest_dtype_is_asked_for(device, no_float64):
    assert wide_dtype(device) == torch.float32
    with pytest.raises(TypeError, match="no float64"):
        torch.ones(1, device=device).double()
    wide = in_float64(torch.ones(1, device=device))
    assert (wide.dtype, wide.device) == (torch.float64, CPU)


def test_only_some_kinds_of_devices_have_no_float64():
    assert wide_dtype(torch.device("mps")) == torch.float32
    assert wide_dtype(torch.device("cuda", 0)) == torch.float64


MODELS = ["mlp", "cnn", "vit", "gpt", "lstm", "regression", "multilabel", "binary", "clip"]
SETTINGS = [
    {"gradient_computer": "functional"},
    {"gradient_computer": "iterative"},
    {"dtype": "int4"},
    {"normalize": "unit"},
    {"store_norms": True},
    *({"projector": projector} for projector in ("gaussian", "two_sided", "none")),
]


@pytest.mark.parametrize(("name", "settings"), [
    *((name, {"dtype": "float16"}) for name in MODELS),
    *(("mlp", settings) for settings in SETTINGS),
    *((name, {"method": "Fisher"}) for name in ("mlp", "gpt", "binary", "regression")),
], ids=str)  # fmt: skip
def test_settings_without_float64(name, settings, device, no_float64):
    """Rows of equal bits; grams are summed up in float32 on the device."""
    expected, found = (outcome(name, where, **settings) for where in (CPU, device))
    if "dtype" in settings and device.type == "stand_in":
        for key in [key for key in expected if key.startswith(("ckpt", "targets"))]:
            np.testing.assert_array_equal(found[key], expected[key], err_msg=key)
    assert_same(found, expected, device, share=1e-2 if "method" in settings else 5e-3)


@pytest.mark.filterwarnings("ignore:LiSSA did not converge")
@pytest.mark.parametrize(("name", "method"), [
    *((name, "EKFAC") for name in ("mlp", "gpt", "binary", "regression")),
    *(("mlp", method) for method in (CG(damping=30.0), CG(draws=2, damping=30.0), LiSSA(depth=5))),
], ids=str)  # fmt: skip
def test_curvatures_and_solvers_without_float64(name, method, device, no_float64):
    found = {}
    for where in (CPU, device):
        made, case = attributor(name, where)
        made.featurize(case.train)
        scores = made.score(case.targets, name="t", method=method)
        found[where] = {"scores": scores.numpy().copy()}, [] if method == "EKFAC" else scores.convergence
    share = 1e-2 if method == "EKFAC" else 1e-3
    assert_same(found[device][0], found[CPU][0], device, share=share)
    for here, there in zip(found[device][1], found[CPU][1], strict=True):
        assert here.residuals.dtype == np.float64
        np.testing.assert_allclose(here.residuals, there.residuals, rtol=1e-2, atol=1e-5)


def test_token_scores_and_verification_without_float64(device, no_float64):
    made, case = attributor("gpt", device, method=PLAIN)
    made.featurize(case.train)
    scores = made.score(case.targets, name="t")
    tokens = token_scores(scores, case.train, [0])[0]
    assert_same({"sum": tokens.sum(0)}, {"sum": scores.numpy()[0]}, device, share=1e-3)
    verdicts = [verification(where)["verdict"] for where in (device, CPU)]
    np.testing.assert_allclose(*verdicts, rtol=0, atol=1e-3)


# ---- TF32
def precisions():
    backends = torch.backends
    newer = [backends, backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    host = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    older = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    return [setting.fp32_precision for setting in newer + host], older


@pytest.fixture(params=["highest", "high", "medium"])
def allowed(request):
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


def test_torch_has_its_precisions_back(device, allowed):
    before, (matmul, conv) = precisions(), (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    with full_float32(device):
        assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "ieee")
        with torch.backends.cudnn.flags(enabled=False):  # as models do; it reads the older flags
            assert torch.get_float32_matmul_precision() == "highest"
    assert precisions() == before
    assert torch.get_float32_matmul_precision() == allowed


def test_tf32_is_allowed_inside_a_pass_and_nowhere_else(allowed, device):
    seen = []

    def logits(call, batch):
        if len(seen) > 2:
            raise ValueError("no further pass")
        values = call(batch[0])
        seen.append(precisions())
        return values.square().sum(1)

    batch, task = (torch.randn(4, 3, device=device),), resolve_task(logits)
    model = nn.Linear(3, 2).to(device)
    made = GRADIENT_COMPUTERS["hook"](model, task, float32_products="tf32", self_check=False)
    given = precisions()
    made.stream_gradients(batch, lambda block: seen.append(precisions()))
    assert precisions() == given
    with pytest.raises(ValueError, match="no further pass"):
        made.stream_gradients(batch, lambda block: None)
    assert precisions() == given
    assert len(seen) > 2
    assert all(found == (["tf32"] * 5 + ["ieee"] * 3, ("high", True)) for found in seen), seen


class SeesTheModel(nn.Module):
    """Records how products are computed while it runs; mixes samples if asked to."""

    def __init__(self, mixes=0.0):
        super().__init__()
        self.layer, self.seen, self.mixes = nn.Linear(3, 2), set(), mixes

    def forward(self, x):
        self.seen.add(torch.backends.cuda.matmul.fp32_precision)
        return self.layer(x - self.mixes * x.mean(0, keepdim=True))


@pytest.mark.parametrize("engine", GRADIENT_COMPUTERS)
def test_the_model_and_the_reference_of_the_self_check_run_in_tf32(engine, device):
    model, task = SeesTheModel().to(device), resolve_task("image_classification")
    batch = torch.randn(4, 3, device=device), torch.zeros(4, dtype=torch.long, device=device)
    made = GRADIENT_COMPUTERS[engine](model, task, float32_products="tf32")
    made.stream_gradients(batch, lambda block: None)
    made.compute_loss_grad(batch)
    assert model.seen == {"tf32"}
    made.modelout_fn.evaluate(ModelCall(model), batch)
    assert model.seen == {"tf32", "ieee"}
    if engine == "hook":
        mixing = SeesTheModel(0.5).to(device)
        with pytest.raises(self_check.SelfCheckError):
            GRADIENT_COMPUTERS[engine](mixing, task, float32_products="tf32").stream_gradients(batch, print)


@pytest.mark.parametrize("engine", GRADIENT_COMPUTERS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_gradients_in_tf32_are_those_of_a_loop_in_tf32(name, engine, device, monkeypatch):
    """Its own self-check passes without a second look, and torch's loop is nearer than full products are."""
    monkeypatch.setattr(comparison, "_equal_in_float64", None)
    case = make(name)
    model, task = case.model.to(device).eval(), resolve_task(case.task)
    batch = move_batch((case.collate or default_collate)([case.train[i] for i in range(6)]), device)
    kind = GRADIENT_COMPUTERS[engine]
    found = collect_gradients(kind(model, task, float32_products="tf32"), batch)
    full = collect_gradients(kind(model, task), batch)
    with float32_products(device, "tf32"):
        output = task.evaluate(ModelCall(model, float32_products="tf32"), batch).output
        loop = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in output]
    expected = torch.cat([torch.stack(parts).flatten(1) for parts in zip(*loop, strict=True)], 1).cpu()
    flat = [torch.cat([part.flatten(1) for part in grads.values()], 1).cpu() for grads in (found, full)]
    errors = [float((grads - expected).norm() / expected.norm()) for grads in flat]
    assert errors[1] > 1e-5
    if (
        device.type == "cuda"
    ):  # libraries choose by the shape which products are rounded, and samples alone are another
        assert errors[0] <= errors[1]
    else:
        assert errors[0] < 0.8 * errors[1]  # without a matrix product, products of one row are not rounded


def test_norms_and_inverse_curvatures_are_computed_in_full_beside_rows_in_tf32(device, monkeypatch):
    block = FactoredBlock("w", torch.randn(3, 4, 64, device=device), torch.randn(3, 4, 64, device=device))
    with float32_products(device, "tf32"):
        inside = gradient_norms.squared_norms(block)
    with full_float32(device):
        assert torch.equal(inside, gradient_norms.squared_norms(block))
    seen, back = [], Eigenbasis.back
    monkeypatch.setattr(Eigenbasis, "back", lambda *given: seen.append(precisions()[0][2]) or back(*given))
    made, case = attributor("mlp", device, float32_products="tf32")
    made.featurize(case.train)
    made.score(case.targets, name="t", method="EKFAC")
    assert set(seen) == {"ieee"}


@pytest.mark.parametrize(
    ("name", "settings"), [("mlp", {"method": "Fisher"}), ("cnn", {"normalize": "unit"})]
)
def test_scores_of_rows_in_tf32_differ_a_little(name, settings, device):
    given = ({**settings, "float32_products": way} for way in ("ieee", "tf32"))
    full, found = (outcome(name, device, **each)["scores"] for each in given)
    assert not np.array_equal(found, full)
    assert np.linalg.norm(found - full) < 2e-2 * np.linalg.norm(full)


@pytest.mark.parametrize("most_held", [0, 5000, 1 << 30])
def test_norms_that_cancel_are_those_of_the_gradients(most_held, device, monkeypatch):
    """Two positions of opposite gradients and almost equal inputs; in float32 a Gram matrix loses their norm."""
    monkeypatch.setattr(gradient_norms, "_MOST_HELD", most_held)
    torch.manual_seed(0)
    blocks, expected = [], torch.zeros(6, dtype=torch.float64)
    for number in range(5):
        start, count = (0, 6) if number % 2 else (number, 6 - number)
        x, g = torch.randn(count, 2, 40), torch.randn(count, 2, 30)
        cancelling = torch.arange(start, start + count) % 2 == 0
        x[cancelling, 1] = x[cancelling, 0] + 1e-2 * torch.randn(int(cancelling.sum()), 40)
        g[cancelling, 1] = -g[cancelling, 0]
        blocks.append(FactoredBlock("w", x, g, start))
        expected[start : start + count] += (g.double().transpose(1, 2) @ x.double()).square().sum((1, 2))
    squares = {}
    for where in (CPU, device):
        norms = gradient_norms.GradientNorms(6)
        for block in blocks:
            norms.add(FactoredBlock("w", block.inputs.to(where), block.output_grads.to(where), block.start))
        squares[where] = norms.squared().cpu()
    torch.testing.assert_close(squares[device].double(), expected, rtol=1e-4, atol=0)
    if device.type == "stand_in":
        assert torch.equal(squares[device], squares[CPU])


# ---- the order of sums
def test_sums_by_index_have_an_order(device, imitation):
    torch.manual_seed(0)
    index, values = torch.randint(3, (500,)), torch.randn(2, 500)
    place, given = index.to(device), values.to(device)
    by_torch = [torch.zeros(3, device=device).index_add_(0, place, given[0]).cpu() for _ in range(2)]
    assert not torch.equal(*by_torch)
    for dim, part in ((0, given[0]), (1, given)):
        shape = (*part.shape[:-1], 3)
        sums = [add_at_(torch.zeros(shape, device=device), dim, place, part).cpu() for _ in range(2)]
        assert torch.equal(*sums)
        assert torch.equal(sums[0], add_at_(torch.zeros(shape), dim, index, part.cpu()))
