"""What CUDA refuses, does later or does in another order, and what is to come out all the same."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from device_models import Recurrent, make
from device_runs import REGROUPED, assert_same, attributor, numbers_in, outcome, retraining, stored
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from trak_lite import Attributor, Rows, token_scores, verify
from trak_lite._devices import add_at_, float32_products, full_float32, in_float64, wide_dtype
from trak_lite.data.batches import move_batch
from trak_lite.featurizing.kronecker.bases import Eigenbasis
from trak_lite.gradient_computers import GRADIENT_COMPUTERS, collect_gradients, reductions, self_check
from trak_lite.gradient_computers.hooks.randomness import RandomState
from trak_lite.gradient_computers.self_check import SelfCheckError
from trak_lite.methods import CG, TRAK, LiSSA
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.types import FactoredBlock

CPU = torch.device("cpu")
PLAIN = TRAK(damping=None, layout="stored")


# ---- the stand-in has CUDA's rules


def test_the_stand_in_refuses_what_cuda_refuses(device, imitation, second_device):
    here = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(3, device=second_device)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=device, generator=torch.Generator())
    assert torch.equal((here * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))


def test_the_stand_in_defers_copies(device, imitation):
    values = torch.arange(4.0, device=device)
    copied = values.to("cpu", non_blocking=True)
    assert copied.isnan().all()
    torch.get_device_module(device).synchronize()
    assert copied.tolist() == [0, 1, 2, 3]
    source, before = torch.ones(4).pin_memory(), imitation.overwritten()
    source.to(device, non_blocking=True)
    source.zero_()
    torch.get_device_module(device).synchronize()
    assert imitation.overwritten() == before + 1


def test_the_stand_in_counts(device, imitation):
    before = imitation.kernels(), imitation.waits()
    float((torch.ones(2, device=device) + 1).sum())
    assert imitation.kernels() > before[0]
    assert imitation.waits() == before[1] + 1


def test_the_stand_in_rounds_products_where_tf32_is_allowed(device, imitation):
    torch.manual_seed(0)
    x, layer = torch.randn(8, 8), nn.Conv2d(1, 2, 3)
    image, weight = x.view(1, 1, 8, 8), layer.weight.detach()
    exact = nn.functional.conv2d(image, weight)
    assert not torch.equal(nn.functional.conv2d(image.to(device), weight.to(device)).cpu(), exact)
    assert torch.equal((x.to(device) @ x.to(device)).cpu(), x @ x)


# ---- 1: recurrent layers


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_no_backward_in_eval_mode(kind, device, imitation):
    model = Recurrent(kind).eval().to(device)
    output = model(make("lstm").train.tensors[0].to(device))
    with pytest.raises(RuntimeError, match="training mode"):
        output.sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("engine", ["auto", "hook", "functional", "iterative"])
def test_every_engine_differentiates_recurrent_layers(engine, device):
    # Compared bit by bit or up to rounding in test_device_models.py.
    made, case = attributor("lstm", device, gradient_computer=engine)
    assert made.featurize(case.train).rows_written == len(case.train)
    assert torch.backends.cudnn.enabled


# ---- 2: a default device


class Doubled(Dataset):
    """Makes its samples on the default device."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        inputs, label = self.rows[row]
        return inputs.to(torch.get_default_device()) * torch.ones(()), label


@pytest.fixture
def default_device(device):
    before = torch.get_default_device()
    torch.set_default_device(device)
    yield device
    torch.set_default_device(before)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mlp", {}),
        ("mlp", {"projector": "mask"}),
        ("mlp", {"projector": "grass"}),
        ("mlp", {"projector": "countsketch", "gradient_computer": "functional"}),
        ("gpt", {"method": "Fisher"}),
        ("clip", {}),
    ],
    ids=str,
)
def test_a_default_device_changes_nothing(name, settings, device):
    expected = outcome(name, device, **settings)
    torch.set_default_device(device)
    try:
        found = outcome(name, device, **settings)
    finally:
        torch.set_default_device(None)
    assert_same(found, expected, device)


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, range(len(d))), Doubled], ids=["Subset", "own"])
def test_datasets_of_any_kind_are_read_with_a_default_device(wrap, default_device):
    made, case = attributor("mlp", default_device)
    case.model.to(default_device)
    assert made.featurize(wrap(case.train)).rows_written == len(case.train)


