"""Candidates of stored scores whose scores are computed again, against unprojected scores of all rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import Counting, labelled, random_states
from torch import nn

from trak_lite import Attributor, Refine, Rows
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.methods import CG, EKFAC, GradDot

N, M = 60, 4
TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
METHOD = EKFAC(damping=0.2)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


STATES = random_states(model)


def attributor(path: Path | None = None, **changes: Any) -> Attributor:
    settings = {"proj_dim": 8, "dtype": "float32", "progress": False, **changes}
    return Attributor(model(), "image_classification", path, **settings)


def unprojected() -> np.ndarray:
    return attributor().stream_scores(TRAIN, TARGETS, method=METHOD, checkpoints=STATES).numpy()


@pytest.mark.quick
def test_candidates_have_their_unprojected_scores_and_the_others_none() -> None:
    made = attributor()
    made.featurize(TRAIN, STATES)
    coarse = made.score(TARGETS, dense=False)

    refined = made.score(TARGETS, refine=Refine(candidates=5, method=METHOD))

    expected, found = unprojected(), refined.numpy()
    known = ~np.isnan(found)
    np.testing.assert_allclose(found[known], expected[known], rtol=1e-4, atol=1e-5 * abs(expected).max())
    for sign in ("helpful", "harmful"):
        for target, rows in enumerate(coarse.top(5, sign=sign).indices):
            assert known[rows, target].all()
    assert (known.sum(0) == 10).all()
    for target in range(M):
        order = np.argsort(-np.where(known, expected, -np.inf)[:, target])
        np.testing.assert_array_equal(refined.top(5, target=target).indices, order[:5])
    assert refined.method == METHOD
    assert refined.settings["candidates"] == 5
    with pytest.raises(InvalidInputError, match="larger k"):
        refined.top(6)


@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
def test_all_rows_as_candidates_give_all_unprojected_scores(max_bytes: int) -> None:
    made = attributor()
    made.featurize(TRAIN, STATES)

    refined = made.score(TARGETS, refine=Refine(candidates=1000, method=METHOD, max_bytes=max_bytes))

    expected = unprojected()
    np.testing.assert_allclose(refined.numpy(), expected, rtol=1e-4, atol=1e-5 * abs(expected).max())
    assert refined.top(N + 1).indices.shape == (M, N)


def test_only_the_candidates_are_loaded_and_the_change_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = Counting(TRAIN)
    data = Rows(train, batch_size=4, name="train")
    made = attributor(tmp_path / "store")
    made.featurize(data)
    coarse = made.score(TARGETS, dense=False)
    ends = [coarse.top(3, sign=sign).indices for sign in ("helpful", "harmful")]
    train.loaded.clear()

    with caplog.at_level(logging.INFO, "trak_lite"):
        refined = made.score(TARGETS, refine=Refine(candidates=3, method=GradDot()))

    assert set(train.loaded) <= set(np.concatenate(ends, 1).flatten()) | set(range(8)), (
        "and a few rows compared"
    )
    overlap = np.mean(
        [len(set(a) & set(b)) / 3 for a, b in zip(refined.top(3).indices, ends[0], strict=True)]
    )
    assert refined.settings["top3_overlap"] == pytest.approx(overlap, abs=1e-3)
    assert refined.settings["train_passes"] == pytest.approx(
        len(np.unique(np.concatenate(ends, 1))) / N, abs=1e-3
    )
    assert "most helpful rows before and after agree" in caplog.text
    with pytest.raises(StateError):
        made.scores()  # the scores that found the candidates were not stored


def test_a_process_without_the_train_data_is_refused_with_advice(tmp_path: Path) -> None:
    made = attributor(tmp_path / "store")
    made.featurize(TRAIN)
    again = Attributor.open(tmp_path / "store", model())

    with pytest.raises(
        StateError, match=r"refine computes gradients of the train data.*Call featurize\(train_data"
    ):
        again.score(TARGETS, refine=Refine(candidates=3, method="GradDot"))

    assert again.featurize(TRAIN).rows_written == 0
    assert again.score(TARGETS, refine=Refine(candidates=3, method="GradDot")).shape == (N, M)


def test_invalid_settings_are_refused() -> None:
    made = attributor()
    made.featurize(TRAIN)

    with pytest.raises(InvalidInputError, match="candidates"):
        Refine(candidates=0)
    with pytest.raises(InvalidInputError, match="Leave k out"):
        made.score(TARGETS, k=3, dense=False, refine=Refine())
    assert Refine(method={"name": "EKFAC", "damping": 0.1}) == Refine(method=EKFAC(damping=0.1))


def test_fewer_candidates_after_more_are_fewer() -> None:
    """The store caches the larger result."""
    made = attributor()
    made.featurize(TRAIN, STATES)
    many = made.score(TARGETS, refine=Refine(candidates=8, method=GradDot()))

    few = made.score(TARGETS, refine=Refine(candidates=2, method=GradDot()))

    assert (np.isfinite(many.numpy()).sum(0) > 8).all()
    assert (np.isfinite(few.numpy()).sum(0) == 4).all()
    assert few.top(2).indices.shape == (M, 2)
    assert few._repr_html_()  # shows at most the rows that are known


def test_convergence_is_in_the_order_of_the_checkpoints() -> None:
    made = attributor()
    made.featurize(TRAIN, STATES)
    method = CG(tolerance=1e-4)
    reverse = [*STATES][::-1]

    refined = made.score(TARGETS, "reverse", checkpoints=reverse, refine=Refine(candidates=N, method=method))
    streamed = made.stream_scores(TRAIN, TARGETS, checkpoints=reverse, method=method)

    assert len(refined.convergence) == len(STATES)
    for one, other in zip(refined.convergence, streamed.convergence, strict=True):
        np.testing.assert_array_equal(one.iterations, other.iterations)
