"""The native facade: resuming, refusing, giving the model back, and what the result can be asked."""

from __future__ import annotations

import json
import logging
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import Counting, contents, labelled, perceptron, random_states
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
    NonFiniteError,
    ReadOnlyStoreError,
    StateError,
    UnknownNameError,
)
from trak_lite.gradient_computers import FunctionalGradientComputer, IterativeGradientComputer
from trak_lite.methods import GaussNewton
from trak_lite.modelout_functions import ImageClassificationModelOutput, RegressionModelOutput
from trak_lite.projectors import RademacherProjector
from trak_lite.store import ZarrFeatureStore

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
    """The scores of two checkpoints, in memory."""
    return in_memory.numpy()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A store of the same rows and scores."""
    path = tmp_path_factory.mktemp("stored") / "a.zarr"
    finished(path)
    return path


@pytest.fixture
def stored_here(stored, tmp_path):
    """A copy of it, which a test may change."""
    return shutil.copytree(stored, tmp_path / "a.zarr")


@pytest.mark.quick
def test_a_second_run_finds_every_row_and_loads_a_few_to_compare(tmp_path):
    attributor(tmp_path / "a.zarr").featurize(Counting(TRAIN), checkpoints=states())
    again = Counting(TRAIN)

    summary = attributor(tmp_path / "a.zarr").featurize(again, checkpoints=states())

    assert (summary.rows_written, summary.rows_found) == (0, 2 * N)
    assert len(again.loaded) == 64 + 2 * 8  # for the digest, and to compute again with each checkpoint
    named = Counting(TRAIN)
    attributor(tmp_path / "b.zarr").featurize(Rows(TRAIN, name="mine"), checkpoints=states())
    attributor(tmp_path / "b.zarr").featurize(Rows(named, name="mine"), checkpoints=states())
    assert len(named.loaded) == 2 * 8


@pytest.mark.parametrize("fail_at", [40, 0, 5, 31, 32, 69])
def test_an_interrupted_run_loads_only_pending_rows_and_ends_with_the_same_bits(tmp_path, expected, fail_at):
    made = attributor(tmp_path / "a.zarr")
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, fail_at=fail_at), name="d", batch_size=10), checkpoints=states())
    rest = Counting(TRAIN)

    summary = attributor(tmp_path / "a.zarr").featurize(
        Rows(rest, name="d", batch_size=10), checkpoints=states(1)
    )

    assert summary.rows_written + summary.rows_found == N
    compared = 8 * (summary.rows_found > 0)
    assert len(rest.loaded) == summary.rows_written + compared
    assert min(rest.loaded[compared:]) <= fail_at
    made, whole = attributor(tmp_path / "a.zarr"), attributor()
    found = []
    for one in (made, whole):
        one.featurize(Rows(TRAIN, name="d", batch_size=10), checkpoints=states())
        found.append(one.score(TARGETS, name="test").numpy())
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-5)


def test_memory_and_disk_give_the_same_bits_and_other_batches_the_same_scores(stored_here, expected):
    def collate(samples):
        return {"input": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

    made = attributor(stored_here)
    np.testing.assert_array_equal(made.scores("test").numpy(), expected)
    again = made.score(TARGETS, name="again", checkpoints=(state for state in states()))  # a generator
    np.testing.assert_array_equal(again.numpy(), expected)
    made = attributor(gradient_computer=partial(FunctionalGradientComputer, chunk_size=3))
    made.featurize(DataLoader(TRAIN, batch_size=7, collate_fn=collate), checkpoints=states())

    scores = made.score(DataLoader(TARGETS, batch_size=1, collate_fn=collate))

    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-3, atol=1e-6)


def test_checkpoints_can_be_added_and_are_recognised_by_their_weights():
    made = attributor()
    first, second, third = states(3)
    assert made.featurize(TRAIN, checkpoints=[first, second]).other_checkpoints == 0
    assert made.featurize(TRAIN, checkpoints=[third]).other_checkpoints == 2

    summary = made.featurize(TRAIN, checkpoints=[third, second, first])

    assert (summary.rows_written, summary.rows_found) == (0, 3 * N)
    assert made.score(TARGETS, name="three").settings["checkpoints"] == 3
    two = made.score(TARGETS, name="two", checkpoints=[first, second])
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
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN, checkpoints=states())
    with pytest.raises(KeyboardInterrupt):
        made.score(Rows(Counting(TARGETS, fail_at=3), name="t", batch_size=2), name="test")
    create = ZarrFeatureStore.create_table

    def stop(self, path, *given):
        table = create(self, path, *given)
        if path == "scores/test":
            raise KeyboardInterrupt
        return table

    targets = Rows(TARGETS, name="t", batch_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(ZarrFeatureStore, "create_table", stop)
        with pytest.raises(KeyboardInterrupt):
            made.score(targets, name="test")

    with pytest.raises(StateError, match="not finished"):
        made.scores("test")
    np.testing.assert_allclose(made.score(targets, name="test").numpy(), expected, rtol=1e-4, atol=1e-6)


def test_open_takes_every_setting_from_the_manifest(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    for number, state in enumerate(states()):
        save_file(state, folder / f"epoch-{number}.safetensors")
    made = attributor(
        tmp_path / "a.zarr",
        grad_wrt=["2.weight", "0.bias"],
        seed=3,
        projector="gaussian",
        method=GaussNewton(damping=0.5),
        layout="module",
    )
    made.featurize(TRAIN, checkpoints=folder)
    expected = made.score(TARGETS, name="test").numpy()

    opened = Attributor.open(tmp_path / "a.zarr", model())

    assert list(opened.parameters) == ["0.bias", "2.weight"]
    assert opened.method == made.method == GaussNewton(damping=0.5)
    assert opened.layout == made.layout
    assert len(opened.layout.segments) > 1
    np.testing.assert_array_equal(opened.scores("test").numpy(), expected)
    # New targets need the weights: they are found where they were read from.
    np.testing.assert_array_equal(opened.score(TARGETS, name="again").numpy(), expected)


def test_open_asks_for_what_a_store_cannot_keep(tmp_path):
    def own_task(call, batch):
        return call(batch[0]).sum(1)

    made = attributor(
        tmp_path / "a.zarr",
        task=own_task,
        gradient_computer=IterativeGradientComputer,
        projector=RademacherProjector(16),
    )
    made.featurize(TRAIN)

    with pytest.raises(InvalidInputError, match=r"gradient_computer.*projector.*task"):
        Attributor.open(tmp_path / "a.zarr", model())
    opened = Attributor.open(
        tmp_path / "a.zarr",
        model(),
        own_task,
        gradient_computer=IterativeGradientComputer,
        projector=RademacherProjector(16),
    )
    assert opened.featurize(TRAIN).rows_written == 0
    with pytest.raises(MissingStoreError, match="nowhere"):
        Attributor.open(tmp_path / "nowhere.zarr", model())


class Noisy(nn.Module):
    """Draws from batch statistics and dropout in train mode, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.net(x)


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_comes_back_as_it_was_also_after_an_error(fail):
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

    if fail:
        with pytest.raises(KeyboardInterrupt):
            made.featurize(Counting(TRAIN, fail_at=40), checkpoints=others)
    else:
        made.featurize(TRAIN, checkpoints=others)
        made.score(TARGETS)

    assert torch.equal(torch.get_rng_state(), random)
    assert all(a is b for a, b in zip(mine.parameters(), parameters, strict=True))
    assert [p.requires_grad for p in mine.parameters()] == [True, False, True, True, True, True]
    assert [module.training for module in mine.modules()] == modes
    for name, value in {**mine.state_dict(), "calls": mine.calls}.items():
        assert torch.equal(value, before[name]), name


