"""Rows that Adam's state changes, against plain autograd and steps that torch.optim really makes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from dense_cases import close, columns, gradients, projection
from tiny_runs import Counting
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Normalization, Rows
from trak_lite.errors import CheckpointError, InvalidInputError, ManifestMismatchError, PrecisionError
from trak_lite.methods import LESS, GaussNewton, GradCos, GradDot

N, M, CLASSES, WORDS = 21, 4, 3, 9
KINDS = ("adam", "adam_update")
by_kind = pytest.mark.parametrize("kind", KINDS)


class Texts(nn.Module):
    """An embedding, layers with several positions, and a head that f does not use but training does."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.hidden = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.auxiliary = nn.Linear(5, 2)
        self.head = nn.Linear(5, CLASSES)

    def inner(self, ids):
        return self.norm(self.hidden(self.words(ids)).tanh()).mean(-2)

    def forward(self, ids):
        return self.head(self.inner(ids))


def dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS - 1, (count, 3), generator=generator)
    ids[0] = 2  # a word that occurs three times
    return TensorDataset(ids, torch.randint(CLASSES, (count,), generator=generator))


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)
TARGETS.tensors[0][-1] = WORDS - 1
"""The last target has a word that no train row has, so that Adam's moments of its embedding are zero."""


def trained(steps=4, **settings):
    torch.manual_seed(0)
    net = Texts().double()
    given = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, **settings}
    optimizer = torch.optim.AdamW(net.parameters(), **given)
    ids, labels = TRAIN.tensors
    for step in range(steps):
        optimizer.zero_grad()
        some = slice(step, step + 12)
        loss = nn.functional.cross_entropy(net(ids[some]), labels[some])
        (loss + net.auxiliary(net.inner(ids[some])).square().mean()).backward()
        optimizer.step()
    return net, optimizer


def saved(net, optimizer):
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


def attributor(path, net, kind, **changes):
    settings = {"projector": "none", "dtype": "float32", "normalize": kind, "progress": False, **changes}
    return Attributor(net, "image_classification", path, **settings)


def margins(net, data):
    ids, labels = data.tensors
    p = net(ids).softmax(1)[range(len(labels)), labels]
    return gradients(net, (p / (1 - p)).log())


def flat(rows):
    return np.concatenate([row.reshape(len(row), -1) for row in rows.values()], 1)


