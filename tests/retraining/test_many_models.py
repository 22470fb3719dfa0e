"""Recipes as trainings on subsets: the weights of torch's own loop, many models at once, and clear refusals."""

import copy
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    NonFiniteError,
    RetrainingError,
    UnsupportedModelError,
)
from trak_lite.evaluation import removal_masks, subset_masks
from trak_lite.retraining import retrain, retrain_many
from trak_lite.unrolled import SGD, Adam, AdamW, Recipe

N, TARGETS = 24, 5
MASKS = subset_masks(N, 3)
DATA = torch.Generator().manual_seed(0)
INPUTS = torch.randn(N, 1, 6, 6, generator=DATA, dtype=torch.float64)
LABELS = torch.randint(3, (N,), generator=DATA)
TESTS = torch.randn(TARGETS, 1, 6, 6, generator=DATA, dtype=torch.float64)
ROUNDING = {"rtol": 1e-10, "atol": 1e-10}
STORED = {"rtol": 1e-5, "atol": 1e-6}
"""Outputs are stored in float32."""


def mlp(seed, hidden=nn.GELU):
    layers = (nn.Flatten(), nn.Linear(36, 12), hidden(), nn.LayerNorm(12), nn.Linear(12, 3))
    return nn.Sequential(*layers).double()


def cnn(seed):
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3, bias=False))
    return nn.Sequential(*layers).double()


def row_losses(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe(build=mlp, loss=row_losses, data=None, optimizer=None, **changes):
    data = TensorDataset(INPUTS, LABELS) if data is None else data
    settings = {"batch_size": 5, **({} if "steps" in changes else {"epochs": 3}), **changes}
    return Recipe(build, loss, data, SGD(lr=0.1) if optimizer is None else optimizer, **settings)


def logits(model):
    return model(TESTS)[:, 0]


def outputs(training, masks=MASKS, **given):
    many = retrain_many(training, masks, logits, **given).outputs
    given.pop("models_at_once", None)
    return many, retrain(training, masks, logits, **given).outputs


PLAIN = {"eps_root": 0.0}
OPTIMIZERS = [
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.3}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    (partial(Adam, **PLAIN), torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
    (partial(Adam, **PLAIN), torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    (partial(AdamW, **PLAIN), torch.optim.AdamW, {"lr": 0.01}),
    (partial(AdamW, **PLAIN), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.0, 0.9)}),
]


def written_out(made, theirs, settings, rows, seed):
    """Train by a loop over ``torch.optim`` in the recipe's order of rows."""
    torch.manual_seed(seed)
    model = made.model_fn(seed)
    optimizer = theirs([p for p in model.parameters() if p.requires_grad], **settings)
    factor = made.schedule or (lambda step: 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for number in range(made.steps_for(len(rows))):
        batch = rows[made.order(number, num_rows=len(rows), seed=seed)]
        optimizer.zero_grad()
        cross_entropy(model(INPUTS[batch]), LABELS[batch]).backward()
        if made.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), made.clip_norm)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def assert_as_written_out(made, rows, seed, others=(), theirs=torch.optim.SGD, **settings):
    """Compare a model that was trained alone, and one beside others, with the loop over ``torch.optim``."""
    many = made.train_fn.train_many(*zip((rows, seed), *others, strict=True))
    expected = written_out(made, theirs, settings or {"lr": 0.1}, rows, seed)
    for model in (made.train_fn(rows, seed), many[0]):
        assert not model.training
        torch.testing.assert_close(dict(model.state_dict()), dict(expected), **ROUNDING)


@pytest.mark.parametrize("build", [mlp, cnn])
@pytest.mark.parametrize(("ours", "theirs", "settings"), OPTIMIZERS)
def test_models_side_by_side_and_one_by_one_equal_a_loop_over_torch_optim(build, ours, theirs, settings):
    first, *others = zip(map(np.flatnonzero, MASKS), [4, 0, 7], strict=True)
    assert_as_written_out(recipe(build, optimizer=ours(**settings)), *first, others, theirs, **settings)


def batch_norm(seed):
    norm = nn.BatchNorm1d(36).eval()
    norm.running_mean += 0.5
    return nn.Sequential(nn.Flatten(), norm, nn.Linear(36, 3)).double()


def frozen_and_tied(seed):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 36), nn.Linear(36, 3))
    model[3].weight = model[1].weight
    model[4].weight.requires_grad_(False)
    return model.double()


