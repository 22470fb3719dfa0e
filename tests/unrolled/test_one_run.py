"""Verification against repetitions of one run: exact scores predict them, random ones do not."""

from functools import partial

import numpy as np
import pytest
import torch
from held_scores import held_scores, spoil_verdict
from report_cases import in_a_notebook
from torch import nn
from torch.utils.data import TensorDataset
from unrolled_cases import changed, loss, margin, mlp, recipe, vectors

from trak_lite import Attributor, verify, verify_run
from trak_lite.cli import main
from trak_lite.errors import CorruptStoreError, InvalidInputError, ManifestMismatchError, StateError
from trak_lite.evaluation import linear_datamodeling_score, subset_masks
from trak_lite.unrolled import SGD, unrolled

FEW = TensorDataset(*vectors(4, 1))
ROWS = 100
SHARES = [0.01, 0.05, 0.1, 0.5]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = recipe(mlp, loss, TensorDataset(*vectors(ROWS, 0)), SGD(lr=0.1), batch_size=50, epochs=2)
    return made.train(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def scores(run):
    return unrolled(run, FEW, margin)


@pytest.fixture(scope="module")
def verdict(run, scores):
    return one(scores, run)


@pytest.fixture(scope="module")
def attributor(run):
    made = Attributor(run.model(), margin, None, proj_dim=8)
    made.featurize(run.recipe.data)
    return made


def random_scores():
    return held_scores(np.random.default_rng(0).normal(size=(ROWS, 4)))


def one(scores, run, targets=FEW, **settings):
    return verify_run(scores, run, targets, **{"budget": 16, "task": margin, **settings})


@pytest.mark.quick
def test_exact_scores_predict_the_run_without_some_rows_and_random_ones_do_not(run, verdict):
    assert [share for share, _ in verdict.lds] == SHARES
    for share, found in verdict.lds:
        assert found.mean > (0.97 if share < 0.5 else 0.85)
        assert found.low <= found.mean <= found.high
    assert verdict.metasmoothness == run.metasmoothness() > 0.9
    assert verdict.run == run.digest
    assert "the same run (seed and order) without random rows" in str(verdict)
    assert verdict.to_json()["num_targets"] == 4
    for _, found in one(random_scores(), run).lds:
        assert abs(found.mean) < 0.45


def test_a_verdict_is_that_of_plain_repetitions_without_some_rows(run, scores, verdict):
    masks = ~subset_masks(ROWS, 16, alpha=0.05, seed=0)
    assert (masks.sum(1) == 95).all()
    with torch.no_grad():
        outputs = [margin(run.recipe.train(weights=mask).model(), FEW.tensors).numpy() for mask in masks]
    expected = linear_datamodeling_score(scores.numpy(), masks, np.stack(outputs), num_resamples=100)
    found = dict(verdict.lds)[0.05]
    assert found.mean == pytest.approx(expected.mean, abs=1e-6)
    assert (found.low, found.high) == pytest.approx(expected.interval, abs=1e-6)


def test_a_run_with_row_weights_is_repeated_with_them():
    made = recipe(mlp, loss, TensorDataset(*vectors(ROWS, 0)), SGD(lr=0.1), batch_size=50)
    weights, kept = np.linspace(0.0, 3.0, ROWS), np.arange(10, ROWS)
    found = made.train(weights=weights).leave_out_fn(kept, 0)
    expected = made.train(weights=weights * np.isin(np.arange(ROWS), kept)).model()
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-12, atol=0)


def test_a_second_call_repeats_one_training_of_each_share(scores, run, tmp_path):
    built = []

    def build(seed):
        built.append(seed)
        return mlp(seed)

    counted = changed(run.recipe, model_fn=build).train(tmp_path)
    counted.metasmoothness()
    held, counts, verdicts = held_scores(scores.numpy()), [], []
    for _ in range(2):
        built.clear()
        verdicts.append(one(held, counted, budget=3))
        counts.append(len(built))
    assert verdicts[0] == verdicts[1]
    assert counts[0] - counts[1] == 2 * len(SHARES) * (3 - 1), "each training builds two models"