def test_a_buffer_made_by_the_forward_pass_does_not_hide_the_result():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, CLASSES)

        def forward(self, x):
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(4), persistent=False)
            return self.linear(x * self.mask)

    mine = Lazy().train()

    attributor(model=mine, gradient_computer="iterative").featurize(TRAIN)

    assert mine.training


def test_positive_scores_mean_that_the_row_raises_the_output():
    """Retraining a convex model with a row counted a little more moves f(target) as the scores say."""
    torch.manual_seed(0)
    train, targets = (
        TensorDataset(d.tensors[0], d.tensors[1] % 2) for d in (labelled(20), labelled(5, seed=3))
    )

    def fit(weights):
        net = nn.Linear(4, 2).double()
        optimizer = torch.optim.LBFGS(
            net.parameters(), max_iter=300, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
        )
        x, y = train.tensors

        def closure():
            optimizer.zero_grad()
            loss = (weights * nn.functional.cross_entropy(net(x.double()), y, reduction="none")).sum()
            loss = loss + 0.05 * sum(p.square().sum() for p in net.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)
        return net

    def margins(net):
        x, y = targets.tensors
        return ImageClassificationModelOutput().get_output(net, None, None, x[0].double(), y[0]).detach()

    full = fit(torch.ones(20))
    x, y = train.tensors
    made = attributor(model=full, projector="none", method=GaussNewton(damping=1e-3))
    double = TensorDataset(x.double(), y)
    made.featurize(double)
    scores = made.score(TensorDataset(targets.tensors[0].double(), targets.tensors[1])).numpy()[:, 0]

    effects = []
    for row in range(20):
        weights = torch.ones(20)
        weights[row] += 0.05
        effects.append(float(margins(fit(weights)) - margins(full)))

    assert np.corrcoef(scores, effects)[0, 1] > 0.99