@pytest.mark.parametrize("changes", [
    {"schedule": lambda step: 1 / (1 + step)},
    {"clip_norm": 0.5},
    {"clip_norm": 2.0},
    {"accumulate": 2},
    {"steps": 4},
    {"batch_size": 100},
    {"build": batch_norm},
    {"build": frozen_and_tied},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_other_settings_equal_the_loop_too(changes):
    settings = {"lr": 0.1, "momentum": 0.9}
    rows = np.flatnonzero(MASKS[1])
    made = recipe(optimizer=SGD(**settings), **changes)
    assert_as_written_out(made, rows, 3, [(rows[::-1], 1)], **settings)


@pytest.mark.quick
def test_every_epoch_visits_all_rows_once_in_an_order_of_its_own():
    made = recipe(epochs=2)
    steps = [made.order(number, num_rows=12, seed=3) for number in range(6)]
    assert [len(step) for step in steps] == [5, 5, 2] * 2
    epochs = [np.concatenate(steps[:3]).tolist(), np.concatenate(steps[3:]).tolist()]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    following = made.orders(num_rows=12, seed=3, first=2)
    for number in (2, 3, 4, 5):
        np.testing.assert_array_equal(next(following), steps[number])


def test_subsets_of_several_sizes_are_trained_in_groups():
    masks = np.concatenate([MASKS, removal_masks(np.random.default_rng(0).normal(size=(N, 2)), 4)])
    many, loop = outputs(recipe(cnn).train_fn, masks, models_at_once=4)
    np.testing.assert_allclose(many, loop, **STORED)
    for one, other in pairwise(many.reshape(-1, TARGETS)):
        assert np.abs(one - other).max() > 1e-3


def test_rows_may_be_a_list_and_seeds_negative():
    training, rows = recipe(partial(mlp, hidden=nn.Dropout)).train_fn, [3, 0, 17, 9, 4, 11]
    models = [training(rows, -2), training(np.array(rows), -2), *training.train_many([rows, rows], [-2, 5])]
    for name, weight in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], weight, rtol=0, atol=0)
        torch.testing.assert_close(models[2].state_dict()[name], weight, **ROUNDING)
    assert not torch.equal(models[3][1].weight, models[0][1].weight)


def test_a_model_that_vmap_cannot_run_is_trained_one_by_one():
    class Branching(nn.Linear):
        def forward(self, inputs):
            hidden = super().forward(inputs.flatten(1))
            return hidden * 2 if hidden.sum().item() > 0 else hidden

    made = recipe(lambda seed: Branching(36, 3).double())
    said = r"side by side of Branching .*\.item\(\).*Train one by one"
    with pytest.raises(UnsupportedModelError, match=said):
        retrain_many(made.train_fn, MASKS, logits)
    expected = written_out(made, torch.optim.SGD, {"lr": 0.1}, np.arange(7), 0)
    torch.testing.assert_close(dict(made.train_fn(np.arange(7), 0).state_dict()), dict(expected), **ROUNDING)


class Counted:
    def __init__(self, stop_at=None):
        self.calls, self.stop_at = 0, stop_at

    def __call__(self, model):
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        self.calls += 1
        return logits(model)


THREE_AT_ONCE = partial(retrain_many, models_at_once=3)


@pytest.mark.parametrize(("begun", "continued"), [(THREE_AT_ONCE, retrain), (retrain, retrain_many)])
def test_the_loop_and_many_models_at_once_continue_each_other(tmp_path, begun, continued):
    training, rest = recipe(epochs=1).train_fn, Counted()
    given = {"path": tmp_path / "r", "train_id": "mlp"}
    with pytest.raises(KeyboardInterrupt):
        begun(training, MASKS, Counted(4), **given)
    found = continued(training, MASKS, rest, **given)
    assert rest.calls == 2
    np.testing.assert_allclose(found.outputs, retrain(training, MASKS, logits).outputs, **STORED)


TEMPERATURE = 1.0


def scaled_losses(model, batch):
    return cross_entropy(model(batch[0]) / TEMPERATURE, batch[1], reduction="none")


CHANGES = {
    r"optimizer\.lr is 0\.1 there, 0\.2 here": {"optimizer": SGD(lr=0.2)},
    "model_fn": {"build": cnn},
    "epochs": {"epochs": 2},
    "grad_wrt": {"grad_wrt": ["4.weight"]},
}
"""Of what only trainings on subsets are identified by, and one of the settings that ``tests/unrolled`` has for runs."""


@pytest.mark.parametrize(
    ("seen", "function"), list(zip(CHANGES, cycle([retrain, retrain_many]), strict=False))
)
def test_another_training_is_not_continued(seen, function, tmp_path):
    function(recipe(epochs=1).train_fn, MASKS, logits, path=tmp_path / "r")
    with pytest.raises(ManifestMismatchError, match=rf"identity\.{seen}"):
        function(recipe(**{"epochs": 1, **CHANGES[seen]}).train_fn, MASKS, logits, path=tmp_path / "r")


def test_the_same_training_in_new_objects_is_continued(tmp_path):
    made, data, counted = recipe(epochs=1), TensorDataset(INPUTS.clone(), LABELS.clone()), Counted()
    new = recipe(epochs=1, data=data, seed=5)
    for again, settings, calls in ((replace(made, seed=5), {"train_id": "a"}, 0), (new, {}, 2)):
        path = tmp_path / f"{calls}"
        first = retrain_many(made.train_fn, MASKS, counted, path=path, **settings)
        counted.calls = 0
        found = retrain_many(again.train_fn, MASKS, counted, path=path, **settings)
        np.testing.assert_array_equal(first.outputs, found.outputs)
        assert counted.calls == calls