# ---- 3: copies that are not waited for


def test_a_batch_that_comes_to_the_cpu_is_waited_for(device):
    values = torch.arange(1 << 20, device=device)
    assert torch.equal(move_batch(values, CPU), torch.arange(1 << 20))


def test_a_model_on_the_cpu_reads_a_dataset_on_the_device(device):
    expected = outcome("mlp", CPU)
    case = make("mlp")
    moved = torch.utils.data.TensorDataset(*(tensor.to(device) for tensor in case.train.tensors))
    made = Attributor(case.model, case.task, None, dtype="float32", proj_dim=8, batch_size=5, progress=False)
    made.featurize(moved)
    for key, value in stored(made).items():
        np.testing.assert_array_equal(value, expected[key])


# ---- 5: devices without float64


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


MODELS = ["mlp", "cnn", "vit", "gpt", "lstm", "regression", "multilabel", "binary", "clip"]


@pytest.mark.parametrize("name", MODELS)
def test_default_settings_without_float64(name, device, no_float64):
    expected = outcome(name, CPU, dtype="float16")
    found = outcome(name, device, dtype="float16")
    for key, value in expected.items():
        rows = key.startswith(("ckpt", "targets"))  # of equal bits; grams are summed up in float32 there
        rounding = 0 if rows and device.type == "stand_in" else 5e-3 * np.abs(value).max()
        np.testing.assert_allclose(found[key], value, rtol=0, atol=rounding, err_msg=key)


@pytest.mark.parametrize("method", ["Fisher", "EKFAC"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "binary", "regression"])
def test_fitted_curvatures_without_float64(name, method, device, no_float64):
    scores = {}
    for where in (CPU, device):
        made, case = attributor(name, where, **({"method": "Fisher"} if method == "Fisher" else {}))
        made.featurize(case.train)
        scores[where] = made.score(case.targets, name="t", method=method).numpy().copy()
    scale = float(np.abs(scores[CPU]).max())
    np.testing.assert_allclose(scores[device], scores[CPU], rtol=0, atol=1e-2 * scale)


@pytest.mark.filterwarnings("ignore:LiSSA did not converge")
@pytest.mark.parametrize("method", [CG(damping=30.0), CG(draws=2, damping=30.0), LiSSA(depth=5)], ids=str)
def test_iterative_solvers_without_float64(method, device, no_float64):
    found = {}
    for where in (CPU, device):
        made, case = attributor("mlp", where)
        made.featurize(case.train)
        scores = made.score(case.targets, name="t", method=method)
        found[where] = scores.numpy().copy(), scores.convergence
    scale = float(np.abs(found[CPU][0]).max())
    np.testing.assert_allclose(found[device][0], found[CPU][0], rtol=0, atol=1e-3 * scale)
    for here, there in zip(found[device][1], found[CPU][1], strict=True):
        assert here.residuals.dtype == np.float64
        np.testing.assert_allclose(here.residuals, there.residuals, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_computer": "functional"},
        {"gradient_computer": "iterative"},
        {"dtype": "int4"},
        {"normalize": "unit"},
        {"store_norms": True},
        {"projector": "gaussian"},
        {"projector": "two_sided"},
        {"projector": "none"},
    ],
    ids=str,
)
def test_settings_without_float64(settings, device, no_float64):
    expected, found = (outcome("mlp", where, **settings) for where in (CPU, device))
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=5e-3 * np.abs(value).max(), err_msg=key)


