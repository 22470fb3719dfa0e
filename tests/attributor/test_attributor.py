"""The native facade: resuming, refusing, giving the model back, and what the result can be asked."""

import logging
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import Counting, contents, labelled, perceptron, random_states, rewrite_settings
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from trak_lite import Attributor, Refine, Rows
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
    NonFiniteError,
    ReadOnlyStoreError,
    StateError,
    UnknownNameError,
    UnsupportedModelError,
)
from trak_lite.gradient_computers import FunctionalGradientComputer, IterativeGradientComputer
from trak_lite.methods import GaussNewton, GradDot, TracIn
from trak_lite.modelout_functions import ImageClassificationModelOutput, RegressionModelOutput
from trak_lite.projectors import RademacherProjector
from trak_lite.store import Column, ZarrFeatureStore

N, M, CLASSES = 70, 6, 3
model = perceptron
states = partial(random_states, model)
TRAIN, TARGETS = labelled(N), labelled(M, seed=1)


def attributor(path=None, **changes):
    return Attributor(
        changes.pop("model", None) or model(),
        **{"task": "image_classification", "path": path, "proj_dim": 16, "dtype": "float32", **changes},
    )


def finished(path=None, **changes):
    made = attributor(path, **changes)
    made.featurize(TRAIN, checkpoints=states())
    return made, made.score(TARGETS, name="test")


@pytest.fixture(scope="module")
def in_memory():
    return finished()[1]


@pytest.fixture(scope="module")
def expected(in_memory):
    return in_memory.numpy()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "a.zarr"
    finished(path)
    return path


@pytest.fixture
def stored_here(stored, tmp_path):
    """A copy of it, which a test may change."""
    return shutil.copytree(stored, tmp_path / "a.zarr")


@pytest.mark.quick
@pytest.mark.parametrize("name", [None, "mine"])
def test_a_second_run_finds_every_row_and_loads_a_few_to_compare(tmp_path, caplog, name):
    with caplog.at_level(logging.INFO, logger="trak_lite"):
        attributor(tmp_path / "a.zarr").featurize(Rows(Counting(TRAIN), name=name), checkpoints=states())
    assert "gradient_computer='auto' selects 'hook': every kept parameter is covered" in caplog.text
    assert "'projector': 'countsketch'" in caplog.text
    again = Counting(TRAIN)
    summary = attributor(tmp_path / "a.zarr").featurize(Rows(again, name=name), checkpoints=states())
    assert (summary.rows_written, summary.rows_found) == (0, 2 * N)
    digest = 64 if name is None else 0
    assert len(again.loaded) == digest + 2 * 8  # and to compute again with each checkpoint


@pytest.mark.parametrize("fail_at", [40, 0, 5, 31, 32, 69])
def test_an_interrupted_run_loads_only_pending_rows_and_ends_with_the_same_bits(tmp_path, expected, fail_at):
    """A row that is not finite interrupts as well."""
    x, y = (tensor.clone() for tensor in TRAIN.tensors)
    x[fail_at] = torch.inf
    made, bad = attributor(tmp_path / "a.zarr"), TensorDataset(x, y)
    with pytest.raises(NonFiniteError, match=rf"rows \[{fail_at}\]"):
        made.featurize(Rows(bad, name="d", batch_size=10), checkpoints=states())
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, fail_at=fail_at), name="d", batch_size=10), checkpoints=states())
    rest = Counting(TRAIN)
    summary = made.featurize(Rows(rest, name="d", batch_size=10), checkpoints=states(1))
    assert summary.rows_written + summary.rows_found == N
    compared = 8 * (summary.rows_found > 0)
    assert len(rest.loaded) == summary.rows_written + compared
    assert min(rest.loaded[compared:]) <= fail_at
    found = []
    for one in (attributor(tmp_path / "a.zarr"), attributor()):
        one.featurize(Rows(TRAIN, name="d", batch_size=10), checkpoints=states())
        found.append(one.score(TARGETS, name="test").numpy())
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-5)


