"""CG and LiSSA against dense solves with a Gauss-Newton matrix of autograd's Jacobians, in float64."""

import logging
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from dense_cases import close, gradients, in_batches, plain_rows, recording, scored_in_every_way, streamed
from tiny_runs import CubeWithoutForwardMode
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import cached, register_parametrization
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import InvalidInputError, NonFiniteError, UnsupportedModelError
from trak_lite.methods import CG, EKFAC, LiSSA
from trak_lite.modelout_functions import CausalLanguageModelingModelOutput, ImageClassificationModelOutput

N, M = 12, 4
LABELS = "image_classification"
LM = CausalLanguageModelingModelOutput(
    output="margin"
)  # whose q times gradient is not that of the summed loss


class Normalized(nn.Module):
    """Layers with buffers, a frozen parameter, one that is read twice and one without axes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 5)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.last = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.3, device="cpu"))

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)) + self.frozen)
        return self.scale * self.last(torch.tanh(self.second(torch.tanh(self.second(hidden)))))


class Attention(nn.Module):
    """Tied embedding and fused attention, whose kernels have no forward-mode derivative."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 12)

    def forward(self, ids):
        q, k, v = self.inner(self.table(ids)).chunk(3, -1)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return {"logits": (self.table(ids) + found) @ self.table.weight.T, "ids": ids}


class Cubed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(CubeWithoutForwardMode.apply(self.first(x)))


class Sampled(nn.Linear):
    """A model that torch.func cannot transform."""

    def forward(self, x):
        return super().forward(x) * float(self.weight.detach().numpy().sum())


