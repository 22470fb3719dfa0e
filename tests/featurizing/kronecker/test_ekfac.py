"""EK-FAC and K-FAC of every kind of parameter, against dense matrices of plain loops in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from dense_cases import (
    close,
    gradients,
    in_batches,
    plain_rows,
    projection,
    recording,
    scored_in_every_way,
    streamed,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    NonFiniteError,
    UnsupportedModelError,
)
from trak_lite.methods import EKFAC
from trak_lite.modelout_functions import (
    AbstractModelOutput,
    CallableModelOutput,
    CLIPModelOutput,
    resolve_task,
)
from trak_lite.store import check_store, open_store
from trak_lite.types import OutputTerms

LABELS = "image_classification"
N, M = 9, 4
NOTED = 8
"""Rows whose drawn labels are noted when a fit begins."""
Batch = tuple[Tensor, ...]
Factors = tuple[np.ndarray, np.ndarray]


def eigen(rows, max_side):
    """Eigenvalues and vectors of the second moments; a side that is too long keeps its coordinates."""
    if rows.shape[1] > max_side:
        return (rows**2).sum(0), np.eye(rows.shape[1])
    return np.linalg.eigh(rows.T @ rows)


def layer_matrix(grads, basis, method):
    """The dense curvature of one layer, row-major over ``(d_out, d_in)``.

    Args:
        grads: ``(N, d_out, d_in)``, for the eigenvalues.
        basis: Inputs ``(positions, d_in)`` and output gradients ``(positions, d_out)`` of all rows.
        method: Its fields.
    """
    (in_values, in_vectors), (out_values, out_vectors) = (eigen(side, method.max_side) for side in basis)
    values = np.outer(out_values, in_values) / len(basis[0])
    if method.correct_eigenvalues:
        values = ((out_vectors.T @ grads @ in_vectors) ** 2).sum(0)
    turned = np.kron(out_vectors, in_vectors)
    return turned @ np.diag(values.reshape(-1)) @ turned.T


def factors(model, layer, losses):
    """Inputs (patches of a convolution) and output gradients of a layer, ``(positions, d)`` each."""
    caught = {}
    module = model.get_submodule(layer)
    with module.register_forward_hook(lambda _, given, out: caught.update(x=given[0], out=out)):
        total = losses().sum()
    (g,) = torch.autograd.grad(total, caught["out"])
    x = caught["x"].detach()
    if isinstance(module, nn.Conv1d):  # as an image of height 1
        x = functional.unfold(x[:, :, None], (1, *module.kernel_size)).transpose(1, 2)
    if isinstance(module, nn.Conv2d):
        x = functional.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)
        x = x.transpose(1, 2)
    if not isinstance(module, nn.Linear):
        g = g.flatten(2).transpose(1, 2)
    x, g = x.reshape(-1, x.shape[-1]).numpy(), g.reshape(-1, g.shape[-1]).numpy()
    counted = x.any(1) | g.any(1)  # others are padding
    return x[counted], g[counted]


@dataclass
class Case:
    """A model, its data, and what its parameters are in the curvature."""

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...] = (5,)
    units: dict[str, bool] = field(default_factory=dict)
    """Layers with Kronecker factors, and whether their bias belongs to them; all else has its diagonal."""
    settings: dict[str, Any] = field(default_factory=lambda: {"fisher": "empirical"})
    task: Any = LABELS
    losses: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: functional.cross_entropy(
        model(batch[0]), batch[1], reduction="none"
    )
    """Loss of every row: the curvature is the sum of the squares of its gradients."""

    def model(self):
        torch.manual_seed(0)
        return self.build().double().eval()

    def data(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        if self.inputs == ():
            x = torch.randint(5, (count, 4), generator=generator)
        else:
            x = torch.randn(count, *self.inputs, generator=generator, dtype=torch.float64)
            if len(self.inputs) == 2:
                x[:3, 1:] = 0  # padding
        y = torch.randint(3, (count,), generator=generator)
        if self.task == BILINEAR:
            return TensorDataset(x, torch.randn(count, 3, generator=generator, dtype=torch.float64))
        if self.task == "multilabel_classification":
            return TensorDataset(x, torch.randint(2, (count, 3), generator=generator))
        if self.task != LABELS:
            return TensorDataset(x, (y[:, None] % 2).double())
        return TensorDataset(x, y)

    def blocks(self, model, plain, bases, values, method):
        """Columns and matrix of every unit; of several draws of labels, the mean."""
        first, second = (self.gradients(model, batches) for batches in (bases, values))
        found, alone = [], set(first)
        for layer, joint in self.units.items():
            weight, bias = f"{layer}.weight", f"{layer}.bias"
            parts = [factors(model, layer, lambda batch=batch: self.losses(model, batch)) for batch in bases]
            inputs, outputs = (np.concatenate(side) for side in zip(*parts, strict=True))
            width = outputs.shape[1]
            places = plain.places[weight].reshape(width, -1)
            grads = second[weight].reshape(-1, *places.shape)
            alone.remove(weight)
            if joint:
                alone.remove(bias)
                inputs = np.hstack([inputs, np.ones((len(inputs), 1))])
                grads = np.concatenate([grads, second[bias][:, :, None]], 2)
                places = np.hstack([places, plain.places[bias][:, None]])
            found.append((places.reshape(-1), layer_matrix(grads, (inputs, outputs), method)))
        squares = {name: (first[name] ** 2).sum(0).reshape(-1) for name in alone}
        found += [(plain.places[name].reshape(-1), np.diag(squares[name])) for name in alone]
        return [(places, matrix / len(bases)) for places, matrix in found]

    def gradients(self, model, batches):
        parts = [gradients(model, self.losses(model, batch)) for batch in batches]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Mixed(nn.Module):
    """Every kind of parameter: covered, in part, and not at all."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.conv = nn.Conv1d(2, 4, 2)
        self.grouped = nn.Conv1d(4, 4, 1, groups=2)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 3)
        self.idle = nn.Linear(6, 3)

    def forward(self, ids):
        x = self.table(ids).mean(1).reshape(-1, 2, 3)
        return self.head(self.norm(self.grouped(torch.tanh(self.conv(x))).flatten(1)) * self.scale)


