"""Verification against repetitions of one run: exact scores predict them, random ones do not."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from unrolled_cases import CLASSES, WIDTH, changed, loss, margin, mlp, recipe, vectors

from trak_lite import Attributor, verify
from trak_lite.cli.inspection import inspection
from trak_lite.errors import CorruptStoreError, InvalidInputError, ManifestMismatchError
from trak_lite.methods import GradDot
from trak_lite.retraining import one_run
from trak_lite.scoring.matrix import HeldMatrix
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import UnstoredRows
from trak_lite.scoring.stored import verdict_key
from trak_lite.store import Manifest, ZarrFeatureStore
from trak_lite.unrolled import SGD, runs, unrolled

FEW = TensorDataset(*vectors(4, 1))
ROWS = 100


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = recipe(mlp, loss, TensorDataset(*vectors(ROWS, 0)), SGD(lr=0.1), batch_size=20, epochs=2)
    return made.train(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def scores(run):
    return unrolled(run, FEW, margin)


def random_scores():
    values = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return Scores(
        HeldMatrix(values), UnstoredRows("random", GradDot(), Manifest({})), settings={}, location=None
    )


def one(scores, run, **settings):
    return verify(scores, run, FEW, protocol="one-run", **{"budget": 16, "task": margin, **settings})


@pytest.mark.quick
def test_exact_scores_predict_the_run_without_some_rows(run, scores):
    verdict = one(scores, run)

    assert [share for share, _ in verdict.lds] == [0.01, 0.05, 0.1, 0.5]
    for share, found in verdict.lds:
        assert found.mean > (0.97 if share < 0.5 else 0.85)
        assert found.low <= found.mean <= found.high
    assert verdict.metasmoothness > 0.9
    assert "the same run (seed and order) without random rows" in str(verdict)
    assert "50% left out" in str(verdict)
    assert verdict.to_json()["num_targets"] == 4


def test_random_scores_do_not(run):
    for _, found in one(random_scores(), run).lds:
        assert abs(found.mean) < 0.45


def test_outputs_are_those_of_plain_repetitions(run, scores, monkeypatch):
    """The truth that a verdict uses, against trainings with zero weights one by one."""
    seen = []
    lds = one_run.linear_datamodeling_score
    monkeypatch.setattr(
        one_run,
        "linear_datamodeling_score",
        lambda *args, **kwargs: seen.append(args) or lds(*args, **kwargs),
    )
    one(scores, run)
    predicted, _, outputs = seen[1]
    masks = one_run._masks(ROWS, 0.05, 16, 0)

    assert (masks.sum(1) == 95).all()
    for place in (0, 7):
        model = run.recipe.train(weights=masks[place]).model()
        with torch.no_grad():
            np.testing.assert_allclose(outputs[place], margin(model, vectors(4, 1)), rtol=1e-6)
    np.testing.assert_allclose(predicted, masks.astype(float) @ scores.numpy(), rtol=1e-5, atol=1e-6)


def test_a_run_with_row_weights_is_repeated_with_them():
    made = recipe(mlp, loss, TensorDataset(*vectors(ROWS, 0)), SGD(lr=0.1), batch_size=20)
    weights = np.linspace(0.0, 3.0, ROWS)
    kept = np.arange(10, ROWS)

    found = made.train(weights=weights).leave_out_fn(kept, 0)

    expected = made.train(weights=weights * np.isin(np.arange(ROWS), kept)).model()
    for one_parameter, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one_parameter, other, rtol=1e-12, atol=0)


def test_a_second_call_repeats_one_training_of_each_share(run, scores, monkeypatch):
    first = one(scores, run)
    trained = []
    side_by_side = runs._side_by_side
    monkeypatch.setattr(
        runs,
        "_side_by_side",
        lambda recipe, weights, *args: trained.append(len(weights)) or side_by_side(recipe, weights, *args),
    )

    assert one(scores, run) == first
    assert trained == [1] * len(first.lds)
    one(random_scores(), run)


def test_the_verdict_is_stored_with_the_scores(run, scores, tmp_path):
    """Those of a replay, and those of an attributor, beside its verdict over seeds; not those in memory."""
    found = one(scores, run)
    again = unrolled(run.recipe.train(run.path), FEW, margin)
    assert again.one_run_verdict == found
    assert found.run == run.digest
    assert "the same run (seed and order)" in repr(again)
    assert "the same run (seed and order)" in inspection(str(run.path / "scores.zarr"))

    attributor = Attributor(run.model(), margin_only, tmp_path / "store.zarr", proj_dim=8)
    attributor.featurize(run.recipe.data)
    kernel = attributor.score(FEW, "few")
    expected = verify(kernel, run, FEW, protocol="one-run", budget=4)
    over_seeds = verify(kernel, run.recipe.train_fn, FEW, budget=4, train_id="recipe")
    reopened = Attributor.open(tmp_path / "store.zarr", run.model(), task=margin_only)
    assert reopened.scores("few").one_run_verdict == expected
    assert reopened.scores("few").verdict == over_seeds
    assert repr(reopened.scores("few")).count("tested:") == 2
    assert "the same run" in reopened.scores("few")._repr_html_()
    reopened.drop_scores("few")
    reopened.score(FEW, "few")
    assert reopened.scores("few").one_run_verdict is None

    free = random_scores()
    one(free, run)
    assert free.one_run_verdict is None


def test_a_damaged_verdict_is_named(run, scores):
    one(scores, run)
    with ZarrFeatureStore.open(str(run.path / "scores.zarr"), "r+") as store:
        key = verdict_key(store, "scores/targets")
        store.put_entry("one-run/scores/targets", key, np.frombuffer(b'{"lds": 3}', np.uint8).copy())
    with pytest.raises(CorruptStoreError, match=r"verdict of one run.*Verify the scores again"):
        scores.one_run_verdict  # noqa: B018
    one(scores, run)


def test_other_targets_and_budgets_are_verified_in_the_same_folder(run, scores):
    others = TensorDataset(*vectors(3, 7))
    of_others = unrolled(run, others, margin, name="others")

    assert one(scores, run, budget=12).num_subsets == 12
    assert verify(of_others, run, others, protocol="one-run", budget=12, task=margin).lds[1][1].mean > 0.9


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": (1, 2)}, "does not take.*seeds"),
        ({"alpha": 0.3}, "does not take.*alpha"),
        ({"calibrate": True}, "does not take.*calibrate"),
        ({"train_id": "x"}, "does not take.*train_id"),
        ({"protocol": "two-run"}, "protocol"),
        ({"budget": 1}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"protocol": "expected"}, "protocol='one-run'"),
    ],
)
def test_arguments_are_checked(run, scores, settings, message):
    with pytest.raises(InvalidInputError, match=message):
        verify(scores, run, FEW, **{"protocol": "one-run", "budget": 4, "task": margin, **settings})


@pytest.mark.quick
def test_other_arguments_of_the_wrong_kind(run, scores):
    with pytest.raises(InvalidInputError, match="takes a TrainingRun"):
        verify(scores, run.recipe.train_fn, FEW, protocol="one-run", task=margin)
    with pytest.raises(InvalidInputError, match="3 targets"):
        verify(scores, run, TensorDataset(*vectors(3, 1)), protocol="one-run", task=margin)


def test_scores_of_other_targets_or_another_task_are_refused(run, scores):
    other = TensorDataset(FEW.tensors[0] + 1, FEW.tensors[1])
    with pytest.raises(ManifestMismatchError, match="targets"):
        verify(scores, run, other, protocol="one-run", budget=2, task=margin)
    with pytest.raises(ManifestMismatchError, match="task"):
        verify(
            scores, run, FEW, protocol="one-run", budget=2, task=lambda model, batch: margin(model, batch) * 2
        )


def test_the_task_of_the_scores_is_used(run, scores):
    """That of a replay, of a mean over runs and of an attributor; of other scores it must be given."""
    seed = changed(run.recipe, seed=1).train()
    attributor = Attributor(run.model(), margin_only, None, proj_dim=8)
    attributor.featurize(run.recipe.data)

    assert verify(scores, run, FEW, protocol="one-run", budget=16) == one(scores, run)
    mean = unrolled([run, seed], FEW, margin)
    assert verify(mean, run, FEW, protocol="one-run", budget=16) == one(mean, run)
    kernel = attributor.score(FEW)
    assert (
        verify(kernel, run, FEW, protocol="one-run", budget=4).lds
        == one(kernel, run, budget=4, task=margin_only).lds
    )
    with pytest.raises(InvalidInputError, match="Pass task="):
        verify(random_scores(), run, FEW, protocol="one-run", budget=2)


def margin_only(model, batch):
    return margin(model, batch)


def relu(seed):
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double()


def wide(seed):
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, CLASSES)).double()


OTHERS = {
    "data": ({"data": TensorDataset(*vectors(ROWS, 5))}, "data"),
    "order": ({"data": TensorDataset(*(part.flip(0) for part in vectors(ROWS, 0)))}, "data"),
    "activation": ({"model_fn": relu}, "modules"),
    "width": ({"model_fn": wide}, "modules"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_run_of_another_model_or_other_data_is_refused(run, scores, other):
    changes, what = OTHERS[other]
    wrong = changed(run.recipe, **changes).train()

    with pytest.raises(ManifestMismatchError, match=f"(?s){what}.*Pass the run that was replayed"):
        one(scores, wrong)


@pytest.mark.parametrize("other", ["data", "order", "width"])
def test_a_run_of_other_data_or_parameters_is_refused_for_scores_of_an_attributor(run, other):
    attributor = Attributor(run.model(), margin, None, proj_dim=8)
    attributor.featurize(run.recipe.data)
    wrong = changed(run.recipe, **OTHERS[other][0]).train()

    with pytest.raises(
        InvalidInputError, match="architecture" if other == "width" else "trained on other data"
    ):
        one(attributor.score(FEW), wrong, budget=2)


def test_another_seed_of_the_run_is_accepted(run, scores):
    """How well do the scores of one run predict another?"""
    assert one(scores, changed(run.recipe, seed=1).train()).lds[0][1].mean < 1.0


def test_a_share_leaves_out_at_least_one_row():
    small = recipe().train()
    found = verify(unrolled(small, FEW, margin), small, FEW, protocol="one-run", budget=3, task=margin)
    assert [share for share, _ in found.lds] == [0.01, 0.05, 0.1, 0.5]