class Marked(nn.Module):
    """Runs sample by sample if a row of the batch begins with 9, which only the iterative computer follows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x):
        if x[:, 0].max() == 9:
            return torch.stack([self.linear.weight @ row + self.linear.bias for row in x])
        return self.linear(x)


def marked(*rows):
    x, y = (tensor.clone() for tensor in TRAIN.tensors)
    x[list(rows), 0] = 9
    return TensorDataset(x, y)


def last_choice(caplog):
    """What ``"auto"`` has selected in the last call."""
    lines = [r.getMessage() for r in caplog.records if "'auto' selects" in r.getMessage()]
    caplog.clear()
    return lines[-1].partition("selects ")[2]


def test_auto_takes_the_computer_of_the_store_whatever_the_first_samples_of_a_later_call_are(
    tmp_path, caplog
):
    caplog.set_level(logging.INFO, logger="trak_lite")
    net, data = Marked(), marked(1, 64)
    settings = {"model": net, "path": tmp_path / "a.zarr", "batch_size": 10}
    with pytest.raises(KeyboardInterrupt):
        attributor(**settings).featurize(Rows(Counting(data, fail_at=25), name="d"))
    assert last_choice(caplog).startswith("'iterative': hook: ")
    taken = "taken from the store; hook: "

    plan = attributor(**settings).plan(TRAIN)
    assert plan.settings["gradients"].startswith(f"iterative ({taken}")
    # Row 1 is not among those that are compared first: hooks would be chosen by these, and fail at row 64.
    assert attributor(**settings).featurize(Rows(data, name="d")).rows_written == N - 20
    assert last_choice(caplog).startswith(f"'iterative': {taken}")
    scores = attributor(**settings).score(Rows(data, indices=range(50, N)), method=GradDot(q="off")).numpy()
    assert last_choice(caplog).startswith(f"'iterative': {taken}")

    rows = []
    for x, y in data:  # the 15 parameters are fewer than the features, so that the rows are the gradients
        logits = nn.functional.linear(x.double(), net.linear.weight.double(), net.linear.bias.double())
        margin = logits[y] - logits[torch.arange(CLASSES) != y].logsumexp(0)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(margin, [*net.parameters()])]))
    gradients = torch.stack(rows)
    np.testing.assert_allclose(scores, gradients @ gradients[50:].T, rtol=1e-4, atol=1e-4)

    with attributor(**settings).capture(Rows(data, name="d"), "epoch") as capture:
        capture([tensor[30:40] for tensor in data.tensors], range(30, 40))
        assert last_choice(caplog).startswith(f"'iterative': {taken}")
        nn.init.ones_(net.linear.weight)


@pytest.mark.parametrize(
    ("recorded", "chosen"),
    [
        ("functional", "'iterative': functional: torch"),
        *((r, "'iterative': hook: ") for r in ("auto", None, [])),
    ],
)
def test_other_computers_are_tried_if_that_of_the_store_is_refused_or_unknown(
    tmp_path, caplog, recorded, chosen
):
    settings = {"model": Marked(), "path": tmp_path / "a.zarr"}
    attributor(**settings, gradient_computer="iterative").featurize(TRAIN)
    rewrite_settings(tmp_path / "a.zarr", lambda stored: stored.update(gradient_computer=recorded))
    with caplog.at_level(logging.INFO, logger="trak_lite"):
        attributor(**settings).score(marked(0))
    assert last_choice(caplog).startswith(chosen)


def test_rows_on_another_path_are_named_with_the_computer_that_goes_on_in_the_store(tmp_path):
    settings = {"model": Marked(), "path": tmp_path / "a.zarr", "batch_size": 10}
    said = r"'iterative', which continues the same store\. The batch has rows \[60.*train data"
    with pytest.raises(UnsupportedModelError, match=said):
        attributor(**settings).featurize(marked(64))
    assert attributor(**settings, gradient_computer="iterative").featurize(marked(64)).rows_found == 60


def test_checkpoints_can_be_added_and_are_recognised_by_their_weights():
    made = attributor()
    first, second, third = states(3)
    assert made.featurize(TRAIN, checkpoints=[first, second]).other_checkpoints == 0
    assert made.featurize(TRAIN, checkpoints=[third]).other_checkpoints == 2
    twice = made.featurize(TRAIN, checkpoints=[third, third])
    assert (twice.rows_written, twice.rows_found, twice.other_checkpoints) == (0, 2 * N, 2)
    summary = made.featurize(TRAIN, checkpoints=[third, second, first])
    assert (summary.rows_written, summary.rows_found) == (0, 3 * N)
    assert summary.checkpoints == ("0", "1", "0")  # as drop_checkpoint takes them, not places in this call
    assert made.score(TARGETS, name="three").settings["checkpoints"] == 3
    two = made.score(TARGETS, name="two", checkpoints=iter([first, second]))
    reference = attributor()
    reference.featurize(TRAIN, checkpoints=[first, second])
    np.testing.assert_array_equal(two.numpy(), reference.score(TARGETS).numpy())


def test_scoring_again_returns_the_result_and_other_targets_are_refused(tmp_path, stored_here, expected):
    made = attributor(stored_here)
    made.featurize(TRAIN, checkpoints=states())
    before = contents(tmp_path)
    np.testing.assert_array_equal(made.score(TARGETS, name="test").numpy(), expected)
    with pytest.raises(ManifestMismatchError, match=r"scores/test.*targets\.tensors.*another name"):
        made.score(labelled(M, seed=5), name="test")
    with pytest.raises(ManifestMismatchError, match=r"targets\.num_rows is 6 there, 4 here"):
        made.score(labelled(4, seed=1), name="test")
    for name in ("a/b", "..", "", "a b", 3, None):
        with pytest.raises(InvalidInputError, match="cannot be a target set name"):
            made.score(TARGETS, name=name)
    assert contents(tmp_path) == before
    other = attributor(tmp_path / "a.zarr", method=GaussNewton(damping=10.0))
    with pytest.raises(ManifestMismatchError, match=r"method\.damping is None there, 10\.0 here"):
        other.score(TARGETS, name="test", checkpoints=states())
    assert not np.allclose(other.score(TARGETS, name="more", checkpoints=states()).numpy(), expected)


def test_interrupted_scoring_is_not_read_and_resumes_with_the_same_bits(tmp_path, monkeypatch, expected):
    made, targets = attributor(tmp_path / "a.zarr"), {"name": "t", "batch_size": 2}
    made.featurize(TRAIN, checkpoints=states())
    with pytest.raises(KeyboardInterrupt):
        made.score(Rows(Counting(TARGETS, fail_at=3), **targets), name="test")
    create = ZarrFeatureStore.create_table

    def stop(self, path, spec, *given):
        if path != "scores/test":
            return create(self, path, spec, *given)
        create(self, path, spec, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ZarrFeatureStore, "create_table", stop)
        with pytest.raises(KeyboardInterrupt):
            made.score(Rows(TARGETS, **targets), name="test")
    with pytest.raises(StateError, match="not finished"):
        made.scores("test")
    found = made.score(Rows(TARGETS, **targets), name="test").numpy()
    np.testing.assert_array_equal(found, made.score(Rows(TARGETS, **targets), name="whole").numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_an_attributor_and_its_scores_go_on_from_their_pickles(tmp_path, place):
    made, scores = finished(None if place == "memory" else tmp_path / "run.zarr")
    again, same = pickle.loads(pickle.dumps((made, scores)))
    np.testing.assert_array_equal(same.numpy(), scores.numpy())
    assert again.featurize(TRAIN, checkpoints=states()).rows_written == 0
    np.testing.assert_array_equal(again.score(TARGETS, name="test").numpy(), scores.numpy())


def test_open_takes_every_setting_from_the_manifest(tmp_path):
    folder, method = tmp_path / "weights", GaussNewton(damping=0.5)
    folder.mkdir()
    for number, state in enumerate(states()):
        save_file(state, folder / f"epoch-{number}.safetensors")
    settings = {"grad_wrt": ["2.weight", "0.bias"], "seed": 3, "projector": "gaussian", "layout": "module"}
    made = attributor(tmp_path / "a.zarr", method=method, **settings)
    made.featurize(TRAIN, checkpoints=folder)
    expected = made.score(TARGETS, name="test").numpy()
    opened = Attributor.open(tmp_path / "a.zarr", model())
    assert list(opened.parameters) == ["0.bias", "2.weight"]
    assert opened.method == made.method == method
    assert opened.layout == made.layout
    assert len(opened.layout.segments) > 1
    np.testing.assert_array_equal(opened.scores("test").numpy(), expected)
    for other, said in (
        (nn.Linear(4, 2), r"2 parameters that this Linear lacks, such as '0\.bias'\. Pass"),
        (
            nn.DataParallel(model()),
            r"DataParallel lacks, such as '0\.bias' \(it has 'module\.0\.bias'\)\. Pass",
        ),
    ):
        with pytest.raises(ManifestMismatchError, match=f"of another model: .* {said}"):
            Attributor.open(tmp_path / "a.zarr", other)
    # New targets need the weights: they are found where they were read from.
    np.testing.assert_array_equal(opened.score(TARGETS, name="again").numpy(), expected)


class Named(ImageClassificationModelOutput):
    name = "mine"


def test_open_asks_for_what_a_store_cannot_keep(tmp_path):
    def own_task(call, batch):
        return call(batch[0]).sum(1)

    own = {"gradient_computer": IterativeGradientComputer, "projector": RademacherProjector(16)}
    attributor(tmp_path / "a.zarr", task=own_task, **own).featurize(TRAIN)
    with pytest.raises(InvalidInputError, match=r"gradient_computer.*projector.*task"):
        Attributor.open(tmp_path / "a.zarr", model())
    left_out = dict.fromkeys(("collate", "batch_size", "grad_wrt", "proj_dim", "method"))
    opened = Attributor.open(tmp_path / "a.zarr", model(), own_task, **own, **left_out)
    assert opened.featurize(TRAIN).rows_written == 0
    with pytest.raises(InvalidInputError, match=r"custom objects.*\['projector'\]"):
        Attributor.open(tmp_path / "a.zarr", model(), own_task, **{**own, "projector": None})
    attributor(tmp_path / "b.zarr", task=Named()).featurize(TRAIN)
    with pytest.raises(InvalidInputError, match=r"custom objects.*\['task'\]\. Pass task="):
        Attributor.open(tmp_path / "b.zarr", model())
    assert Attributor.open(tmp_path / "b.zarr", model(), Named()).featurize(TRAIN).rows_written == 0
    with pytest.raises(MissingStoreError, match="nowhere"):
        Attributor.open(tmp_path / "nowhere.zarr", model())


class Noisy(nn.Module):
    """Draws in train mode, counts its calls in a buffer, and makes another one in its first pass."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(4), persistent=False)
        self.calls += 1
        return self.net(x * self.mask)