class Tied(nn.Module):
    """One matrix that is table and head, and a layer whose bias does more than its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.layer(self.table(ids).mean(1)) * (1 + self.layer.bias))


class Padded(nn.Module):
    """A layer at several positions, of which those with zeros are left out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head((torch.tanh(self.layer(x)) * x.any(-1, keepdim=True)).sum(1))


class Bilinear(nn.Module):
    """``g^T W a``: the gradient of W is the outer product of two parts of the sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3, bias=False)

    def forward(self, a, g):
        return (self.layer(a) * g).sum(1)


def forward(call, batch):
    return call(*batch)


BILINEAR = CallableModelOutput(forward)
KFAC = {"fisher": "empirical", "correct_eigenvalues": False}


def mlp():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def one_output(width=1):
    return nn.Sequential(nn.Linear(5, width))


def many_outputs():
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 8))


def cnn():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))


def cross_entropies(logits, labels):
    return functional.softplus(torch.where(labels > 0, -logits, logits)).sum(1)


def root_of_curvature(logits, _):
    return (logits * (logits.sigmoid() * (-logits).sigmoid()).sqrt().detach()).sum(1)


BOTH = {"ekfac": {"fisher": "empirical"}, "kfac": KFAC}
CASES = {
    f"{name}-{kind}": Case(**{**given, "settings": {**settings, **given.get("settings", {})}})
    for kind, settings in BOTH.items()
    for name, given in {
        "mlp": {"build": mlp, "units": {"0": True, "2": True}},
        "one long side": {"build": mlp, "units": {"0": True, "2": True}, "settings": {"max_side": 4}},
        "two long sides": {"build": mlp, "units": {"2": True}, "settings": {"max_side": 3}},
        "long outputs": {"build": many_outputs, "units": {"0": True, "2": True}, "settings": {"max_side": 6}},
        "convolution": {"build": cnn, "inputs": (2, 5, 5), "units": {"0": True, "3": True}},
        "mixed": {"build": Mixed, "inputs": (), "units": {"conv": True, "head": True}},
        "tied": {"build": Tied, "inputs": (), "units": {"layer": False}},
        "padded": {"build": Padded, "inputs": (3, 5), "units": {"layer": True, "head": True}},
        "one output": {
            "build": one_output,
            "task": "regression",
            "units": {"0": True},
            "settings": {"fisher": "curvature"},
            "losses": lambda model, batch: model(batch[0])[:, 0],
        },
        "callable": {
            "build": Bilinear,
            "task": BILINEAR,
            "units": {"layer": False},
            "settings": {"fisher": "auto"},
            "losses": lambda model, batch: model(*batch),
        },
    }.items()
}
LOSSES = {  # of other tasks, and the square root of the curvature of one
    ("regression", "empirical"): lambda z, y: (z - y).square().sum(1) / 2,
    ("binary_classification", "empirical"): cross_entropies,
    ("binary_classification", "curvature"): root_of_curvature,
    ("multilabel_classification", "empirical"): cross_entropies,
}
for (task, kind), loss in LOSSES.items():
    CASES[f"{task}-{kind}"] = Case(
        functools.partial(one_output, 3 if task.startswith("multi") else 1),
        units={"0": True},
        settings={"fisher": kind},
        task=task,
        losses=lambda model, batch, loss=loss: loss(model(batch[0]), batch[1]),
    )


MARKS = {name: pytest.mark.quick for name in ("mlp-ekfac", "mlp-kfac")}
MARKS |= {f"{name}-kfac": pytest.mark.campaign for name in ("mixed", "tied", "callable", "two long sides")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_scores_are_those_of_dense_matrices(name, tmp_path):
    case = CASES[name]
    model, train, targets = case.model(), case.data(N, 1), case.data(M, 2)
    plain = plain_rows(model, case.task, train, targets, tmp_path)
    method = EKFAC(damping=0.3, **case.settings)
    blocks = case.blocks(model, plain, [train.tensors], [train.tensors], method)
    found = streamed(model, case.task, in_batches(train, 4), targets, method)
    close(found.numpy(), plain.scores(blocks, 0.3))
    if name == "one output-ekfac":  # the structure is exact: this is the whole Gauss-Newton matrix
        rows = [grad.reshape(N, -1) for grad in case.gradients(model, [train.tensors]).values()]
        whole = np.concatenate(rows, 1)
        close(found.numpy(), plain.scores([(np.arange(6), whole.T @ whole)], 0.3))


class Texts(nn.Module):
    """Scores of the next token by a token alone."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 9)

    def forward(self, ids):
        return self.head(torch.tanh(self.layer(self.table(ids))))


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("sides", [("",), ("chosen_", "rejected_")], ids=len)
def test_padding_has_no_part_in_the_factors(sides, corrected):
    """A batch of one has none. The layers give outputs for it, which have no gradients."""

    def collated(samples):
        named = {f"{side}input_ids": [sample[i] for sample in samples] for i, side in enumerate(sides)}
        named |= {
            n.replace("input_ids", "attention_mask"): list(map(torch.ones_like, named[n])) for n in [*named]
        }
        return {name: nn.utils.rnn.pad_sequence(part, batch_first=True) for name, part in named.items()}

    def output(call, batch):
        found = []
        for side in sides:
            ids, mask = batch[f"{side}input_ids"], batch[f"{side}attention_mask"]
            every = call(ids).log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
            found.append((every * mask[:, 1:]).sum(1))
        return found[0] - sum(found[1:])

    torch.manual_seed(0)
    model, method = Texts(), EKFAC(damping=0.3, fisher="empirical", correct_eigenvalues=corrected)
    texts = [[torch.randint(9, (2 + (3 * i + j) % 5,), device="cpu") for j in range(2)] for i in range(10)]
    alone, together = (
        streamed(model, output, in_batches(texts, size), in_batches(texts[:3], 1), method, collate=collated)
        for size in (1, 5)
    )
    close(together.numpy(), alone.numpy())


