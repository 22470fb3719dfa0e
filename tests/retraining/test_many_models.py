"""Recipes as trainings on subsets: the weights of torch's own loop, many models at once, and clear refusals."""

import copy
from dataclasses import replace
from itertools import pairwise

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


def mlp(seed):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 3)
    ).double()


def cnn(seed):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3, bias=False)
    ).double()


def with_dropout(seed):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Dropout(0.5), nn.Linear(12, 3)).double()


def row_losses(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe(build=mlp, loss=row_losses, data=None, optimizer=None, **changes):
    data = TensorDataset(INPUTS, LABELS) if data is None else data
    settings = {"batch_size": 5, **({} if "steps" in changes else {"epochs": 3}), **changes}
    return Recipe(build, loss, data, SGD(lr=0.1) if optimizer is None else optimizer, **settings)


def logits(model):
    return model(TESTS)[:, 0]


def outputs(training, masks=MASKS, **given):
    """Outputs of models side by side, and of models that were trained one by one."""
    many = retrain_many(training, masks, logits, **given).outputs
    given.pop("models_at_once", None)
    return many, retrain(training, masks, logits, **given).outputs


# ------------------------------------------------------------------------ the same weights

OPTIMIZERS = [
    (SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    (SGD(lr=0.1, momentum=0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ),
    (Adam(lr=0.01, eps_root=0.0), torch.optim.Adam, {"lr": 0.01}),
    (
        Adam(lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps_root=0.0),
        torch.optim.Adam,
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)},
    ),
    (AdamW(lr=0.01, weight_decay=0.1, eps_root=0.0), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
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


@pytest.mark.parametrize("build", [mlp, cnn])
@pytest.mark.parametrize(("optimizer", "theirs", "settings"), OPTIMIZERS)
def test_models_side_by_side_and_one_by_one_equal_a_loop_over_torch_optim(build, optimizer, theirs, settings):
    made = recipe(build, optimizer=optimizer)
    subsets, seeds = [np.flatnonzero(mask) for mask in MASKS], [4, 0, 7]

    many = made.train_fn.train_many(subsets, seeds)

    for rows, seed, one in zip(subsets, seeds, many, strict=True):
        alone = made.train_fn(rows, seed)
        assert not alone.training
        assert not one.training
        for name, weight in written_out(made, theirs, settings, rows, seed).items():
            torch.testing.assert_close(alone.state_dict()[name], weight, **ROUNDING)
            torch.testing.assert_close(one.state_dict()[name], weight, **ROUNDING)


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": lambda step: 1 / (1 + step)},
        {"clip_norm": 0.5},
        {"accumulate": 2},
        {"steps": 4},
        {"batch_size": 100},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_settings_equal_the_loop_too(changes):
    made = recipe(optimizer=SGD(lr=0.1, momentum=0.9), **changes)
    rows = np.flatnonzero(MASKS[1])

    found = [made.train_fn(rows, 3), *made.train_fn.train_many([rows, rows[::-1]], [3, 1])[:1]]

    expected = written_out(made, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, rows, 3)
    for model in found:
        for name, weight in expected.items():
            torch.testing.assert_close(model.state_dict()[name], weight, **ROUNDING)


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


def test_many_models_agree_with_one_by_one_and_differ_among_each_other():
    many, loop = outputs(recipe(cnn).train_fn, models_at_once=4)

    np.testing.assert_allclose(many, loop, **STORED)
    for one, other in pairwise(many.reshape(-1, TARGETS)):
        assert np.abs(one - other).max() > 0.05


def test_dropout_side_by_side_has_the_masks_of_one_alone():
    training = recipe(with_dropout).train_fn

    many, loop = outputs(training)

    np.testing.assert_allclose(many, loop, **STORED)
    plain = retrain(
        recipe(lambda seed: nn.Sequential(*with_dropout(seed)[:2], with_dropout(seed)[3])).train_fn,
        MASKS,
        logits,
    )
    assert np.abs(plain.outputs - loop).max() > 0.05, "the masks have an effect"


def test_training_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    training = recipe(with_dropout).train_fn

    training.train_many([np.arange(5)], [7])
    training(np.arange(5), 7)

    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_frozen_and_tied_parameters_train_as_in_the_loop():
    def build(seed):
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 36), nn.Linear(36, 3))
        model[3].weight = model[1].weight
        model[4].weight.requires_grad_(False)
        return model.double()

    made, rows = recipe(build), np.flatnonzero(MASKS[0])

    for model in (made.train_fn(rows, 2), *made.train_fn.train_many([rows], [2])):
        for name, weight in written_out(made, torch.optim.SGD, {"lr": 0.1}, rows, 2).items():
            torch.testing.assert_close(model.state_dict()[name], weight, **ROUNDING)


def test_subsets_of_several_sizes_are_trained_in_groups():
    masks = np.concatenate([MASKS, removal_masks(np.random.default_rng(0).normal(size=(N, 2)), 4)])

    many, loop = outputs(recipe().train_fn, masks, models_at_once=3, seeds=(0,))

    np.testing.assert_allclose(many, loop, **STORED)


def test_rows_may_be_a_list_and_seeds_negative():
    training, rows = recipe(with_dropout).train_fn, [3, 0, 17, 9, 4, 11]

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
    with pytest.raises(
        UnsupportedModelError, match=r"side by side of Branching .*\.item\(\).*Train one by one"
    ):
        retrain_many(made.train_fn, MASKS, logits)

    rows = np.arange(7)
    for name, weight in written_out(made, torch.optim.SGD, {"lr": 0.1}, rows, 0).items():
        torch.testing.assert_close(made.train_fn(rows, 0).state_dict()[name], weight, **ROUNDING)


# ------------------------------------------------------------------------ stored outputs


def test_the_loop_continues_what_many_models_at_once_began(tmp_path):
    calls = []

    def stops(model):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(1)
        return logits(model)

    training = recipe(epochs=1).train_fn
    given = {"path": tmp_path / "r", "train_id": "mlp"}
    with pytest.raises(KeyboardInterrupt):
        retrain_many(training, MASKS, stops, models_at_once=3, **given)
    calls.clear()

    found = retrain(training, MASKS, stops, **given)

    assert len(calls) == 2
    np.testing.assert_allclose(found.outputs, retrain(training, MASKS, logits).outputs, **STORED)


def test_many_models_at_once_continue_what_the_loop_began(tmp_path):
    calls = []

    def stops(model):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(1)
        return logits(model)

    training = recipe(epochs=1).train_fn
    given = {"path": tmp_path / "r", "train_id": "mlp"}
    with pytest.raises(KeyboardInterrupt):
        retrain(training, MASKS, stops, **given)
    calls.clear()

    found = retrain_many(training, MASKS, stops, **given)

    assert len(calls) == 2
    np.testing.assert_allclose(found.outputs, retrain(training, MASKS, logits).outputs, **STORED)


TEMPERATURE = 1.0


def scaled_losses(model, batch):
    return cross_entropy(model(batch[0]) / TEMPERATURE, batch[1], reduction="none")


CHANGES = {
    "learning rate": ({"optimizer": SGD(lr=0.2)}, r"identity\.optimizer\.lr is 0\.1 there, 0\.2 here"),
    "optimizer": ({"optimizer": Adam(lr=0.1)}, r"identity\.optimizer\.name"),
    "one label": (
        {"data": TensorDataset(INPUTS, torch.cat([LABELS[:-1], (LABELS[-1:] + 1) % 3]))},
        r"identity\.data\.tensors",
    ),
    "loss": (
        {"loss": lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none") ** 2},
        r"identity\.loss",
    ),
    "model": ({"build": cnn}, r"identity\.model_fn"),
    "schedule": ({"schedule": lambda step: 0.5}, r"identity\.schedule"),
    "epochs": ({"epochs": 2}, r"identity\.epochs"),
    "parameters": ({"grad_wrt": ["4.weight"]}, r"identity\.grad_wrt"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("function", [retrain, retrain_many])
def test_another_training_is_not_continued(function, change, tmp_path):
    changes, seen = CHANGES[change]
    function(recipe(epochs=1).train_fn, MASKS, logits, path=tmp_path / "r")

    with pytest.raises(ManifestMismatchError, match=seen):
        function(recipe(**{"epochs": 1, **changes}).train_fn, MASKS, logits, path=tmp_path / "r")


def test_the_same_training_in_new_objects_is_continued(tmp_path):
    calls = []

    def counted(model):
        calls.append(1)
        return logits(model)

    made = recipe(epochs=1)
    first = retrain_many(made.train_fn, MASKS, logits, path=tmp_path / "r", train_id="a")
    again = retrain_many(replace(made, seed=5).train_fn, MASKS, counted, path=tmp_path / "r", train_id="a")
    np.testing.assert_array_equal(first.outputs, again.outputs)
    assert calls == []

    same = {"path": tmp_path / "s"}
    retrain_many(made.train_fn, MASKS, logits, **same)
    data = TensorDataset(INPUTS.clone(), LABELS.clone())
    retrain_many(recipe(epochs=1, data=data, seed=5).train_fn, MASKS, logits, **same)


def test_a_changed_global_variable_of_the_loss_is_another_training(tmp_path, monkeypatch):
    training = recipe(loss=scaled_losses, epochs=1).train_fn
    retrain_many(training, MASKS, logits, path=tmp_path / "r")
    monkeypatch.setitem(globals(), "TEMPERATURE", 0.1)

    with pytest.raises(ManifestMismatchError, match="holds outputs of another training"):
        retrain_many(training, MASKS, logits, path=tmp_path / "r")


def test_other_initial_weights_of_a_captured_model_are_another_training(tmp_path):
    base = mlp(0)
    training = recipe(lambda seed: copy.deepcopy(base), epochs=1).train_fn
    retrain_many(training, MASKS, logits, path=tmp_path / "r")
    with torch.no_grad():
        base[1].weight.mul_(3.0)

    with pytest.raises(ManifestMismatchError, match="holds outputs of another training"):
        retrain_many(training, MASKS, logits, path=tmp_path / "r")


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "part",
    [nn.BatchNorm1d(36), nn.BatchNorm1d(36, track_running_stats=False).eval()],
    ids=["train mode", "no running statistics"],
)
@pytest.mark.parametrize("function", ["train_many", "__call__"])
def test_statistics_of_the_batch_are_refused(part, function):
    training = recipe(
        lambda seed: nn.Sequential(nn.Flatten(), copy.deepcopy(part), nn.Linear(36, 3)).double()
    ).train_fn
    arguments = ([np.arange(5)], [0]) if function == "train_many" else (np.arange(5), 0)

    with pytest.raises(UnsupportedModelError, match=r"1 \(BatchNorm1d\) normalises with the statistics"):
        getattr(training, function)(*arguments)


def test_running_statistics_in_eval_mode_stay_as_they_are():
    def build(seed):
        norm = nn.BatchNorm1d(36).eval()
        norm.running_mean += 0.5
        return nn.Sequential(nn.Flatten(), norm, nn.Linear(36, 3)).double()

    made, rows = recipe(build), np.arange(9)

    for model in (made.train_fn(rows, 0), *made.train_fn.train_many([rows, rows], [0, 1])[:1]):
        for name, value in written_out(made, torch.optim.SGD, {"lr": 0.1}, rows, 0).items():
            torch.testing.assert_close(model.state_dict()[name], value, **ROUNDING)


class Noisy(nn.Linear):
    """Draws random numbers where no module shows it."""

    def forward(self, inputs):
        hidden = super().forward(inputs.flatten(1))
        return hidden + torch.randn_like(hidden)


def test_other_random_numbers_than_dropout_are_refused():
    training = recipe(lambda seed: Noisy(36, 3).double()).train_fn

    with pytest.raises(UnsupportedModelError, match="Noisy draws random numbers other than dropout"):
        retrain_many(training, MASKS, logits)
    with pytest.raises(UnsupportedModelError, match="Noisy draws random numbers other than dropout"):
        training(np.arange(5), 0)


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
    before = copy.deepcopy(whole.state_dict()), part.weight.detach().clone()
    with pytest.raises(InvalidInputError, match=r"model_fn returned two models that share .*copy\.deepcopy"):
        training(np.arange(5), 0)
    with pytest.raises(InvalidInputError, match="model_fn returned two models that share"):
        training.train_many([np.arange(5)] * 2, [0, 1])
    run = training.recipe.train()
    with pytest.raises(InvalidInputError, match="model_fn returned two models that share"):
        run.model()

    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(weight, before[0][name], rtol=0, atol=0)
    torch.testing.assert_close(part.weight.detach(), before[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "seen"),
    [
        ([0, N], rf"hold \[{N}\], but it has rows 0 to {N - 1}"),
        ([-1], r"hold \[-1\]"),
        (MASKS[0], "must be a list of integers"),
        ([0.5], "must be a list of integers"),
        ([], "no row to train on"),
    ],
)
def test_rows_that_are_no_train_rows_are_refused(rows, seen):
    training = recipe().train_fn
    with pytest.raises(InvalidInputError, match=seen):
        training(rows, 0)
    with pytest.raises(InvalidInputError, match=seen):
        training.train_many([rows], [0])


def test_models_side_by_side_need_subsets_of_one_size():
    with pytest.raises(InvalidInputError, match=r"got 2 subsets of sizes \[2, 3\] and 2 seeds"):
        recipe().train_fn.train_many([np.arange(2), np.arange(3)], [0, 1])


def test_models_at_once_must_be_positive():
    with pytest.raises(InvalidInputError, match="models_at_once must be an integer"):
        retrain_many(recipe().train_fn, MASKS, logits, models_at_once=0)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"epochs": 0}, "epochs must be an integer"),
        ({"steps": 0}, "steps must be an integer"),
        ({"steps": 3, "epochs": 2}, "Give either epochs or steps"),
        ({"batch_size": 0}, "batch_size must be an integer"),
        ({"accumulate": 0}, "accumulate must be an integer"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"optimizer": torch.optim.SGD}, "optimizer must be an SGD, Adam or AdamW"),
    ],
)
def test_settings_that_cannot_train_are_refused(changes, seen):
    with pytest.raises(InvalidInputError, match=seen):
        recipe(**changes)