def test_scores_become_numpy_pandas_and_xarray_with_rows_and_targets_named(in_memory, expected):
    scores = in_memory
    assert (len(scores), scores.shape) == (N, (N, M))
    for dtype in (np.float32, np.float64):
        assert np.asarray(scores, dtype).dtype == dtype
        np.testing.assert_array_equal(np.asarray(scores, dtype), expected)
    assert np.asarray(scores).dtype == np.float32
    np.testing.assert_array_equal(scores.rows([3, 69, 0]), expected[[3, 69, 0]])
    frame = scores.to_pandas()
    assert (frame.index.name, frame.columns.name) == ("train_row", "target")
    np.testing.assert_array_equal(frame.to_numpy(), expected)
    array = scores.to_xarray()
    assert array.dims == ("train_row", "target")
    assert array.attrs["damping"] == "None"
    np.testing.assert_array_equal(array.to_numpy(), expected)
    text = repr(scores)
    assert all(part in text for part in ("70 train rows x 6 targets", "checkpoints=2", "method=GaussNewton"))


def test_every_automatic_choice_is_logged_and_written_down(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="trak_lite"):
        finished(tmp_path / "a.zarr")

    assert "gradient_computer='auto' selects 'hook': every kept parameter is covered" in caplog.text
    assert "'projector': 'countsketch'" in caplog.text
    stored = json.loads((tmp_path / "a.zarr" / "zarr.json").read_text())["attributes"]["trak_lite"]
    assert stored["made_with"]["settings"]["method"] == GaussNewton().to_json()
    assert stored["made_with"]["settings"]["gradient_computer"] == "hook"
    assert stored["fingerprint"]["projector"]["proj_dim"] == 16


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
    sizes: list[int] = []

    def collate(samples):
        sizes.append(len(samples))
        return torch.utils.data.default_collate(samples)

    attributor = Attributor(
        model(), "image_classification", None, proj_dim=8, collate=collate, batch_size=own
    )
    data = TRAIN if loader is None else DataLoader(TRAIN, batch_size=loader)
    attributor.featurize(Rows(data, batch_size=call, name="train"))

    assert sizes == expected
    del sizes[:]
    attributor.score(Rows(TRAIN, name="targets"), batch_size=20)
    assert sizes == [20, 20, 20, 10]


def test_a_bad_row_in_a_later_batch_keeps_what_was_done_and_can_be_mended(tmp_path):
    made = attributor(tmp_path / "a.zarr")
    x, y = (tensor.clone() for tensor in TRAIN.tensors)
    x[50] = torch.inf
    with pytest.raises(NonFiniteError, match=r"rows \[50\]"):
        made.featurize(Rows(TensorDataset(x, y), name="d"))

    assert made.featurize(Rows(TRAIN, name="d")).rows_found == 32


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
    r"task\.settings\.temperature is 1\.0 there, 2\.0 here": {
        "task": ImageClassificationModelOutput(temperature=2.0)
    },
}