class Translator(Texts):
    """Scores of the labels of a decoder, which has other lengths than the encoder, by the mean of the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 5)

    def forward(self, ids, mask, labels):
        text = (torch.tanh(self.encoder(self.table(ids))) * mask[..., None]).sum(1, keepdim=True)
        return self.head(torch.tanh(self.layer(self.table(labels.clamp(min=0)))) + text)


@pytest.mark.parametrize("corrected", [True, False])
def test_labels_tell_the_padding_of_a_decoder(corrected):
    def collated(samples):
        ids, labels = zip(*samples, strict=True)
        pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
        mask = pad(list(map(torch.ones_like, ids)))
        return {"input_ids": pad(ids), "attention_mask": mask, "labels": pad(labels, padding_value=-100)}

    def output(call, batch):
        labels = batch["labels"]
        every = call(batch["input_ids"], batch["attention_mask"], labels).log_softmax(-1)
        found = every.gather(2, (labels.clamp(min=0)[..., None] + 1) % 9)[..., 0]
        return (found * (labels >= 0)).sum(1)

    torch.manual_seed(0)
    model, method = Translator(), EKFAC(damping=0.3, fisher="empirical", correct_eigenvalues=corrected)
    texts = [[torch.randint(9, (n,), device="cpu") for n in (6 + i % 3, 2 + i % 4)] for i in range(10)]
    alone, together = (
        streamed(model, output, in_batches(texts, size), in_batches(texts[:3], 1), method, collate=collated)
        for size in (1, 5)
    )
    close(together.numpy(), alone.numpy())


@pytest.mark.parametrize("corrected", [True, False])
def test_drawn_labels_fit_the_basis_and_new_ones_the_eigenvalues(corrected, tmp_path, monkeypatch):
    """Each of two draws counts a half; the labels of a row do not depend on the batches."""
    case = CASES["mlp-ekfac"]
    model, train, targets = case.model(), case.data(N, 1), case.data(M, 2)
    plain = plain_rows(model, case.task, train, targets, tmp_path)
    method = EKFAC(damping=0.3, draws=2, correct_eigenvalues=corrected)
    found = []
    for size in (N, 4, 1):
        task, drawn = recording(LABELS, monkeypatch)
        found.append(streamed(model, task, in_batches(train, size), targets, method).numpy())
        del drawn[: len(range(0, NOTED, size))]
        batches = len(range(0, N, size))
        assert len(drawn) == 2 * batches * (1 + corrected)
        labels = [torch.cat([one[1] for one in drawn[k::2]]) for k in (0, 1)]
        parts = [(train.tensors[0], part) for label in labels for part in label.split(N)]
        bases, values = parts[:: 1 + corrected], parts[1::2] if corrected else parts
        seen = [part[1].tolist() for part in parts]
        assert len({tuple(one) for one in seen}) == len(seen), "labels were drawn twice"
        close(found[-1], plain.scores(case.blocks(model, plain, bases, values, method), 0.3))
    close(found[1], found[0], rtol=1e-6)
    close(found[2], found[0], rtol=1e-6)
    again = EKFAC(damping=0.3, draws=2, seed=1)
    other = streamed(model, LABELS, in_batches(train, N), targets, again).numpy()
    assert not np.allclose(other, found[0], rtol=1e-2)


@pytest.mark.parametrize("samples", [pytest.param(5, marks=pytest.mark.quick), 2 * N - 3, 2 * N])
def test_samples_enter_the_curvature_as_they_are(samples, tmp_path, monkeypatch):
    """Three tenths of the curvature are sampled gradients of all layers together, which no block can express."""
    case = CASES["mlp-ekfac"]
    model, train, targets = case.model(), case.data(N, 1), case.data(M, 2)
    plain = plain_rows(model, case.task, train, targets, tmp_path)
    task, drawn = recording(LABELS, monkeypatch)
    method = EKFAC(damping=0.3, samples=samples)
    found = streamed(model, task, in_batches(train, N), targets, method)
    del drawn[0]  # of the noted rows
    bases, values, *sampled = [(part[0], part[1]) for part in drawn]
    assert len(sampled) == max(samples // N, 1)
    assert [len(inputs) for inputs, _ in sampled] == [min(samples, N)] * len(sampled)
    labels = [tuple(part[1].tolist()) for part in drawn]
    assert len(set(labels)) == len(labels), "labels were drawn twice"
    matrix, damping = np.zeros((2, plain.train.shape[1], plain.train.shape[1]))
    for places, block in case.blocks(model, plain, [bases], [values], EKFAC(damping=0.3)):
        matrix[np.ix_(places, places)] += 0.7 * block
        damping[places, places] = 0.3 * np.trace(block) / len(block)
    rows = np.concatenate([row.reshape(len(row), -1) for row in case.gradients(model, sampled).values()], 1)
    solved = np.linalg.solve(matrix + damping + 0.3 * N / len(rows) * rows.T @ rows, plain.targets.T)
    close(found.numpy(), plain.q[:, None] * (plain.train @ solved))
    without = streamed(model, LABELS, in_batches(train, N), targets, EKFAC(damping=0.3)).numpy()
    assert not np.allclose(found.numpy(), without, rtol=0.1)


def test_scores_with_samples_agree_between_stored_rows_parts_of_targets_and_candidates(tmp_path):
    case = CASES["mlp-ekfac"]
    model, train, targets = case.model(), case.data(N, 1), case.data(M, 2)
    method = EKFAC(damping=0.3, samples=N)
    _, made, *_ = scored_in_every_way(model, train, targets, method, tmp_path / "s", max_bytes=4_200)
    said = "999999999999 sampled gradients of EKFAC.*Use fewer samples"
    with pytest.raises(InvalidInputError, match=said):
        made.score(targets, "u", method=EKFAC(samples=10**12))
    with pytest.raises(InvalidInputError, match=r"9 sampled gradients of EKFAC .* fewer samples"):
        streamed(model, LABELS, train, targets, method, max_bytes=1_000)


def test_a_sampled_gradient_that_is_not_finite_is_refused(monkeypatch):
    """The weights, which are finite in the fit, are not when the samples are drawn."""
    case = CASES["mlp-ekfac"]
    model, train, targets = case.model(), case.data(N, 1), case.data(M, 2)
    task, _ = recording(LABELS, monkeypatch, lambda drawn: drawn[2:] or spoil(drawn, model))
    with pytest.raises(NonFiniteError, match="sampled gradients of EKFAC at current are not finite"):
        streamed(model, task, in_batches(train, N), targets, EKFAC(damping=0.3, samples=N))


def spoil(drawn, model):
    if len(drawn) == 2:
        model[2].weight.data[0, 0] = np.inf


@pytest.mark.parametrize("computer", ["hook", "functional"])
def test_features_of_targets_are_projections_of_the_preconditioned_gradients(tmp_path, computer):
    """Blocks of gradients come factored or dense, by layer or in any order."""
    case = CASES["mixed-ekfac"]
    model, train, targets = case.model(), case.data(N, 1), case.data(M, 2)
    plain = plain_rows(model, LABELS, train, targets, tmp_path)
    settings = {"proj_dim": 16, "dtype": "float32", "gradient_computer": computer, "progress": False}
    made = Attributor(model, LABELS, tmp_path / "a.zarr", **settings)
    made.featurize(train)
    method = EKFAC(damping=0.3, fisher="empirical")
    scores = made.score(targets, "t", method=method).numpy()
    matrix = np.concatenate(list(projection(made.projector, made.parameters).values()))
    solved = plain.solved(case.blocks(model, plain, [train.tensors], [train.tensors], method), 0.3)
    close(scores, plain.q[:, None] * (plain.train @ matrix @ (solved @ matrix).T), rtol=1e-3)
    again = Attributor.open(tmp_path / "a.zarr", model, progress=False)
    np.testing.assert_array_equal(again.scores("t", method=method).numpy(), scores)
    np.testing.assert_array_equal(again.score(targets, "u", method=method).numpy(), scores)


@pytest.mark.parametrize("names", ["2.weight", "2.bias", "0.*"])
def test_parameters_that_are_left_out_have_no_part(names, tmp_path):
    """A weight alone has factors without a column of ones, a bias alone a diagonal."""
    case = CASES["mlp-ekfac"]
    model, train, targets = case.model(), case.data(N, 1), case.data(M, 2)
    plain = plain_rows(model, LABELS, train, targets, tmp_path)
    method = EKFAC(damping=0.3, fisher="empirical")
    units = {"2.weight": {"2": False}, "2.bias": {}, "0.*": {"0": True}}[names]
    blocks = Case(mlp, units=units).blocks(model, plain, [train.tensors], [train.tensors], method)
    kept = [name for name in plain.places if name == names or name.startswith(names.rstrip("*"))]
    wanted = set(np.concatenate([plain.places[name].reshape(-1) for name in kept]).tolist())
    blocks = [(places, matrix) for places, matrix in blocks if set(places.tolist()) <= wanted]
    found = streamed(model, LABELS, train, targets, method, grad_wrt=names)
    close(found.numpy(), plain.scores(blocks, 0.3))


def test_a_fit_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    case, calls = CASES["mlp-ekfac"], list[int]()
    train, targets = in_batches(case.data(N, 1), 4), case.data(M, 2)

    def interrupt(drawn):
        calls.append(1)
        if len(calls) == 2 + 4:  # after the noted rows, in the second pass, of three batches each
            raise KeyboardInterrupt

    task, _ = recording(LABELS, monkeypatch, interrupt)
    made = Attributor(case.model(), task, tmp_path / "a.zarr", projector="none", progress=False)
    fresh = Attributor(case.model(), LABELS, None, projector="none", progress=False)
    for one in (made, fresh):
        one.featurize(train)
    with pytest.raises(KeyboardInterrupt):
        made.score(targets, method="EKFAC")
    found = made.score(targets, method="EKFAC").numpy()
    assert len(calls) == 2 + 4 + 2 + 3, "the first pass was taken again"
    np.testing.assert_array_equal(found, fresh.score(targets, method="EKFAC").numpy())


@pytest.mark.parametrize("case", ["mixed-ekfac", "mlp-kfac"])
@pytest.mark.parametrize(("unit", "array"), [*enumerate(["values", "joint", "outputs", "bias", "inputs"])])
def test_a_part_of_a_fit_that_a_repair_sets_aside_is_fitted_again(unit, array, case, tmp_path):
    case, path = CASES[case], tmp_path / "a.zarr"
    train, targets = in_batches(case.data(N, 1), 4), case.data(M, 2)
    method = EKFAC(**case.settings)
    made = Attributor(case.model(), LABELS, path, projector="none", method=method, progress=False)
    made.featurize(train)
    expected = made.score(targets).numpy()
    files = sorted((path / ".entries").glob(f"*unit-*-{array}.*"))
    file = files[unit % len(files)]
    file.write_bytes(file.read_bytes()[:-1])
    check_store(path, repair=True)
    np.testing.assert_array_equal(made.score(targets, "again").numpy(), expected)


class Scaled(nn.Linear):
    """A model with an attribute that is no weight."""

    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


class Gaussian(AbstractModelOutput):
    """A task whose settings leave out what its labels are drawn with; it may break off at a draw."""

    def __init__(self, sigma, fail_at):
        self.sigma, self.left = sigma, fail_at

    def evaluate(self, model_call, batch):
        f = -0.5 * (model_call(batch[0])[:, 0] - batch[1]) ** 2
        return OutputTerms(f, torch.ones_like(f.detach()), torch.zeros_like(f.detach()))

    def sample_labels(self, model_call, batch, noise):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return batch[0], model_call(batch[0])[:, 0] + self.sigma * (noise(()) - 0.5)


EDITS: dict[str, dict[str, Any]] = {
    "model": {"factor": 2.0},
    "drawn labels": {"sigma": 3.0},
    "drawn labels of a fit that broke off": {"sigma": 3.0, "fail_at": 3},
    "drawn labels, stored rows": {"sigma": 3.0, "stored": True},
    "drawn labels of the second checkpoint": {"sigma": 3.0, "stored": True, "fail_at": 4},
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_fit_of_other_code_is_refused_and_another_seed_fits_anew(edit, tmp_path):
    torch.manual_seed(0)
    model, data = Scaled(3, 1), TensorDataset(torch.randn(20, 3), torch.randn(20))
    edited = dict(EDITS[edit])
    fail_at, stored = edited.pop("fail_at", 0), edited.pop("stored", False)

    def scored(path, seed=0, sigma=1.0, factor=1.0, fail_at=0):
        model.factor, method = factor, EKFAC(seed=seed)
        made = Attributor(model, Gaussian(sigma, fail_at), path, projector="none", progress=False)
        if stored:
            made.featurize(
                data, [{name: k * value for name, value in model.state_dict().items()} for k in (1, 2)]
            )
            return made.score(data, f"seed-{seed}", method=method).numpy()
        return made.stream_scores(data, data, method=method).numpy()

    if fail_at:
        with pytest.raises(KeyboardInterrupt):
            scored(tmp_path / "a.zarr", fail_at=fail_at)
    else:
        first = scored(tmp_path / "a.zarr")
        assert np.array_equal(scored(tmp_path / "a.zarr"), first), "nothing was edited"
    with pytest.raises(ManifestMismatchError, match=r"row \d+ of the train data differs from what it was"):
        scored(tmp_path / "a.zarr", **edited)
    fresh = scored(None, seed=1, **edited)
    np.testing.assert_array_equal(scored(tmp_path / "a.zarr", seed=1, **edited), fresh)
    with open_store(tmp_path / "a.zarr", "r+") as store:  # as an earlier version has left it
        notes = [name for name in store.entry_names("ekfac") if name.endswith("/rows")]
        assert len(notes) == 1 + stored
        for name in notes:
            store.drop_entry(name)
    assert np.isfinite(scored(tmp_path / "a.zarr", seed=1)).all()


def test_a_sum_that_overflows_is_refused():
    model, x = nn.Linear(6, 3, bias=False), torch.randn(8, 6)
    x[0, 0] = 1e30
    data = TensorDataset(x, torch.arange(8) % 3)
    with pytest.raises(NonFiniteError, match="inputs of 'weight'"):
        streamed(model, LABELS, data, TensorDataset(x[1:3], torch.arange(2)), EKFAC())


def test_a_fisher_that_the_task_does_not_have_is_refused_and_auto_avoids_it():
    assert EKFAC().fitted_to(resolve_task(LABELS)).fisher == "sampled"
    assert EKFAC(draws=3).fitted_to(BILINEAR).draws == 1
    assert EKFAC().fitted_to(BILINEAR).fisher == "empirical"
    assert EKFAC().fitted_to(CLIPModelOutput()).fisher in ("curvature", "empirical")
    for fisher, said in (("sampled", "draws labels"), ("curvature", "needs a loss that is curved")):
        with pytest.raises(InvalidInputError, match=f"fisher='{fisher}' {said}"):
            EKFAC(fisher=fisher).fitted_to(BILINEAR)
    for task, fisher in ((BILINEAR, "auto"), (resolve_task(LABELS), "empirical")):
        with pytest.raises(InvalidInputError, match=r"samples=7 are gradients for drawn labels.*'empirical'"):
            EKFAC(fisher=fisher, samples=7).fitted_to(task)


def test_a_model_without_gradients_from_hooks_is_told_which_methods_are_left():
    def by_row(call, batch):
        return torch.stack([call(x[None])[0, 0] * (2 if x.sum() > 0 else 1) for x in batch[0]])

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(N, 5))
    made = Attributor(nn.Linear(5, 3), by_row, None, proj_dim=16, progress=False)
    made.featurize(data)
    assert "iterative" in repr(made)
    for method in ("EKFAC", "CG"):
        with pytest.raises(UnsupportedModelError, match=r"EKFAC.*hooks do not cover.*GradDot") as caught:
            made.score(data, method=method)
        assert "gradient_computer='" not in str(caught.value)
    assert made.score(data, method="GradDot").shape == (N, N)