def change_a_global(base, monkeypatch):
    monkeypatch.setitem(globals(), "TEMPERATURE", 0.1)


def change_initial_weights(base, monkeypatch):
    with torch.no_grad():
        base[1].weight.mul_(3.0)


@pytest.mark.parametrize("change", [change_a_global, change_initial_weights])
def test_what_no_setting_tells_is_noticed_by_a_repetition(tmp_path, monkeypatch, change):
    base = mlp(0)
    training = recipe(lambda seed: copy.deepcopy(base), scaled_losses, epochs=1).train_fn
    retrain_many(training, MASKS, logits, path=tmp_path / "r")
    change(base, monkeypatch)
    with pytest.raises(ManifestMismatchError, match=r"another training: repeated for subset 0, .*train_id"):
        retrain_many(training, MASKS, logits, path=tmp_path / "r")


@pytest.mark.parametrize("shared", ["model", "part", "parameter"])
def test_models_that_share_parts_are_refused(shared):
    whole, part = mlp(0), nn.Linear(36, 12).double()

    def build(seed):
        if shared == "model":
            return whole
        model = mlp(seed)
        if shared == "part":
            model[1] = part
        else:
            model[1].weight = part.weight
        return model

    training = recipe(build, epochs=1).train_fn
    before = copy.deepcopy((whole.state_dict(), part.state_dict()))
    said, rows = r"model_fn returned two models that share .*copy\.deepcopy", np.arange(5)
    alone, many = partial(training, rows, 0), partial(training.train_many, [rows] * 2, [0, 1])
    for call in (alone, many, lambda: training.recipe.train().model()):
        with pytest.raises(InvalidInputError, match=said):
            call()
    torch.testing.assert_close((whole.state_dict(), part.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "seen"),
    [
        ([0, N], rf"must lie between 0 and {N - 1}, got \[{N}\]"),
        ([-1], r"got \[-1\]"),
        (MASKS[0], "must be a list of integers"),
        ([0.5], "must be a list of integers"),
        ([], "no row to train on"),
    ],
)
def test_rows_that_are_no_train_rows_are_refused(rows, seen):
    training = recipe().train_fn
    for call in (partial(training, rows, 0), partial(training.train_many, [rows], [0])):
        with pytest.raises(InvalidInputError, match=seen):
            call()


def no_model(seed):
    raise ValueError("no such model")


def second_diverges(seed):
    model = mlp(seed)
    if seed == 1:
        nn.init.constant_(model[4].weight, float("nan"))
    return model


DIVERGES = r"subset 0, seed 0 .* failed \(NonFiniteError: 1\.weight.* is NaN or infinite"
FAILING = [
    (InvalidInputError, r"got 2 subsets of sizes \[2, 3\] and 2 seeds",
     lambda: recipe().train_fn.train_many([np.arange(2), np.arange(3)], [0, 1])),
    (InvalidInputError, "models_at_once must be an integer",
     lambda: retrain_many(recipe().train_fn, MASKS, logits, models_at_once=0)),
    (RetrainingError, r"subset 0, seed 0 .*; subset 0, seed 1 .*no such model",
     lambda: retrain_many(recipe(no_model).train_fn, MASKS, logits)),
    (RetrainingError, r"subset 0, seed 0 .*\(IndexError",
     lambda: retrain_many(recipe(epochs=1).train_fn, MASKS, lambda model: logits(model)[9])),
    *((RetrainingError, DIVERGES,
       lambda f=f: f(recipe(optimizer=SGD(lr=1e300), epochs=1).train_fn, MASKS, logits))
      for f in (retrain, retrain_many)),
    (NonFiniteError, "of model 2 of 3 is NaN or infinite after step 2",
     lambda: recipe(second_diverges, epochs=1).train_fn.train_many([np.arange(12)] * 3, [0, 1, 2])),
]  # fmt: skip


def test_what_fails_names_subsets_seeds_and_parameters():
    for error, said, call in FAILING:
        with pytest.raises(error, match=said):
            call()


class Broken(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        if index == int(np.flatnonzero(MASKS[1] & ~MASKS[0])[0]):
            raise ValueError("broken sample")
        return INPUTS[index], int(LABELS[index])


@pytest.mark.parametrize(
    ("function", "given"), [(retrain, {}), (retrain_many, {"models_at_once": 2})], ids=["alone", "many"]
)
def test_a_sample_that_cannot_be_loaded_names_the_subset_and_keeps_the_rest(function, given, tmp_path):
    training, counted = recipe(data=Broken(), epochs=1).train_fn, Counted()
    arguments = {"path": tmp_path / "r", "train_id": "a", **given}
    with pytest.raises(RetrainingError, match=r"subset 1, seed 0 .* failed \(ValueError: broken sample\)"):
        function(training, MASKS, counted, **arguments)
    assert counted.calls == 2
    counted.calls = 0
    function(recipe(epochs=1).train_fn, MASKS, counted, **arguments)
    assert counted.calls <= 5, "one is repeated; those of subset 0 are not trained again"
