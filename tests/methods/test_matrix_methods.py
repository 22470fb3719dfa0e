"""Mean and Unrolled: what they store is the mean of standardised columns, and the replay of the runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows, verify, verify_run
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.methods import GaussNewton, GradDot, Mean, Unrolled
from trak_lite.report import write_report
from trak_lite.unrolled import SGD, Recipe, TrainingRun, unrolled

N, M, TASK = 20, 6, "image_classification"
torch.manual_seed(0)
INPUTS = torch.randn(N + M, 4)
LABELS = (INPUTS[:, 0] > 0).long()
TRAIN, TARGETS = TensorDataset(INPUTS[:N], LABELS[:N]), TensorDataset(INPUTS[N:], LABELS[N:])


def build(seed: int) -> nn.Module:
    del seed
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe(seed: int, data: TensorDataset = TRAIN) -> Recipe:
    return Recipe(build, losses, data, SGD(lr=0.2), batch_size=10, epochs=1, seed=seed)


@pytest.fixture(scope="module")
def runs() -> tuple[TrainingRun, ...]:
    return tuple(recipe(seed).train() for seed in (0, 1, 2))


@pytest.fixture(scope="module")
def single(runs) -> np.ndarray:
    """Scores of each run."""
    return np.stack([unrolled(run, TARGETS, TASK).numpy() for run in runs])


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory) -> Attributor:
    """Rows of one checkpoint; every test has targets of its own name, but for the replays of ``t``, made once."""
    made = Attributor(runs[0].model(), TASK, tmp_path_factory.mktemp("made") / "run.zarr", proj_dim=16)
    made.featurize(TRAIN)
    return made


def standardised(columns):
    return (columns - columns.mean(0)) / columns.std(0)


def test_the_mean_is_that_of_standardised_columns(runs, made):
    method = Mean(GaussNewton(), GradDot(), Unrolled(*runs), method_weights=(1, 1, 2))
    found = made.score(TARGETS, "t", method=method)
    parts = [made.score(TARGETS, "t", method=one).numpy() for one in method.methods]
    shares = zip((0.25, 0.25, 0.5), parts, strict=True)
    expected = sum(w * standardised(part.astype(np.float64)) for w, part in shares)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    kept = Attributor.open(made.path, runs[0].model()).scores("t", method=method)
    np.testing.assert_array_equal(kept.numpy(), found.numpy())
    assert kept.stored
    order = np.argsort(-found.numpy()[:, 0], kind="stable")
    assert found.top(3, target=0).indices.tolist() == order[:3].tolist()

    one = np.stack([np.arange(5.0), np.ones(5)], 1).astype(np.float32)
    found = Mean(GradDot(), GaussNewton()).combined([one, one])
    np.testing.assert_allclose(found[:, 0], standardised(np.arange(5.0)), rtol=1e-6)
    assert not found[:, 1].any(), "constant columns count as zero"


def logit_gap(model_call, batch):
    logits = model_call(batch[0])
    return logits[:, 0] - 2 * logits[:, 1]


def test_unrolled_scores_are_stored_and_verified_also_of_another_task(runs, single, made):
    found = made.score(TARGETS, "t", method=Unrolled(*runs))
    np.testing.assert_allclose(found.numpy(), single.mean(0), rtol=1e-5, atol=1e-9)
    verdict = verify(found, runs[0].recipe.train_fn, TARGETS, budget=3, train_id="recipe")
    assert verdict.num_subsets == 3
    assert found.verdict is not None

    gap = made.score(TARGETS, "gap", method=Unrolled(runs[0]), task=logit_gap)
    np.testing.assert_allclose(
        gap.numpy(), unrolled(runs[0], TARGETS, logit_gap).numpy(), rtol=1e-5, atol=1e-7
    )
    assert not np.allclose(gap.numpy(), single[0])
    asked = verify_run(gap, runs[0], TARGETS, budget=3)
    assert asked.lds == verify_run(gap, runs[0], TARGETS, task=logit_gap, budget=np.int64(3)).lds
    assert asked.lds != verify_run(gap, runs[0], TARGETS, task=TASK, budget=3).lds


def test_errors_and_metasmoothness_are_those_over_runs_and_stored_with_the_scores(runs, single, made):
    methods = Unrolled(*runs), Unrolled(runs[1]), Mean(GradDot(), Unrolled(*runs[1:]))
    for method in methods:
        made.score(TARGETS, "t", method=method)
    opened = Attributor.open(made.path, runs[0].model())
    mean, one, both = (opened.scores("t", method=method) for method in methods)
    expected = single.std(0, ddof=1) / np.sqrt(3)

    def close(found, wanted):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-9)

    for scores in (mean, unrolled(runs, TARGETS, TASK)):
        close(scores.numpy(), single.mean(0))
        close(scores.standard_error(), expected)
        close(scores.standard_error(target=2), expected[:, 2])
        top = scores.top(2).indices
        close(scores.standard_error(top), np.take_along_axis(expected.T, top, 1))
    smoothness = [round(run.metasmoothness(), 4) for run in runs]
    for scores, own in ((mean, smoothness), (one, smoothness[1:2]), (both, smoothness[1:])):
        assert scores.settings["metasmoothness"] == own
    assert f"metasmoothness={smoothness}" in repr(mean)
    with pytest.raises(
        StateError, match=r"those of Unrolled.*whole matrices: it has no self-influence.*stored rows"
    ):
        one.self_influence()
    with pytest.raises(StateError, match="those of Unrolled"):
        one.standard_error()


def test_runs_on_other_rows_and_uses_that_need_stored_rows_are_refused(runs, made):
    reordered = TensorDataset(INPUTS[:N].flip(0), LABELS[:N].flip(0))
    fewer = TensorDataset(INPUTS[: N - 1], LABELS[: N - 1])
    for said, data in (
        ("trained on other data", reordered),
        ("trained on other data", fewer),
        ("Give both the same name", Rows(TRAIN, name="digits")),
    ):
        with pytest.raises(InvalidInputError, match=said):
            made.score(TARGETS, "t", method=Unrolled(recipe(0, data).train()))
    for method in (Unrolled(runs[0]), Mean(GradDot(), GaussNewton())):
        for said, call in (
            ("needs stored feature rows", lambda m=method: made.stream_scores(TRAIN, TARGETS, method=m)),
            ("stored whole", lambda m=method: made.scores("t", method=m, dense=False)),
            ("stored whole", lambda m=method: made.score(TARGETS, "t", method=m, dense=False)),
        ):
            with pytest.raises(InvalidInputError, match=said):
                call()


@pytest.mark.quick
def test_a_report_shows_what_these_scores_have(runs, made, tmp_path):
    for scores in (
        made.score(TARGETS, "t", method=Mean(GaussNewton(), GradDot())),
        unrolled(runs[0], TARGETS, TASK),
        made.stream_scores(TRAIN, TARGETS, method=GradDot()),
    ):
        page = write_report(scores, tmp_path / "report.html").read_text(encoding="utf-8")
        assert "</html>" in page
        assert any(said in page for said in ("not computed from stored rows", "that multiplies stored rows"))
        assert scores.method.name in scores._repr_html_()