@contextmanager
def default_dtype(dtype):
    """Model loaders set it, and may leave it set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": partial(torch.device, "meta"),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A run outside all contexts: its attributor, its best scores, those of a fit, and streamed ones."""
    made = attributor(tmp_path_factory.mktemp("outside") / "a.zarr")
    made.featurize(TRAIN, checkpoints=states())
    best, fitted = made.score(TARGETS, dense=False).top(3), made.score(TARGETS, method="EKFAC").numpy()
    return made, best, fitted, made.stream_scores(TRAIN, TARGETS, checkpoints=states()).numpy()


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_contexts_of_the_caller_change_no_number(tmp_path, context, expected, outside):
    """Of rows, fits, scores, and scores that are computed on access; autocast rounds to 8 bits."""
    made, best, fitted, streamed = outside
    again, given = attributor(tmp_path / "b.zarr"), states()
    with context():
        again.featurize(TRAIN, checkpoints=given)
        np.testing.assert_array_equal(again.score(TARGETS).numpy(), expected)
        np.testing.assert_array_equal(again.score(TARGETS, method="EKFAC").numpy(), fitted)
        np.testing.assert_array_equal(made.score(TARGETS, dense=False).top(3).scores, best.scores)
        found = again.stream_scores(TRAIN, TARGETS, checkpoints=given).numpy()
        np.testing.assert_array_equal(found, streamed)
        assert (torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()) == (
            context is CONTEXTS["autocast"],
            context is CONTEXTS["inference_mode"],
        )


