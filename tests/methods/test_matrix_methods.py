"""Mean and Unrolled: what they store is the mean of standardised columns, and the replay of the runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import zscore
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows, verify
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.methods import GaussNewton, GradDot, Mean, Unrolled
from trak_lite.report import write_report
from trak_lite.unrolled import SGD, Recipe, TrainingRun, unrolled

N, M = 40, 6
torch.manual_seed(0)
INPUTS = torch.randn(N + M, 4)
LABELS = (INPUTS[:, 0] > 0).long()
TRAIN, TARGETS = TensorDataset(INPUTS[:N], LABELS[:N]), TensorDataset(INPUTS[N:], LABELS[N:])


def build(seed: int) -> nn.Module:
    del seed
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe(seed: int, data: TensorDataset = TRAIN) -> Recipe:
    return Recipe(build, losses, data, SGD(lr=0.2), batch_size=10, epochs=3, seed=seed)


@pytest.fixture(scope="module")
def runs() -> tuple[TrainingRun, ...]:
    return tuple(recipe(seed).train() for seed in (0, 1, 2))


def attributor(runs: tuple[TrainingRun, ...], path: Path | None = None) -> Attributor:
    made = Attributor(runs[0].model(), "image_classification", path, proj_dim=16)
    made.featurize(TRAIN)
    return made


def test_the_mean_is_that_of_standardised_columns(runs, tmp_path):
    made = attributor(runs, tmp_path / "run.zarr")
    method = Mean(GaussNewton(), GradDot(), Unrolled(*runs), method_weights=(1, 1, 2))
    found = made.score(TARGETS, "t", method=method)
    parts = [made.score(TARGETS, "t", method=one).numpy() for one in method.methods]
    expected = sum(
        w * zscore(part.astype(np.float64)) for w, part in zip((0.25, 0.25, 0.5), parts, strict=True)
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    again = Attributor.open(tmp_path / "run.zarr", runs[0].model()).scores("t", method=method)
    np.testing.assert_array_equal(again.numpy(), found.numpy())
    assert again.stored
    assert (
        found.top(3, target=0).indices.tolist()
        == np.argsort(-found.numpy()[:, 0], kind="stable")[:3].tolist()
    )


def test_constant_columns_count_as_zero():
    one = np.stack([np.arange(5.0), np.ones(5)], 1).astype(np.float32)
    found = Mean(GradDot(), GaussNewton()).combined([one, one])
    np.testing.assert_allclose(found[:, 0], zscore(np.arange(5.0)), rtol=1e-6)
    assert not found[:, 1].any()


def test_unrolled_scores_are_stored_and_verified(runs):
    made = attributor(runs)
    found = made.score(TARGETS, "t", method=Unrolled(*runs))
    single = [unrolled(run, TARGETS, "image_classification").numpy() for run in runs]
    np.testing.assert_allclose(found.numpy(), np.mean(single, 0), rtol=1e-5, atol=1e-9)
    verdict = verify(found, runs[0].recipe.train_fn, TARGETS, budget=4, train_id="recipe")
    assert verdict.num_subsets == 4
    assert found.verdict is not None
    with pytest.raises(StateError, match="not computed from stored rows"):
        found.self_influence()


def logit_gap(model_call, batch):
    logits = model_call(batch[0])
    return logits[:, 0] - 2 * logits[:, 1]


def test_unrolled_scores_of_another_task_are_those_of_its_replay(runs):
    made = attributor(runs)
    found = made.score(TARGETS, "gap", method=Unrolled(runs[0]), task=logit_gap)

    expected = unrolled(runs[0], TARGETS, logit_gap).numpy()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-7)
    assert not np.allclose(found.numpy(), made.score(TARGETS, "t", method=Unrolled(runs[0])).numpy())
    given = {"protocol": "one-run", "budget": 4}
    asked = verify(found, runs[0], TARGETS, **given)
    assert asked.lds == verify(found, runs[0], TARGETS, task=logit_gap, **given).lds
    assert asked.lds != verify(found, runs[0], TARGETS, task="image_classification", **given).lds


def test_standard_errors_are_those_over_runs(runs):
    scores = unrolled(runs, TARGETS, "image_classification")
    single = np.stack([unrolled(run, TARGETS, "image_classification").numpy() for run in runs])
    expected = single.std(0, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(scores.numpy(), single.mean(0), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(scores.standard_error(), expected, rtol=1e-4)
    np.testing.assert_allclose(scores.standard_error(target=2), expected[:, 2], rtol=1e-4)
    top = scores.top(2).indices
    np.testing.assert_allclose(scores.standard_error(top), np.take_along_axis(expected.T, top, 1), rtol=1e-4)


def test_errors_and_metasmoothness_are_stored_with_the_scores_of_an_attributor(runs, tmp_path):
    made = attributor(runs, tmp_path / "run.zarr")
    made.score(TARGETS, "t", method=Unrolled(*runs))
    made.score(TARGETS, "t", method=Unrolled(runs[1]))
    made.score(TARGETS, "t", method=Mean(GradDot(), Unrolled(*runs[1:])))
    single = np.stack([unrolled(run, TARGETS, "image_classification").numpy() for run in runs])
    again = Attributor.open(tmp_path / "run.zarr", runs[0].model())

    mean = again.scores("t", method=Unrolled(*runs))
    np.testing.assert_allclose(
        mean.standard_error(), single.std(0, ddof=1) / np.sqrt(3), rtol=1e-4, atol=1e-9
    )
    smoothness = [round(run.metasmoothness(), 4) for run in runs]
    assert mean.settings["metasmoothness"] == smoothness
    assert f"metasmoothness={smoothness}" in repr(mean)
    one = again.scores("t", method=Unrolled(runs[1]))
    assert one.settings["metasmoothness"] == smoothness[1:2]
    with pytest.raises(StateError, match="not computed from stored rows"):
        one.standard_error()
    both = again.scores("t", method=Mean(GradDot(), Unrolled(*runs[1:])))
    assert both.settings["metasmoothness"] == smoothness[1:]


def test_runs_on_other_rows_are_refused(runs):
    made = attributor(runs)
    reordered = TensorDataset(INPUTS[:N].flip(0), LABELS[:N].flip(0))
    for data in (reordered, TensorDataset(INPUTS[: N - 1], LABELS[: N - 1])):
        with pytest.raises(InvalidInputError, match="trained on other data"):
            made.score(TARGETS, "t", method=Unrolled(recipe(0, data).train()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mean(GradDot()), "two or more methods"),
        (lambda: Mean(GradDot(), "GausNewton"), "must be a name"),
        (lambda: Mean(GradDot(), GaussNewton(), method_weights=(1,)), "one per method"),
        (lambda: Mean(GradDot(), GaussNewton(), method_weights=(0, 0)), "not all zero"),
        (lambda: Unrolled(), "takes finished runs"),
        (lambda: Unrolled("a run"), "takes finished runs"),
    ],
)
def test_wrong_methods_are_refused(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_whole_matrices_have_no_candidates(runs):
    with pytest.raises(InvalidInputError, match="stored whole"):
        attributor(runs).score(TARGETS, "t", method=Mean(GradDot(), GaussNewton()), dense=False)


def test_a_report_shows_what_these_scores_have(runs, tmp_path):
    made = attributor(runs)
    for scores in (
        made.score(TARGETS, "t", method=Mean(GaussNewton(), GradDot())),
        unrolled(runs[0], TARGETS, "image_classification"),
        made.stream_scores(TRAIN, TARGETS, method=GradDot()),
    ):
        page = write_report(scores, tmp_path / "report.html").read_text(encoding="utf-8")
        assert "</html>" in page
        assert "not computed from stored rows" in page
        assert scores.method.name in scores._repr_html_()


def test_whole_matrices_are_not_streamed(runs):
    made = attributor(runs)
    for method in (Unrolled(runs[0]), Mean(GradDot(), GaussNewton())):
        with pytest.raises(InvalidInputError, match="needs stored feature rows"):
            made.stream_scores(TRAIN, TARGETS, method=method)
        with pytest.raises(InvalidInputError, match="stored whole"):
            made.scores("t", method=method, dense=False)


def test_a_name_of_the_rows_must_be_that_of_the_store(runs):
    made = attributor(runs)
    named = recipe(0, Rows(TRAIN, name="digits")).train()
    with pytest.raises(InvalidInputError, match="Give both the same name"):
        made.score(TARGETS, "t", method=Unrolled(named))