def prepared(make=Normalized):
    torch.manual_seed(0)
    model = make().double()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape) + (0.5 if "var" in name else 0))
    return model.eval()


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def texts(count, seed):
    ids = torch.randint(7, (count, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(ids, ids)


TRAIN, TARGETS = data(N, 0), data(M, 1)


class Sized(nn.Linear):
    """Returns the norms of its inputs, or keeps them for f to read."""

    def __init__(self, returns):
        super().__init__(4, 3)
        self.returns, self.size = returns, None

    def forward(self, x):
        self.size = x.norm(dim=1)
        return (super().forward(x), self.size) if self.returns else super().forward(x)


@pytest.mark.parametrize("size", [1, 4])
def test_products_are_those_of_an_f_that_reads_what_the_pass_keeps(size):
    def output(call, batch):
        found = call(batch[0])
        found, sizes = found if call.model.returns else (found, call.model.size)
        return found.log_softmax(1).gather(1, batch[1][:, None])[:, 0] * sizes

    kept, returned = (
        streamed(prepared(partial(Sized, returns)), output, Rows(TRAIN, batch_size=size), TARGETS, CG())
        for returns in (False, True)
    )
    close(kept.numpy(), returned.numpy())


@pytest.mark.parametrize(
    "beside",
    [
        lambda call: call.model.penalty,
        lambda call: call.parameters["weight"].square().sum(),
        lambda call: call.model.bias.square().sum(),
    ],
)
def test_an_f_with_parameters_beside_the_outputs_is_refused_by_exact_products(beside):
    class Penalized(nn.Linear):
        def forward(self, x):
            self.penalty = self.weight.square().sum()
            return super().forward(x)

    def output(call, batch):
        logits = call(batch[0])
        return logits.log_softmax(1).gather(1, batch[1][:, None])[:, 0] - 1e-6 * beside(call)

    with pytest.raises(UnsupportedModelError, match=r"'(weight|bias)' also beside what model calls return"):
        streamed(prepared(lambda: Penalized(4, 3)), output, TRAIN, TARGETS, CG())


class Weighted(nn.Module):
    """A layer with the weight tanh(w), computed in a way of its own."""

    def __init__(self, weigh=lambda model: model.first.weight.tanh()):
        super().__init__()
        self.first, self.last, self.weigh = nn.Linear(4, 3), nn.Linear(3, 3), weigh
        self.same, self.listed, self.kept = self.first, [self.first.weight], None

    def train(self, mode=True):
        self.register_buffer("filter", None if mode else self.first.weight.tanh(), persistent=False)
        return super().train(mode)

    def forward(self, x):
        return self.last(functional.linear(x, self.weigh(self), self.first.bias).tanh())


@pytest.mark.parametrize("weigh", [lambda model: model.filter, lambda model: model.listed[0].tanh()])
@pytest.mark.parametrize("method", [CG(), LiSSA()])
def test_exact_products_refuse_outputs_that_replaced_parameters_do_not_reach(weigh, method):
    with pytest.raises(
        UnsupportedModelError, match=r"Weighted reads 'first\.weight' from a tensor that eval\(\)"
    ):
        streamed(prepared(partial(Weighted, weigh)), LABELS, TRAIN, TARGETS, method)
    found, expected = (
        streamed(prepared(make), LABELS, TRAIN, TARGETS, EKFAC(), gradient_computer="iterative").numpy()
        for make in (partial(Weighted, weigh), Weighted)
    )
    close(found, expected)


def parametrized(weigh):
    model = Weighted(weigh)
    register_parametrization(model.first, "weight", nn.Tanh(), unsafe=True)
    return model


def of_the_first_pass(model):
    model.kept = model.first.weight.tanh() if model.kept is None else model.kept
    return model.kept


def in_a_cache(model):
    with cached():
        return (model.first.weight + model.first.weight) / 2


@pytest.mark.parametrize(
    ("make", "weigh"),
    [
        (Weighted, of_the_first_pass),
        (Weighted, lambda model: model.same.weight.tanh()),
        (parametrized, in_a_cache),
    ],
)
def test_exact_products_of_weights_that_a_pass_computes(make, weigh):
    engine = {"gradient_computer": "iterative"}
    found, expected = (
        streamed(
            prepared(one), LABELS, TRAIN, TARGETS, CG(tolerance=1e-9, max_iterations=200), **engine
        ).numpy()
        for one in (partial(make, weigh), Weighted)
    )
    close(found, expected)


def dense_matrix(model, train):
    """Sum over rows of J^T H J, with the Jacobian and Hessian of one row at a time, ``(P, P)``."""
    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    total = 0
    for inputs, labels in train:

        def logits(parameters, inputs=inputs):
            out = functional_call(model, parameters, (inputs[None],))
            return (out["logits"] if isinstance(out, dict) else out).flatten()

        def loss(z, labels=labels):
            if labels.dim() == 0:
                return functional.cross_entropy(z[None], labels[None])
            return functional.cross_entropy(z.reshape(len(labels), -1)[:-1], labels[1:], reduction="sum")

        # torch 2.14 warns that vmap of another kernel's backward pass is slow.
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = torch.cat([part.reshape(len(part), -1) for part in jacrev(logits)(values).values()], 1)
        total = total + jacobian.T @ torch.autograd.functional.hessian(loss, logits(values)) @ jacobian
    return [(np.arange(len(total)), total.numpy())]


@pytest.mark.parametrize(
    ("make", "task", "train", "targets"),
    [
        (Normalized, LABELS, TRAIN, TARGETS),
        (Cubed, LABELS, data(60, 0), data(30, 1)),  # more vectors than go through the model at once
        pytest.param(Attention, LM, texts(5, 2), texts(3, 3), marks=pytest.mark.quick),
    ],
)
def test_cg_is_the_dense_solve_for_every_target(make, task, train, targets, tmp_path, caplog):
    model = prepared(make)
    plain = plain_rows(model, task, train, targets, tmp_path)
    method = CG(damping=0.5, absolute=True, tolerance=1e-9, max_iterations=500)
    with caplog.at_level(logging.INFO, "trak_lite"):
        found = streamed(model, task, in_batches(train, 60 if make is Cubed else 7), targets, method)
    close(found.numpy(), plain.scores(dense_matrix(model, train), 0.5, absolute=True))
    assert ("two backward passes" in caplog.text) == (make is Cubed)
    (convergence,) = found.convergence
    assert convergence.iterations.shape == convergence.residuals.shape == (len(targets),)
    assert (convergence.residuals <= 1e-9).all()
    assert 1 < convergence.iterations.max() <= 150
    assert f"iterations for {len(targets)} targets" in caplog.text


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.inner(x[:, :, None])[0][:, -1])


def test_the_fused_lstm_of_a_cpu_has_the_dense_solve(tmp_path):
    """In float32, in which it is fused."""
    model = prepared(Recurrent)
    expected = plain_rows(model, LABELS, TRAIN, TARGETS, tmp_path).scores(
        dense_matrix(model, TRAIN), 0.5, absolute=True
    )
    rows, targets = (TensorDataset(x.float(), labels) for x, labels in (TRAIN.tensors, TARGETS.tensors))
    method = CG(damping=0.5, absolute=True, tolerance=1e-6, max_iterations=200)
    close(streamed(model.float(), LABELS, rows, targets, method).numpy(), expected, rtol=1e-3)


def test_products_of_drawn_labels_are_those_of_their_gradients(tmp_path, monkeypatch):
    """The same labels in every product, each draw with an equal share."""
    model, (task, drawn) = prepared(Cubed), recording(LABELS, monkeypatch)
    plain = plain_rows(model, LABELS, TRAIN, TARGETS, tmp_path)
    method = CG(damping=0.5, absolute=True, tolerance=1e-9, max_iterations=200, draws=2)
    found = streamed(model, task, in_batches(TRAIN, N), TARGETS, method)
    labels = [one[1] for one in drawn[2:]]  # after those of the two passes of the preconditioner
    assert all(torch.equal(one, labels[number % 2]) for number, one in enumerate(labels))
    losses = [functional.cross_entropy(model(TRAIN.tensors[0]), one, reduction="none") for one in labels[:2]]
    rows = gradients(model, torch.cat(losses))
    flat = np.concatenate([grad.reshape(2 * N, -1) for grad in rows.values()], 1)
    close(found.numpy(), plain.scores([(np.arange(flat.shape[1]), flat.T @ flat / 2)], 0.5, absolute=True))


def test_lissa_converges_to_the_dense_solve(tmp_path):
    model = prepared()
    plain = plain_rows(model, LABELS, TRAIN, TARGETS, tmp_path)
    expected = plain.scores(dense_matrix(model, TRAIN), 5.0, absolute=True)
    found = streamed(model, LABELS, TRAIN, TARGETS, LiSSA(damping=5.0, absolute=True, depth=60, rows=N))
    close(found.numpy(), expected)
    assert found.convergence[0].residuals.max() < 1e-4
    drawn = LiSSA(damping=5.0, absolute=True, depth=60, rows=N // 2, repeats=2)
    found = streamed(model, LABELS, TRAIN, TARGETS, drawn)
    assert np.corrcoef(found.numpy().flatten(), expected.flatten())[0, 1] > 0.99
    assert found.convergence[0].iterations.tolist() == [120] * M


def test_the_damping_has_the_units_of_ekfac():
    """With much damping both inverses are that of the damping alone."""
    ekfac, cg = (streamed(prepared(), LABELS, TRAIN, TARGETS, method(damping=1e5)) for method in (EKFAC, CG))
    close(cg.numpy(), ekfac.numpy(), rtol=2e-2)


def test_what_did_not_converge_is_reported():
    method = CG(damping=1e-3, max_iterations=2, tolerance=1e-8)
    with pytest.warns(UserWarning, match=r"CG did not converge .* 1e-08 for 4 of 4 targets at current"):
        found = streamed(prepared(), LABELS, TRAIN, TARGETS, method)
    assert (found.convergence[0].residuals > 1e-8).all()
    assert found.convergence[0].iterations.tolist() == [2] * M
    with pytest.raises(NonFiniteError, match="diverged at scale=1e-06"):
        streamed(prepared(Cubed), LABELS, TRAIN, TARGETS, LiSSA(scale=1e-6, depth=60, rows=N))


def first_output(call, batch):
    return call(batch[0])[:, 0]


def test_a_target_without_a_gradient_needs_no_iteration():
    targets = TensorDataset(torch.cat([torch.zeros(1, 4, dtype=torch.float64), TARGETS.tensors[0]]))
    model, train = prepared(lambda: nn.Linear(4, 1, bias=False)), TensorDataset(TRAIN.tensors[0])
    found = streamed(model, first_output, train, targets, CG(tolerance=1e-6))
    assert not found.numpy()[:, 0].any()
    assert found.convergence[0].iterations[0] == found.convergence[0].residuals[0] == 0


def scaled_output(factor):
    return lambda call, batch: call(batch[0])[:, 0] * factor


def test_cg_is_linear_in_targets_whose_squares_leave_float32():
    """A power of 2 changes no bits."""
    model = prepared(Cubed).float()
    rows, targets = (TensorDataset(x.float(), labels) for x, labels in (TRAIN.tensors, TARGETS.tensors))
    made = Attributor(model, LABELS, None, projector="none", dtype="float32", progress=False)
    made.featurize(rows)
    plain, *others = (
        made.score(targets, f"{power}", method=CG(tolerance=1e-4), task=scaled_output(2.0**power)).numpy()
        * 2.0**-power
        for power in (0, -60, -80, 70)
    )
    assert plain.any()
    for found in others:
        np.testing.assert_array_equal(found, plain)


def test_lissa_does_not_depend_on_units_whose_squares_leave_float32():
    """Inputs and weights in other units have the same outputs, and a curvature of other size; so may targets."""
    found, residuals = [], []
    for unit, power in ((1.0, 0), (2.0**-40, 0), (1.0, -80)):
        model = prepared(lambda: nn.Linear(4, 3, bias=False)).float()
        model.load_state_dict({"weight": model.weight / unit})
        rows, targets = (
            TensorDataset(unit * x.float(), labels) for x, labels in (TRAIN.tensors, TARGETS.tensors)
        )
        made = Attributor(model, LABELS, None, progress=False)
        method, task = LiSSA(damping=10.0, depth=5, rows=N), scaled_output(2.0**power)
        scores = made.stream_scores(rows, targets, method=method, task=task)
        found.append(scores.numpy() * 2.0**-power)
        residuals.append(scores.convergence[0].residuals)
    for one in (found, residuals):
        assert one[0].all()
        np.testing.assert_allclose(one[1:], [one[0]] * 2, rtol=1e-3)


def test_scores_of_stored_rows_refine_and_parts_of_targets_agree(tmp_path):
    method = CG(damping=30.0, tolerance=1e-5, max_iterations=100)
    stored, _, parts, refined, again = scored_in_every_way(
        prepared(), TRAIN, TARGETS, method, tmp_path / "s", max_bytes=3_000, rtol=1e-3
    )
    assert refined.convergence[0].iterations.shape == parts.convergence[0].iterations.shape == (M,)
    found = again.score(TARGETS, "t", method=method, checkpoints=prepared().state_dict())
    np.testing.assert_array_equal(found.numpy(), stored)


@pytest.mark.parametrize(
    ("method", "settings", "rtol"),
    [
        (EKFAC, {"damping": 2.0, "fisher": "empirical"}, 1e-5),
        (CG, {"damping": 5.0, "absolute": True, "tolerance": 1e-6, "max_iterations": 100}, 1e-4),
    ],
)
def test_some_rows_stand_for_all(method, settings, rtol):
    """Every row comes three times, one of them is fitted to, or is in the products."""
    tripled = TensorDataset(*(part.repeat_interleave(3, 0) for part in TRAIN.tensors))
    one, every, few = (
        streamed(prepared(Cubed), LABELS, tripled, TARGETS, method(max_rows=count, **settings)).numpy()
        for count in (N, None, N - 5)
    )
    close(one, every, rtol=rtol)
    assert 0.8 < np.corrcoef(few.flatten(), every.flatten())[0, 1] < 0.99999


class Taking(ImageClassificationModelOutput):
    """Takes the columns that it reads out of the batch."""

    def evaluate(self, call, batch):
        return super().evaluate(call, (batch.pop("x"), batch.pop("labels")))

    def sample_labels(self, call, batch, noise):
        x, labels = super().sample_labels(call, (batch.pop("x"), batch.pop("labels")), noise)
        return {"x": x, "labels": labels}


@pytest.mark.filterwarnings("ignore:LiSSA did not converge")
@pytest.mark.parametrize("method", [CG(), CG(draws=2), LiSSA(depth=3)], ids=["exact", "drawn", "lissa"])
def test_a_task_may_take_entries_out_of_its_batch(method):
    columns = [[{"x": x, "labels": label} for x, label in rows] for rows in (TRAIN, TARGETS)]
    expected = streamed(prepared(), LABELS, TRAIN, TARGETS, method).numpy()
    close(streamed(prepared(), Taking(), *columns, method).numpy(), expected)


class Warned(nn.Linear):
    def forward(self, x):
        warnings.warn("of the model", UserWarning, stacklevel=1)
        return super().forward(x)


def test_a_warning_of_a_model_is_not_repeated_in_every_product():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        streamed(prepared(lambda: Warned(4, 3)), LABELS, Rows(TRAIN, batch_size=1), TARGETS, CG())
    assert sum("of the model" in str(one.message) for one in caught) < N


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_solved_is_refused():
    said = r"Gauss-Newton products of Sampled: .*[^.]\. Switch gradient checkpointing off.* CG\(draws=\) or EKFAC"
    with pytest.raises(UnsupportedModelError, match=said):
        streamed(prepared(lambda: Sampled(4, 3)), LABELS, TRAIN, TARGETS, CG())
    streamed(prepared(lambda: Sampled(4, 3)), LABELS, TRAIN, TARGETS, CG(draws=1))
    with pytest.raises(InvalidInputError, match="fisher='sampled' draws labels"):
        streamed(prepared(Cubed), first_output, TRAIN, TARGETS, CG(draws=1))