@pytest.mark.parametrize("computer", ["hook", "functional", "iterative"])
def test_a_collate_function_may_compute_in_inference_mode(computer, expected):
    """Such as embeddings, which autograd cannot save as they are."""
    collate = torch.inference_mode()(lambda samples: default_collate(samples))
    made = attributor(collate=collate, gradient_computer=computer)
    made.featurize(TRAIN, checkpoints=states())
    np.testing.assert_allclose(made.score(TARGETS).numpy(), expected, rtol=1e-3, atol=1e-5)


def test_threads_take_turns_with_a_model_and_its_store():
    """Two attributors of one model with a checkpoint each; both are asked by two threads, as in a server."""
    shared, rows = model(), Rows(TRAIN, batch_size=5)
    alone = [attributor() for _ in range(2)]
    together = [attributor(model=shared) for _ in range(2)]
    before = {name: value.clone() for name, value in shared.state_dict().items()}

    def run(made, state):
        made.featurize(rows, checkpoints=[state])
        return made.score(TARGETS, name="test").numpy()

    def ask(made):
        return made.score(Subset(TARGETS, range(4)), name="four").numpy()

    with ThreadPoolExecutor(4) as threads:
        expected = list(map(run, alone, states(2)))
        np.testing.assert_array_equal(list(threads.map(run, together, states(2))), expected)
        asked = list(threads.map(ask, 2 * together))
        np.testing.assert_array_equal(asked, list(map(ask, 2 * alone)))
    assert all(torch.equal(value, before[name]) for name, value in shared.state_dict().items())
    assert all(parameter.requires_grad for parameter in shared.parameters())


def test_a_model_that_cannot_be_differentiated_is_refused_at_once(stored):
    with torch.inference_mode():
        inference = model()
    for unfit, reason in ((inference, r"inside torch.inference_mode\(\)"), (None, "expected a trained")):
        with pytest.raises(InvalidInputError, match=reason):
            Attributor.open(stored, unfit)


def test_weights_of_checkpoints_go_by_the_order_of_the_last_featurize_or_are_refused(tmp_path):
    """Checkpoints that came later into the store than those after them are named to be scored."""
    weighted, three = {"method": TracIn(learning_rates=(1.0, 2.0, 3.0))}, states(3)
    whole, parts = attributor(tmp_path / "whole.zarr"), attributor(tmp_path / "parts.zarr")
    whole.featurize(TRAIN, checkpoints=three)
    right = whole.score(TARGETS, **weighted).numpy()
    parts.featurize(TRAIN, checkpoints=three[1:])
    parts.featurize(TRAIN, checkpoints=three)
    with pytest.raises(InvalidInputError, match=r"ckpt-0, ckpt-1, ckpt-2.*checkpoints=\["):
        parts.score(TARGETS, **weighted)
    named = parts.score(TARGETS, checkpoints=three, **weighted).numpy()
    assert named.shape == right.shape
    parts.score(TARGETS, method=GradDot())  # all have one weight
    whole.featurize(TRAIN, checkpoints=three[:1])
    np.testing.assert_array_equal(whole.score(TARGETS, **weighted).numpy(), right)
    with pytest.raises(InvalidInputError, match="another order"):
        parts.scores("targets", dense=False, **weighted)
    whole.featurize(TRAIN, checkpoints=[*three, three[1]])  # such as a copy of the best one
    np.testing.assert_array_equal(whole.score(TARGETS, **weighted).numpy(), right)