def test_token_scores_and_verification_without_float64(device, no_float64):
    made, case = attributor("gpt", device, method=PLAIN)
    made.featurize(case.train)
    scores = made.score(case.targets, name="t")
    tokens = token_scores(scores, case.train, [0])[0]
    np.testing.assert_allclose(
        tokens.sum(0), scores.numpy()[0], rtol=0, atol=1e-3 * np.abs(scores.numpy()).max()
    )

    verdicts = {}
    for where in (CPU, device):
        made, case = attributor("mlp", where)
        made.featurize(case.train)
        scores = made.score(case.targets, name="t")
        train = retraining(case, where)
        verdict = verify(scores, train, case.targets, budget=12, calibrate=True, train_id="x")
        verdicts[where] = numbers_in(verdict.to_json())
    np.testing.assert_allclose(verdicts[device], verdicts[CPU], rtol=0, atol=1e-3)


# ---- 6: TF32


@pytest.fixture
def tf32_everywhere():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mlp", {"method": "Fisher"}),
        ("mlp", {"projector": "gaussian"}),
        ("cnn", {}),
        ("gpt", {"method": PLAIN}),
        ("lstm", {}),
    ],
    ids=str,
)
def test_float32_products_are_float32_whatever_torch_allows(name, settings, device, tf32_everywhere):
    found = outcome(name, device, **settings)
    torch.set_float32_matmul_precision("highest")
    assert_same(found, outcome(name, CPU, **settings), device, fused=name in REGROUPED)


def test_torch_has_its_precisions_back(device, tf32_everywhere):
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision, torch.backends.fp32_precision
    with full_float32(device):
        assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "ieee")
        with torch.backends.cudnn.flags(enabled=False):  # as models do; it reads the older flags
            assert torch.get_float32_matmul_precision() == "highest"
    assert (matmul.fp32_precision, conv.fp32_precision, torch.backends.fp32_precision) == before
    assert torch.get_float32_matmul_precision() == "high"