def test_a_store_of_other_settings_is_refused_naming_each_difference(stored):
    before = contents(stored)
    for key, changes in OTHER.items():
        other = attributor(stored, **changes)
        for call in (
            lambda: other.featurize(TRAIN, checkpoints=states()),  # noqa: B023
            lambda: other.score(TARGETS, name="new"),  # noqa: B023
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


def test_steps_out_of_order_are_refused(tmp_path):
    made = attributor(tmp_path / "a.zarr")
    with pytest.raises(StateError, match=r"no store at.*featurize"):
        made.score(TARGETS)
    with pytest.raises(StateError, match="featurize"):
        attributor().score(TARGETS)
    with pytest.raises(StateError, match="featurize"):
        attributor().scores()
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, fail_at=40), name="d"))
    with pytest.raises(StateError, match=r"ckpt-0 has 32 of 70 train rows.*featurize"):
        made.score(TARGETS)
    made.featurize(Rows(TRAIN, name="d"))
    with pytest.raises(StateError, match=r"no scores 'test'; there are \[\]"):
        made.scores("test")
    with pytest.raises(StateError, match="no features for 1 of the 1 checkpoints"):
        made.score(TARGETS, checkpoints=states(1))


def test_other_weights_of_the_model_than_the_store_has_are_pointed_out(tmp_path):
    for path in ("a.zarr", None):
        net = model()
        made = attributor(None if path is None else tmp_path / path, model=net)
        made.featurize(TRAIN)
        made.featurize(TRAIN)  # the same weights
        with torch.no_grad():
            next(net.parameters()).add_(1.0)

        with pytest.warns(UserWarning, match=r"other weights of the model itself already \(ckpt-0,"):
            made.featurize(TRAIN)


def test_scoring_with_a_model_that_was_trained_further_says_so(tmp_path):
    net = model()
    made = attributor(tmp_path / "a.zarr", model=net)
    made.featurize(TRAIN)
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    with pytest.raises(StateError, match=r"those of 'current' when it was featurized, and has others now\."):
        made.score(TARGETS)


def test_weights_that_cannot_be_found_again_are_asked_for(tmp_path):
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN, checkpoints=iter(states()))

    with pytest.raises(
        StateError, match=r"ckpt-0 \(featurized as '0'\), ckpt-1 .*checkpoints=.*drop_checkpoint"
    ) as refused:
        made.score(TARGETS)
    assert "'current'" not in str(refused.value)

    assert made.score(TARGETS, checkpoints=states()).shape == (N, M)


def test_a_read_only_folder_gives_what_is_there_and_refuses_the_rest_by_name(stored, expected, monkeypatch):
    before = contents(stored)
    monkeypatch.setattr(
        os, "access", lambda path, mode, **kwargs: not mode & os.W_OK
    )  # also when run as root

    again = attributor(stored)

    assert again.featurize(TRAIN, checkpoints=states()).rows_written == 0
    np.testing.assert_array_equal(again.score(TARGETS, name="test").numpy(), expected)
    with pytest.raises(ReadOnlyStoreError, match=r"a\.zarr"):
        again.score(TARGETS, name="new")
    with pytest.raises(ReadOnlyStoreError, match=r"a\.zarr"):
        again.featurize(TRAIN, checkpoints=states(3))
    assert contents(stored) == before


def test_the_model_as_it_is_means_as_it_came_also_after_other_checkpoints():
    mine = model()
    made = attributor(model=mine, projector="none")  # else every checkpoint has a projection of its own
    alone = attributor(model=mine, projector="none")
    alone.featurize(TRAIN)

    summary = made.featurize(TRAIN, checkpoints=[states(1)[0], None])

    assert summary.rows_written == 2 * N
    current = made.score(TARGETS, name="current", checkpoints=[None])
    np.testing.assert_array_equal(current.numpy(), alone.score(TARGETS).numpy())


def test_weights_of_every_featurize_call_are_found_again(tmp_path):
    first, second = states()
    save_file(first, tmp_path / "first.safetensors")
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN, checkpoints=tmp_path / "first.safetensors")
    made.featurize(TRAIN, checkpoints=second)
    made.featurize(TRAIN)

    assert made.score(TARGETS).settings["checkpoints"] == 3


@pytest.mark.parametrize("fitted", [slice(None), slice(3, 4)], ids=["all", "one"])
def test_gradients_that_really_are_zero_are_stored(fitted):
    """A row that the model fits exactly has no gradient of its squared error, also in float16 beside others."""
    linear = nn.Linear(4, 1)
    x = TRAIN.tensors[0]
    y = linear(x).detach() + 1.0
    y[fitted] = linear(x[fitted]).detach() + (1e-7 if fitted.stop else 0)
    task = RegressionModelOutput(output="neg_squared_error")

    made = attributor(model=linear, task=task, dtype="float16" if fitted.stop else "float32")

    assert made.featurize(Rows(TensorDataset(x, y), batch_size=None if fitted.stop else 1)).rows_written == N