def test_weights_of_a_refinement_go_by_the_same_order():
    made, three, rates = attributor(), states(3), (1.0, 2.0, 3.0)
    made.featurize(TRAIN, checkpoints=three[1:])
    made.featurize(TRAIN, checkpoints=three)
    refine = Refine(candidates=N, method=TracIn(learning_rates=rates))
    with pytest.raises(InvalidInputError, match=r"another order.*checkpoints=\["):
        made.score(TARGETS, refine=refine)
    found = made.score(TARGETS, checkpoints=three, refine=refine).numpy()
    alone = [made.stream_scores(TRAIN, TARGETS, method="GradDot", checkpoints=one).numpy() for one in three]
    expected = np.tensordot(rates, alone, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("call", ["featurize", "stream_scores", "interrupted"])
def test_the_model_comes_back_as_it_was_also_after_an_error(call):
    torch.manual_seed(0)
    mine = Noisy().train()
    mine.net[2].eval()
    mine.net[0].bias.requires_grad_(False)
    parameters = list(mine.parameters())
    before = {name: value.clone() for name, value in {**mine.state_dict(), "calls": mine.calls}.items()}
    modes = [module.training for module in mine.modules()]
    made = attributor(model=mine, gradient_computer="iterative")
    others = [{name: value + 1 for name, value in mine.state_dict().items()}]
    random = torch.get_rng_state()
    if call == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            made.featurize(Counting(TRAIN, fail_at=40), checkpoints=others)
    elif call == "featurize":
        made.featurize(TRAIN, checkpoints=others)
        made.score(TARGETS)
    else:
        made.stream_scores(TRAIN, TARGETS, method="EKFAC", checkpoints=others)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(a is b for a, b in zip(mine.parameters(), parameters, strict=True))
    assert [p.requires_grad for p in mine.parameters()] == [True, False, True, True, True, True]
    assert [module.training for module in mine.modules()] == modes
    for name, value in {**mine.state_dict(), "calls": mine.calls}.items():
        assert torch.equal(value, before[name]), name


def test_positive_scores_mean_that_the_row_raises_the_output():
    """Refitting a ridge regression with a row counted a little more moves f(target) as the scores say."""
    x, targets = (data.tensors[0].double() for data in (labelled(20), labelled(5, seed=3)))
    y = x.sum(1) + x[:, 0].sin()

    def fit(weights):
        return torch.linalg.solve(x.T @ (weights[:, None] * x) + torch.eye(4), x.T @ (weights * y))

    net = nn.Linear(4, 1, bias=False).double()
    net.weight.data = fit(torch.ones(20, dtype=torch.float64))[None]
    method = GaussNewton(damping=4 / float(x.square().sum()))  # lambda = 1
    made = attributor(model=net, task="regression", projector="none", method=method)
    made.featurize(TensorDataset(x, y[:, None]))
    scores = made.score(TensorDataset(targets, torch.zeros(5, 1))).numpy()
    moves = [(fit(1 + 1e-6 * one) - net.weight[0].detach()) / 1e-6 for one in torch.eye(20).double()]
    np.testing.assert_allclose(scores, torch.stack(moves) @ targets.T, rtol=1e-3, atol=1e-5)


def test_scores_become_numpy_pandas_and_xarray_with_rows_and_targets_named(in_memory, expected):
    assert (len(in_memory), in_memory.shape) == (N, (N, M))
    assert np.asarray(in_memory).dtype == np.float32
    for dtype in (np.float32, np.float64):
        assert np.asarray(in_memory, dtype).dtype == dtype
        np.testing.assert_array_equal(np.asarray(in_memory, dtype), expected)
    np.testing.assert_array_equal(in_memory.rows([3, 69, 0]), expected[[3, 69, 0]])
    frame, array = in_memory.to_pandas(), in_memory.to_xarray()
    assert (frame.index.name, frame.columns.name) == array.dims == ("train_row", "target")
    assert array.attrs["damping"] == "None"
    for found in (frame, array):
        np.testing.assert_array_equal(found.to_numpy(), expected)
    for said in ("70 train rows x 6 targets", "checkpoints=2", "method=GaussNewton"):
        assert said in repr(in_memory)


@pytest.mark.parametrize(
    ("own", "loader", "call", "expected"),
    [
        (30, None, None, [30, 30, 10]),
        (30, 40, None, [40, 30]),
        (30, 40, 50, [50, 20]),
        (None, None, None, [32, 32, 6]),
    ],
)
def test_the_batch_size_is_the_calls_or_the_loaders_or_the_attributors(own, loader, call, expected):
    sizes = []

    def collate(samples):
        sizes.extend([len(samples)] * (len(samples) not in (1, 8)))  # these are collated again, to compare
        return torch.utils.data.default_collate(samples)

    made = attributor(collate=collate, batch_size=own)
    data = TRAIN if loader is None else DataLoader(TRAIN, batch_size=loader)
    made.featurize(Rows(data, batch_size=call, name="train"))
    assert sizes == expected
    del sizes[:]
    made.score(Rows(TRAIN, name="targets"), batch_size=20)
    assert sizes == [20, 20, 20, 10]


def own_output(call, batch):
    return call(batch[0])[:, 0]


OTHER = {
    "^The rows were made with proj_dim=16, not 8. .*feature_width is 32 there, 16 here": {"proj_dim": 8},
    r"^The rows were made with seed=0, not 1. .*projector\.seed is 0 there, 1 here": {"seed": 1},
    "dtype is 'float32' there, 'float16' here": {"dtype": "float16"},
    r"projector\.of\.kind": {"projector": "gaussian"},
    "layout": {"layout": "joint"},
    r"gradients\.autocast_dtype is 'absent' there, 'bfloat16' here": {
        "gradient_computer": partial(FunctionalGradientComputer, autocast_dtype=torch.bfloat16)
    },
    r"gradients\.float32_products is 'absent' there, 'tf32' here": {"float32_products": "tf32"},
    r"gradients\.normalization.* is 'absent' there": {"normalize": "unit"},
    r"parameters\.0\.bias is .* there, 'absent' here": {"grad_wrt": ["0.weight"]},
    r"temperature is 1\.0 there, 2\.0 here": {"task": ImageClassificationModelOutput(temperature=2.0)},
    r"^The rows were made with task='image_classification', not the function \w+\.own_output\. ": {
        "task": own_output
    },
    r"^The rows were made with task='image_classification', not a function\. ": {"task": partial(own_output)},
}


def test_a_store_of_other_settings_is_refused_naming_each_difference(stored):
    before = contents(stored)
    for key, changes in OTHER.items():
        other = attributor(stored, **changes)
        for call in (
            lambda: other.featurize(TRAIN, checkpoints=states()),  # noqa: B023
            lambda: other.score(TARGETS, name="new"),  # noqa: B023
            lambda: other.scores("test"),  # noqa: B023
            lambda: other.scores("test", dense=False),  # noqa: B023
            other.label_suspicion,
        ):
            with pytest.raises(ManifestMismatchError, match=key):
                call()
    assert contents(stored) == before


def test_a_store_keeps_how_float32_products_are_computed_which_a_cpu_ignores(tmp_path, in_memory, expected):
    _, scores = finished(tmp_path / "b.zarr", float32_products="tf32")
    opened = Attributor.open(tmp_path / "b.zarr", model())
    assert opened.featurize(TRAIN, checkpoints=states()).rows_written == 0
    np.testing.assert_array_equal(scores.numpy(), expected)
    computer = partial(FunctionalGradientComputer, float32_products="tf32")
    found = [scores, in_memory, finished(gradient_computer=computer)[1]]
    assert [one.manifest.made_with["float32_products"] for one in found] == ["tf32", "ieee", "tf32"]
    with pytest.raises(InvalidInputError, match=r"partial\(HookGradientComputer, float32_products='tf32'"):
        attributor(gradient_computer=computer, float32_products="tf32")
    with pytest.raises(UnknownNameError, match="float32_products must be one of"):
        attributor(float32_products="tf23")


def test_targets_that_an_earlier_version_stored_with_q_and_w_are_continued(stored_here, expected, tmp_path):
    path = "targets/test/ckpt-1"
    own = attributor(tmp_path / "targets.zarr")
    own.featurize(TARGETS, checkpoints=states()[1:])
    with ZarrFeatureStore.open(own.path) as store:
        targets = store.open_table("ckpt-0")
        beside = {name: targets.read(name)[:2] for name in ("out_to_loss", "loss_curvature")}
    with ZarrFeatureStore.open(stored_here, "r+") as store:
        table = store.open_table(path)
        assert [column.name for column in table.spec.columns] == ["features"]
        rows, spec = table.read("features"), table.spec
        store.drop_table("scores/test")
        store.drop_table(path)
        columns = (*spec.columns, *(Column(name, None, "float32") for name in beside))
        wide = store.create_table(path, replace(spec, columns=columns))
        wide.put(0, {"features": rows[:2], **beside})
    made = attributor(stored_here)
    made.featurize(TRAIN, checkpoints=states())
    np.testing.assert_array_equal(made.score(TARGETS, name="test").numpy(), expected)


def test_steps_out_of_order_are_refused(tmp_path):
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN)
    for said, call in (
        (r"no store at.*featurize", lambda: attributor(tmp_path / "c.zarr").score(TARGETS)),
        ("featurize", lambda: attributor().score(TARGETS)),
        ("featurize", lambda: attributor().scores()),
        (r"no scores 'test'; there are none\. Call", lambda: made.scores("test")),
        ("no features for 1 of the 1 checkpoints", lambda: made.score(TARGETS, checkpoints=states(1))),
    ):
        with pytest.raises(StateError, match=said):
            call()