def test_the_verdict_is_stored_with_the_scores(run, scores, verdict, tmp_path, capsys):
    """Those of a replay, and those of an attributor, beside its verdict over seeds; not those in memory."""
    again = unrolled(run.recipe.train(run.path), FEW, margin)
    assert again.one_run_verdict == verdict
    assert "the same run (seed and order)" in repr(again)
    main(["inspect", str(run.path / "scores.zarr")])
    assert "the same run (seed and order)" in capsys.readouterr().out

    attributor = Attributor(run.model(), margin, tmp_path / "store.zarr", proj_dim=8)
    attributor.featurize(run.recipe.data)
    kernel = attributor.score(FEW, "few")
    expected = one(kernel, run, budget=2)
    over_seeds = verify(kernel, run.recipe.train_fn, FEW, budget=2, train_id="recipe")
    reopened = Attributor.open(tmp_path / "store.zarr", run.model(), task=margin)
    assert reopened.scores("few").one_run_verdict == expected
    assert reopened.scores("few").verdict == over_seeds
    assert repr(reopened.scores("few")).count("tested:") == 2
    assert "the same run" in in_a_notebook(reopened.scores("few")).text
    reopened.drop_scores("few")
    reopened.score(FEW, "few")
    assert reopened.scores("few").one_run_verdict is None

    free = random_scores()
    one(free, run, budget=2)
    assert free.one_run_verdict is None


def test_a_damaged_verdict_is_named(run):
    scores = unrolled(run, FEW, margin, name="damaged")
    one(scores, run, budget=2)
    spoil_verdict(run.path / "scores.zarr", "damaged")
    with pytest.raises(CorruptStoreError, match=r"verdict of one run.*Verify the scores again"):
        scores.one_run_verdict  # noqa: B018


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 1}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"subset_seed": None}, "subset_seed must be an integer of at least 0, got None"),
        ({"run": lambda rows, seed: mlp(seed)}, "takes a TrainingRun"),
        ({"targets": TensorDataset(*vectors(3, 1))}, "3 targets"),
    ],
)
def test_arguments_are_checked(run, scores, settings, message):
    with pytest.raises(InvalidInputError, match=message):
        verify_run(scores, **{"run": run, "targets": FEW, "budget": 4, "task": margin, **settings})
    with pytest.raises(InvalidInputError, match="verified with verify_run"):
        verify(scores, run, FEW)
    with pytest.raises(StateError, match=r"verify_run\(scores, run, targets\).*methods.Unrolled\(run\)"):
        verify(scores, run.recipe.train_fn, FEW, budget=2)


def test_the_task_of_the_scores_is_used(run, scores, verdict, attributor):
    """That of a replay, of a mean over runs and of an attributor; of other scores it must be given."""
    mean = unrolled([run, changed(run.recipe, seed=1).train()], FEW, margin)
    assert one(mean, run, budget=2, task=None).lds == one(mean, run, budget=2).lds
    assert one(attributor.score(FEW), run, budget=2, task=None).lds
    assert one(scores, run, task=None) == verdict
    with pytest.raises(InvalidInputError, match="Pass task="):
        one(random_scores(), run, task=None)


REVERSED = TensorDataset(*(part.flip(0) for part in vectors(ROWS, 0)))
OTHERS = [
    ({"data": TensorDataset(*vectors(ROWS, 5))}, "data", "trained on other data"),
    ({"data": REVERSED}, "data", "trained on other data"),
    ({"model_fn": partial(mlp, width=8)}, "modules", "architecture"),
    ({"model_fn": partial(mlp, activation=nn.ReLU)}, "modules", None),
]


@pytest.mark.parametrize(("changes", "of_replay", "of_attributor"), OTHERS)
def test_a_run_of_another_model_or_other_data_is_refused(
    run, scores, attributor, changes, of_replay, of_attributor
):
    wrong = changed(run.recipe, **changes).train()
    with pytest.raises(ManifestMismatchError, match=f"(?s){of_replay}.*Pass the run that was replayed"):
        one(scores, wrong)
    if of_attributor is not None:
        with pytest.raises(InvalidInputError, match=of_attributor):
            one(attributor.score(FEW), wrong, budget=2)


def test_scores_of_other_targets_or_another_task_are_refused(run, scores):
    with pytest.raises(ManifestMismatchError, match="targets"):
        one(scores, run, TensorDataset(FEW.tensors[0] + 1, FEW.tensors[1]))
    with pytest.raises(ManifestMismatchError, match="task"):
        one(scores, run, task=lambda model, batch: margin(model, batch) * 2)


def test_another_seed_of_the_run_is_accepted(run, scores):
    """How well do the scores of one run predict another?"""
    assert one(scores, changed(run.recipe, seed=1).train(), budget=4).lds[0][1].mean < 1.0


def test_each_number_of_rows_is_left_out_once_and_named_as_the_share_that_it_is(tmp_path):
    """Of 23 rows, 1 and 5 % are one row."""
    small = recipe(mlp, loss, TensorDataset(*vectors(23, 0)), SGD(lr=0.1), batch_size=10).train(tmp_path)
    found = one(unrolled(small, FEW, margin), small, budget=3)
    assert [share for share, _ in found.lds] == [1 / 23, 2 / 23, 12 / 23]
    assert [line[: line.index(" left out")] for line in str(found).splitlines()[1:]] == [
        "4.3%",
        "8.7%",
        "52%",
    ]
    assert "4.3%" in in_a_notebook(found).text