def scaled(net, optimizer, data):
    """Gradients of f over the fourth root of the bias-corrected second moment."""
    group, rows = optimizer.param_groups[0], margins(net, data)
    for name, p in net.named_parameters():
        state = optimizer.state[p]
        second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        root = (second / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
        rows[name] = np.where(second > 0, rows[name] / root.sqrt().numpy(), 0)
    return flat(rows)


def steps(net, optimizer, data):
    """The change of the weights over the learning rate, when Adam steps on the loss of one row."""
    rows = []
    for ids, label in data:
        own = copy.deepcopy(net)
        again = type(optimizer)(own.parameters())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again.param_groups[0].update(weight_decay=0.0, lr=1e-3)
        before = [p.detach().clone() for p in own.parameters()]
        for p in own.parameters():
            p.grad = torch.zeros_like(p)
        nn.functional.cross_entropy(own(ids[None]), label[None]).backward()
        again.step()
        pairs = zip(own.parameters(), before, strict=True)
        rows.append(torch.cat([(p.detach() - old).flatten() for p, old in pairs]) / 1e-3)
    return torch.stack(rows).numpy()


EXPECTED = {"adam": scaled, "adam_update": steps}


@pytest.mark.parametrize(
    ("computer", "amsgrad"),
    [pytest.param("hook", False, marks=pytest.mark.quick), ("functional", True), ("iterative", False)],
)
@by_kind
def test_rows_are_those_of_autograd_and_of_real_steps(tmp_path, kind, computer, amsgrad):
    net, optimizer = trained(amsgrad=amsgrad)
    made = attributor(tmp_path / "a.zarr", net, kind, gradient_computer=computer, store_norms=True)
    made.featurize(Rows(TRAIN, batch_size=8), saved(net, optimizer))
    made.score(TARGETS, name="test")

    found = columns(tmp_path / "a.zarr")
    close(found["features"], EXPECTED[kind](net, optimizer, TRAIN), rtol=1e-6)
    close(found["gradient_norm"], np.linalg.norm(flat(margins(net, TRAIN)), axis=1), rtol=1e-6)
    expected = scaled(net, optimizer, TARGETS) if kind == "adam" else flat(margins(net, TARGETS))
    close(columns(tmp_path / "a.zarr", "targets/test/ckpt-0")["features"], expected, rtol=1e-6)
    if kind == "adam":  # scores are products in the metric of Adam
        products = made.score(TARGETS, method=GradDot(q="off")).numpy()
        close(products, found["features"] @ expected.T, rtol=1e-5)


@by_kind
def test_gradients_that_do_not_fit_at_once_give_the_same_rows(tmp_path, kind, monkeypatch):
    """And checkpoints each have their own moments."""
    monkeypatch.setattr("trak_lite.featurizing.normalized._MOST_ENTRIES", 50)
    runs = [trained(steps=count) for count in (2, 5)]
    attributor(tmp_path / "a.zarr", runs[0][0], kind).featurize(TRAIN, [saved(*run) for run in runs])

    for number, run in enumerate(runs):
        found = columns(tmp_path / "a.zarr", f"ckpt-{number}")["features"]
        close(found, EXPECTED[kind](*run, TRAIN), rtol=1e-6)


@by_kind
def test_projected_rows_are_the_projection_of_these(tmp_path, kind):
    net, optimizer = trained()
    made = attributor(tmp_path / "a.zarr", net, kind, projector="gaussian", proj_dim=7, layout="joint")
    made.featurize(TRAIN, saved(net, optimizer))

    matrix = np.concatenate(list(projection(made.projector, made.parameters).values()))
    close(columns(tmp_path / "a.zarr")["features"], EXPECTED[kind](net, optimizer, TRAIN) @ matrix, rtol=1e-5)


@by_kind
def test_a_store_refuses_other_moments_and_other_kinds(tmp_path, kind):
    net, optimizer = trained()
    made, first = attributor(tmp_path / "a.zarr", net, kind), saved(net, optimizer)
    for source in (None, net.state_dict()):
        with pytest.raises(CheckpointError, match="has no optimizer state"):
            made.featurize(TRAIN, source)
    assert not (tmp_path / "a.zarr").exists()
    made.featurize(TRAIN, first)
    assert made.featurize(TRAIN, first).rows_written == 0

    other = copy.deepcopy(first)
    other["optimizer"]["state"][0]["exp_avg_sq"][1] *= 1.5
    with pytest.raises(ManifestMismatchError, match="optimizer"):
        made.featurize(TRAIN, other)
    for another in {"none", "unit", *KINDS} - {kind}:
        with pytest.raises(ManifestMismatchError, match="normalization"):
            attributor(tmp_path / "a.zarr", net, another).featurize(TRAIN, first)


@by_kind
def test_a_store_that_is_opened_again_continues_and_scores(tmp_path, kind):
    net, optimizer = trained()
    torch.save(saved(net, optimizer), tmp_path / "epoch-1.pt")
    made = attributor(tmp_path / "a.zarr", net, kind)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, 13), batch_size=4, name="texts"), tmp_path / "epoch-1.pt")

    fresh = Texts().double()  # other weights: those of the checkpoint are found again
    opened = Attributor.open(tmp_path / "a.zarr", fresh, progress=False)
    assert opened.normalization == Normalization(kind)
    summary = opened.featurize(Rows(TRAIN, batch_size=4, name="texts"), tmp_path / "epoch-1.pt")
    assert 0 < summary.rows_written < N
    close(columns(tmp_path / "a.zarr")["features"], EXPECTED[kind](net, optimizer, TRAIN), rtol=1e-6)

    scores = Attributor.open(tmp_path / "a.zarr", Texts().double(), progress=False).score(TARGETS)
    assert isinstance(scores.method, LESS if kind == "adam_update" else GaussNewton)
    again = attributor(None, net, kind)
    again.featurize(TRAIN, saved(net, optimizer))
    close(scores.numpy(), again.score(TARGETS).numpy())