def test_rows_that_were_begun_with_other_weights_are_said_to_be_of_another_checkpoint(tmp_path):
    """Only where there is another checkpoint. Both ways out, its name and dropping what was begun, have its scores."""
    made = attributor(tmp_path / "a.zarr")
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, fail_at=40), name="d"), states()[:1])
    with pytest.raises(StateError, match=r"ckpt-0 has 32 of 70 train rows\. Call featurize"):
        made.score(TARGETS)
    made.featurize(Rows(TRAIN, name="d"), states()[1:])
    with pytest.raises(
        StateError, match=r"has 2 checkpoints: other weights are another one.* \(drop_checkpoint\)"
    ):
        attributor(tmp_path / "a.zarr").score(TARGETS)
    named = made.score(TARGETS, "named", checkpoints=states()[1:]).numpy()
    made.drop_checkpoint("ckpt-0")
    np.testing.assert_array_equal(made.score(TARGETS, "all").numpy(), named)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_model_that_was_trained_further_is_pointed_out(tmp_path, in_memory):
    net = model()
    made = attributor(None if in_memory else tmp_path / "a.zarr", model=net)
    made.featurize(TRAIN)
    made.featurize(TRAIN)  # the same weights
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    with pytest.raises(StateError, match=r"those of 'current' when it was featurized, and has others now\."):
        made.score(TARGETS)
    with pytest.warns(UserWarning, match=r"other weights of the model itself already \(ckpt-0,"):
        made.featurize(TRAIN)