# ------------------------------------------------------------------------ failures name the subset


def test_a_model_that_cannot_be_built_names_the_subsets():
    def build(seed):
        raise ValueError("no such model")

    with pytest.raises(RetrainingError, match=r"subset 0, seed 0 .*; subset 0, seed 1 .*no such model"):
        retrain_many(recipe(build).train_fn, MASKS, logits)


def test_an_output_function_that_fails_names_subset_and_seed():
    with pytest.raises(RetrainingError, match=r"subset 0, seed 0 .*\(IndexError"):
        retrain_many(recipe(epochs=1).train_fn, MASKS, lambda model: logits(model)[9])


class Broken(Dataset):
    """Fails for one row."""

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
    training = recipe(data=Broken(), epochs=1).train_fn
    calls = []

    def counted(model):
        calls.append(1)
        return logits(model)

    arguments = {"path": tmp_path / "r", "train_id": "a", **given}
    with pytest.raises(RetrainingError, match=r"subset 1, seed 0 .* failed \(ValueError: broken sample\)"):
        function(training, MASKS, counted, **arguments)
    assert len(calls) == 2
    calls.clear()

    function(recipe(epochs=1).train_fn, MASKS, counted, **arguments)

    assert len(calls) <= 5, "one is repeated; those of subset 0 are not trained again"


@pytest.mark.parametrize("function", [retrain, retrain_many])
def test_a_training_that_diverges_names_subset_and_parameter(function):
    training = recipe(optimizer=SGD(lr=1e300), epochs=1).train_fn

    with pytest.raises(
        RetrainingError, match=r"subset 0, seed 0 .* failed \(NonFiniteError: 1\.weight.* is NaN or infinite"
    ):
        function(training, MASKS, logits)


def test_a_model_side_by_side_that_diverges_is_named():
    def build(seed):
        model = mlp(seed)
        if seed == 1:
            nn.init.constant_(model[4].weight, float("nan"))
        return model

    with pytest.raises(NonFiniteError, match="of model 2 of 3 is NaN or infinite after step 2"):
        recipe(build, epochs=1).train_fn.train_many([np.arange(12)] * 3, [0, 1, 2])