@pytest.mark.parametrize("layout", ["module", "joint"])
def test_less_is_the_mean_cosine_of_steps_and_gradients_of_targets(layout):
    """Section 4.1 of arXiv:2402.04333: the sum over checkpoints of eta cos(Gamma(z), gradient of the target)."""
    runs, rates = [trained(steps=count) for count in (2, 5)], (0.05, 0.02)
    made = attributor(None, runs[0][0], "adam_update", layout=layout)
    made.featurize(TRAIN, [saved(*run) for run in runs])

    expected = np.zeros((N, M))
    for rate, run in zip(rates, runs, strict=True):
        sides = (steps(*run, TRAIN), flat(margins(run[0], TARGETS)))
        own, targets = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
        expected += rate * own @ targets.T
    scores = made.score(TARGETS, method=LESS(learning_rates=rates)).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-6 * max(rates))
    by_name = made.score(TARGETS, method={"name": "LESS", "learning_rates": list(rates)}).numpy()
    assert by_name.tobytes() == scores.tobytes()
    assert made.method == LESS()  # without learning rates, the cosine of whole rows
    cosines = made.score(TARGETS, method=GradCos(layout="joint")).numpy()
    np.testing.assert_allclose(made.score(TARGETS).numpy(), cosines, atol=1e-6)
    with pytest.raises(InvalidInputError, match="learning_rates has 1 numbers, but 2 checkpoints"):
        made.score(TARGETS, method=LESS(learning_rates=rates[:1]))


def test_the_fisher_information_is_that_of_scaled_gradients():
    """A diagonal change of coordinates: with all features and little damping the scores do not depend on it."""
    net, optimizer = trained()
    method = {"name": "Fisher", "samples_per_feature": 40, "max_draws": 4000, "damping": 1e-6}
    found = []
    for kind in ("none", "adam"):
        made = attributor(None, net, kind, grad_wrt="head.*", layout="joint", batch_size=512)
        made.featurize(TRAIN, saved(net, optimizer))
        found.append(made.score(TARGETS, method=method).numpy().ravel())

    assert np.corrcoef(*found)[0, 1] > 0.99


def test_methods_and_dtypes_that_the_rows_do_not_fit_are_refused():
    net, optimizer = trained()
    content = saved(net, optimizer)
    made = {kind: attributor(None, net, kind) for kind in ("none", *KINDS)}
    for one in made.values():
        one.featurize(TRAIN, content)
    refused = [(kind, "LESS", "normalize='adam_update'") for kind in ("none", "adam")]
    plain = ("GaussNewton", "TRAK", "TracIn", "GradDot", "Fisher")
    refused += [("adam_update", method, "rows are Adam updates") for method in plain]
    refused += [(kind, "EKFAC", f"normalize='{kind}', and EKFAC") for kind in KINDS]
    for kind, method, said in refused:
        with pytest.raises(InvalidInputError, match=said):
            made[kind].score(TARGETS, method=method)
    with pytest.raises(InvalidInputError, match="Self-influence"):
        made["adam_update"].score(TARGETS).self_influence()
    with pytest.raises(InvalidInputError, match="entry by entry"):
        Normalization("adam", scope="module")
    content = saved(*trained(eps=0.0))
    for state in content["optimizer"]["state"].values():
        state["exp_avg_sq"] *= 1e-24
    with pytest.raises(PrecisionError):
        attributor(None, net, "adam", dtype="float16").featurize(TRAIN, content)