def test_weights_are_found_again_where_they_can_be_and_asked_for_otherwise(tmp_path):
    made, alone = (attributor(path, projector="none") for path in (tmp_path / "a.zarr", None))
    first, second = states()
    save_file(first, tmp_path / "first.safetensors")
    made.featurize(TRAIN, checkpoints=tmp_path / "first.safetensors")
    made.featurize(TRAIN, checkpoints=second)
    assert made.featurize(TRAIN, checkpoints=[second, None]).rows_written == N
    assert made.score(TARGETS).settings["checkpoints"] == 3
    alone.featurize(TRAIN)
    current = made.score(TARGETS, name="current", checkpoints=[None])  # as it came, after other checkpoints
    np.testing.assert_array_equal(current.numpy(), alone.score(TARGETS).numpy())
    made = attributor(tmp_path / "b.zarr")
    made.featurize(TRAIN, checkpoints=iter([first, second]))
    stated = r"ckpt-0 \(featurized as '0'\), ckpt-1 .*checkpoints=.*drop_checkpoint"
    with pytest.raises(StateError, match=stated) as refused:
        made.score(TARGETS)
    assert "'current'" not in str(refused.value)
    assert made.score(TARGETS, checkpoints=[first, second]).shape == (N, M)


@pytest.mark.parametrize("given", ["list", "paths", "loader"])
def test_a_checkpoint_file_that_is_gone_is_missed_only_where_its_weights_are_needed(tmp_path, given):
    gone, _ = files = [tmp_path / f"{number}.pt" for number in range(2)]
    for file, state in zip(files, states(), strict=True):
        torch.save(state, file)
    made = attributor(tmp_path / "a.zarr")
    options = {"checkpoint_loader": torch.load} if given == "loader" else {}
    for checkpoints in files if given == "paths" else [files]:
        made.featurize(TRAIN, checkpoints, **options)
    expected = made.score(TARGETS, "test").numpy()
    gone.unlink()
    np.testing.assert_array_equal(made.score(TARGETS, "test").numpy(), expected)
    named = made.score(TARGETS, "named", checkpoints=states()).numpy()
    np.testing.assert_allclose(named, expected, rtol=1e-5, atol=1e-6)
    made.score(TARGETS, "one", checkpoints=states()[:1])
    assert made.score(TARGETS, "one", method="GradDot").settings["checkpoints"] == 2  # finds the other file
    with pytest.raises(StateError, match=rf"weights of ckpt-0 .*needed to score.*cannot be read: .*{gone}"):
        made.score(TARGETS, "two")


def test_a_read_only_folder_gives_what_is_there_and_refuses_the_rest_by_name(stored, expected, monkeypatch):
    before = contents(stored)
    monkeypatch.setattr(
        os, "access", lambda path, mode, **kwargs: not mode & os.W_OK
    )  # also when run as root
    again = attributor(stored)
    assert again.featurize(TRAIN, checkpoints=states()).rows_written == 0
    np.testing.assert_array_equal(again.score(TARGETS, name="test").numpy(), expected)
    with pytest.raises(
        ReadOnlyStoreError,
        match=r"a\.zarr.*cannot be written.*Make the folder writable, or use another path\.",
    ):
        again.score(TARGETS, name="new")
    with pytest.raises(ReadOnlyStoreError, match=r"a\.zarr"):
        again.featurize(TRAIN, checkpoints=states(3))
    assert contents(stored) == before