def precisions():
    backends = torch.backends
    newer = [backends, backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    host = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    older = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    return [setting.fp32_precision for setting in newer + host], older


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_tf32_is_allowed_inside_a_pass_and_nowhere_else(before, device):
    seen = []

    def logits(call, batch):
        if len(seen) > 2:
            raise ValueError("no further pass")
        values = call(batch[0])
        seen.append(precisions())
        return values.square().sum(1)

    torch.manual_seed(0)
    batch = (torch.randn(4, 3, device=device),)
    made = GRADIENT_COMPUTERS["hook"](
        nn.Linear(3, 2).to(device), resolve_task(logits), float32_products="tf32", self_check=False
    )
    torch.set_float32_matmul_precision(before)
    try:
        given = precisions()
        made.stream_gradients(batch, lambda block: seen.append(precisions()))
        assert precisions() == given
        with pytest.raises(ValueError, match="no further pass"):
            made.stream_gradients(batch, lambda block: None)
        assert precisions() == given
    finally:
        torch.set_float32_matmul_precision("highest")

    assert len(seen) > 2
    for newer, older in seen:
        assert (newer, older) == (["tf32"] * 5 + ["ieee"] * 3, ("high", True))


class SeesTheModel(nn.Module):
    """Records how products are computed while it runs."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), set()

    def forward(self, x):
        self.seen.add(torch.backends.cuda.matmul.fp32_precision)
        return self.layer(x)


@pytest.mark.parametrize("engine", GRADIENT_COMPUTERS)
def test_the_model_and_the_reference_of_the_self_check_run_in_tf32(engine, device):
    model = SeesTheModel().to(device)
    batch = torch.randn(4, 3, device=device), torch.zeros(4, dtype=torch.long, device=device)
    made = GRADIENT_COMPUTERS[engine](model, resolve_task("image_classification"), float32_products="tf32")
    made.stream_gradients(batch, lambda block: None)
    made.compute_loss_grad(batch)
    assert model.seen == {"tf32"}
    made.modelout_fn.evaluate(ModelCall(model), batch)
    assert model.seen == {"tf32", "ieee"}


@pytest.mark.parametrize("engine", GRADIENT_COMPUTERS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_gradients_in_tf32_are_those_of_a_loop_in_tf32(name, engine, device, monkeypatch):
    """Its own self-check passes without a second look, and torch's loop is nearer than full products are."""
    monkeypatch.setattr(self_check, "_equal_in_float64", None)
    case = make(name)
    model, task = case.model.to(device).eval(), resolve_task(case.task)
    rows = [case.train[i] for i in range(6)]
    batch = move_batch((case.collate or default_collate)(rows), device)
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
    assert (
        errors[0] < 0.8 * errors[1]
    )  # products of one row are not rounded where they are formed without a matrix product


def test_a_mixing_of_samples_is_refused_in_tf32(device):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(x - 0.5 * x.mean(0, keepdim=True))

    torch.manual_seed(0)
    task = resolve_task(lambda call, batch: call(batch[0]).square().sum(1))
    made = GRADIENT_COMPUTERS["hook"](Mixed().to(device), task, float32_products="tf32")
    with pytest.raises(SelfCheckError):
        made.stream_gradients((torch.randn(8, 6, device=device),), lambda block: None)


def test_norms_and_inverse_curvatures_are_computed_in_full_beside_rows_in_tf32(device, monkeypatch):
    torch.manual_seed(0)
    block = FactoredBlock("w", torch.randn(3, 4, 64, device=device), torch.randn(3, 4, 64, device=device))
    with float32_products(device, "tf32"):
        inside = reductions.squared_norms(block)
    with full_float32(device):
        assert torch.equal(inside, reductions.squared_norms(block))

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
    full, found = (
        outcome(name, device, **settings, float32_products=way)["scores"] for way in ("ieee", "tf32")
    )
    assert not np.array_equal(found, full)
    assert np.linalg.norm(found - full) < 2e-2 * np.linalg.norm(full)


@pytest.mark.parametrize("most_held", [0, 5000, 1 << 30])
def test_norms_that_cancel_are_those_of_the_gradients(most_held, device, monkeypatch):
    """Two positions of opposite gradients and almost equal inputs; in float32 a Gram matrix loses their norm."""
    monkeypatch.setattr(reductions, "_MOST_HELD", most_held)
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
        norms = reductions.GradientNorms(6)
        for block in blocks:
            norms.add(FactoredBlock("w", block.inputs.to(where), block.output_grads.to(where), block.start))
        squares[where] = norms.squared().cpu()
    torch.testing.assert_close(squares[device].double(), expected, rtol=1e-4, atol=0)
    if device.type == "stand_in":
        assert torch.equal(squares[device], squares[CPU])


# ---- 7: the order of sums


def test_sums_by_index_have_an_order(device, imitation):
    torch.manual_seed(0)
    index, values = torch.randint(3, (2, 500)), torch.randn(2, 500)
    place, given = index[0].to(device), values.to(device)
    by_torch = [torch.zeros(3, device=device).index_add_(0, place, given[0]).cpu() for _ in range(2)]
    assert not torch.equal(*by_torch)
    for dim, shape in ((0, (3,)), (1, (2, 3))):
        part = given[0] if dim == 0 else given
        sums = [add_at_(torch.zeros(shape, device=device), dim, place, part).cpu() for _ in range(2)]
        assert torch.equal(*sums)
        host = add_at_(torch.zeros(shape), dim, index[0], part.cpu())
        assert torch.equal(sums[0], host)


@pytest.mark.parametrize("projector", ["countsketch", "mask", "gaussian", "two_sided"])
def test_rows_are_the_same_bits_in_another_run(projector, device):
    first, second = (outcome("gpt", device, projector=projector) for _ in range(2))
    for key, value in first.items():
        np.testing.assert_array_equal(second[key], value, err_msg=key)


# ---- 8: two devices


def test_random_numbers_of_a_device_are_drawn_again(device):
    like = torch.empty(4, device=device)
    state = RandomState.of([like])
    drawn = like.uniform_().clone()
    assert state.has_moved()
    with state.replayed():
        assert torch.equal(like.uniform_(), drawn)


# ---- 9: loaders


def test_a_loader_keeps_what_it_says_of_memory(device):
    rows = Rows(DataLoader(Subset(make("mlp").train, range(6)), batch_size=3, pin_memory=True))
    for _, batch in rows.batches([np.arange(3), np.arange(3, 6)]):
        assert all(tensor.is_pinned() for tensor in batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(rows.batches([np.arange(3)])))