@pytest.mark.parametrize("fitted", [slice(None), slice(3, 4)], ids=["all", "one"])
def test_gradients_that_really_are_zero_are_stored(fitted):
    """A row that the model fits exactly has no gradient of its squared error, also in float16 beside others."""
    linear = nn.Linear(4, 1)
    nn.init.zeros_(linear.weight)  # products of float32 depend on the batch
    x = TRAIN.tensors[0]
    y = linear(x).detach() + 1.0
    y[fitted] = linear(x[fitted]).detach() + (1e-7 if fitted.stop else 0)
    task = RegressionModelOutput(output="neg_squared_error")
    made = attributor(model=linear, task=task, dtype="float16" if fitted.stop else "float32")
    with nullcontext() if fitted.stop else pytest.warns(UserWarning, match=f"all {N} computed rows"):
        found = made.featurize(Rows(TensorDataset(x, y), batch_size=None if fitted.stop else 1))
    assert found.rows_written == N


class Unused(nn.Module):
    """Keeps the gradients of a module that the output does not depend on, but for one row if asked."""

    def __init__(self, used=False):
        super().__init__()
        self.first = nn.Linear(4, 3, dtype=torch.float32, device="cpu").requires_grad_(False)
        self.second = nn.Linear(4, 3, dtype=torch.float32, device="cpu")
        self.used = used

    def forward(self, x):
        last = (x == TRAIN.tensors[0][-1]).all(1, keepdim=True)
        return self.first(x) + (last * self.second(x) if self.used else 0.0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_rows_that_are_all_zero_are_told_once_per_call(dtype, recwarn):
    """With two checkpoints; a single row that is not zero, in the last batch, is enough to say nothing."""
    for used, count in ((True, 0), (False, 1)):
        torch.manual_seed(0)
        made = attributor(model=Unused(used), dtype=dtype, method="GradDot")
        made.featurize(Rows(TRAIN, batch_size=4), [Unused().state_dict() for _ in range(2)])
        assert len(recwarn) == count
    made.score(TARGETS, "asked")
    first, second = (str(warning.message) for warning in recwarn)
    assert f"all {N} computed rows of the train data are zero" in first
    assert "rows of the targets are zero" in second
    assert "another model than its model_call, at adapters that are merged or disabled" in second


def against_the_batch(call, batch):
    return call(batch[0])[:, 0].log_softmax(0)  # of a sample alone 0, whatever the weights


@pytest.mark.filterwarnings("ignore:.*depends on the other samples of its batch")
def test_rows_that_are_zero_because_f_compares_samples_say_so_and_do_not_blame_parameters():
    made = attributor(task=against_the_batch, method="GradDot")
    with pytest.warns(UserWarning, match="zero. f of a sample alone .* Put the other samples into the row"):
        made.featurize(TRAIN)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_in_bfloat16_are_rows_without_a_projection(dtype):
    """NumPy has no bfloat16, in which these features are computed."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 2).bfloat16(), torch.randn(6, 4).bfloat16(), torch.arange(6) % 2
    made = attributor(model=net, dtype=dtype, projector="none", store_norms=True)
    made.featurize(Rows(TensorDataset(x, y), batch_size=4))
    scores = made.score(TensorDataset(x, y), method=GradDot(q="off")).numpy()
    logits = net(x).float()
    margins = logits[range(6), y] - logits[range(6), 1 - y]
    rows = [torch.autograd.grad(f, list(net.parameters()), retain_graph=True) for f in margins]
    expected = torch.stack([torch.cat([grad.reshape(-1) for grad in row]).double() for row in rows])
    products = (expected @ expected.T).numpy()
    np.testing.assert_allclose(made.gradient_norms()[0], expected.norm(dim=1), rtol=2e-2)
    np.testing.assert_allclose(scores, products, atol=2e-2 * np.abs(products).max())


FEW = labelled(20)


@pytest.mark.parametrize("path", [None, "run.zarr"])
def test_label_suspicion_is_the_mean_error_over_checkpoints(tmp_path, path):
    net = model()
    made = attributor(path and tmp_path / path, model=net)
    with pytest.raises(StateError if path is None else MissingStoreError):
        made.label_suspicion()
    made.featurize(FEW, checkpoints=states())
    errors = []
    for state in states():
        net.load_state_dict(state)
        errors.append(1 - net(FEW.tensors[0]).softmax(1)[range(20), FEW.tensors[1]].detach().double())
    suspicion = made.label_suspicion()
    assert (suspicion.shape, suspicion.dtype) == ((20,), np.float32)
    np.testing.assert_allclose(suspicion, torch.stack(errors).mean(0), atol=1e-6)


def test_a_task_whose_output_is_its_loss_says_nothing_of_labels():
    def loss(call, batch):
        return nn.functional.mse_loss(call(batch[0]), batch[1], reduction="none").sum(1)

    made = attributor(model=nn.Linear(3, 1), task=loss)
    made.featurize(TensorDataset(torch.randn(10, 3), torch.randn(10, 1)))
    with pytest.raises(StateError, match=r"the same q, because .*is its loss.*self_influence"):
        made.label_suspicion()
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    made = attributor(model=model)
    made.featurize(TensorDataset(torch.randn(10, 3), torch.arange(10) % 2))
    with pytest.raises(StateError, match="the same q, because the model gives all rows the same error"):
        made.label_suspicion()
