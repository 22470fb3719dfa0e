"""Figures against dense arrays: what is counted, correlated and drawn, and what is said where nothing can be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import Parsed, drawn_scores
from scipy.stats import spearmanr

from trak_lite import Scores
from trak_lite.errors import InvalidInputError
from trak_lite.evaluation.verdict import Predictions
from trak_lite.methods import GaussNewton, GradDot
from trak_lite.report import write_report
from trak_lite.report.figures import FIGURES, drawn_figures
from trak_lite.report.survey import Histogram


def figure(scores: Scores, name: str) -> str:
    histogram = Histogram()
    histogram.add(scores.numpy())
    (found,) = drawn_figures(scores, histogram, [name])
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=9),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([4, 16, 64]),
)
def test_a_histogram_of_parts_counts_every_number_in_its_bin(parts: list[list[float]], most: int) -> None:
    histogram = Histogram()
    for part in parts:
        histogram.add(np.array(part, np.float32))
    values = np.array([value for part in parts for value in part])

    counts, edges = histogram.bars(most)

    assert len(counts) <= most + 1
    assert counts.sum() == len(values)
    if len(values):
        width = edges[1] - edges[0] if len(edges) > 1 else np.inf
        for count, edge in zip(counts, edges, strict=True):
            held = int(((values >= edge) & (values < edge + width)).sum())
            assert len(counts) == 1 or count == held


def test_agreement_of_checkpoints_is_the_rank_correlation_of_their_own_scores() -> None:
    scores = drawn_scores(num_checkpoints=3, method=GaussNewton(damping=1.0))
    own = [
        drawn_scores(num_checkpoints=3, method=GaussNewton(damping=1.0, checkpoint_weights=weights)).numpy()
        for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]

    found = scores.checkpoint_agreement()

    for a in range(3):
        for b in range(3):
            expected = [spearmanr(own[a][:, t], own[b][:, t]).statistic for t in range(4)]
            assert found[a, b] == pytest.approx(np.mean(expected), abs=1e-6)
    off = found[~np.eye(3, dtype=bool)].mean()
    assert f"{off:.2f} in the mean" in figure(scores, "checkpoints")
    assert scores.reliability().agreement.mean() == pytest.approx(off)


def test_agreement_takes_evenly_spaced_rows_and_targets() -> None:
    off = GaussNewton(damping=1.0, q="off")
    scores = drawn_scores(num_checkpoints=2, num_rows=40, num_targets=5, method=off)
    alone = [replace(off, checkpoint_weights=weights) for weights in ((1, 0), (0, 1))]
    own = [
        drawn_scores(num_checkpoints=2, num_targets=5, method=method).numpy()[::4, ::2] for method in alone
    ]

    found = scores.checkpoint_agreement(max_rows=10, max_targets=3)[0, 1]

    assert found == pytest.approx(
        np.mean([spearmanr(own[0][:, t], own[1][:, t]).statistic for t in range(3)])
    )


@pytest.mark.parametrize("arguments", [{"max_rows": 0}, {"max_targets": 0}])
def test_agreement_needs_rows_and_targets(arguments) -> None:
    with pytest.raises(InvalidInputError, match="at least 1, got 0"):
        drawn_scores().checkpoint_agreement(**arguments)


def test_a_path_of_some_targets_is_that_of_the_whole() -> None:
    scores = drawn_scores(num_targets=5)
    whole = scores.damping_path([0.1, 3.0])

    some = scores.damping_path([0.1, 3.0], targets=slice(None, None, 2))

    assert some.shape == (2, 40, 3)
    np.testing.assert_allclose(some.numpy(), whole.numpy()[:, :, ::2], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(some.rows([5, 1]), whole.numpy()[:, [5, 1], ::2], rtol=1e-6)
    np.testing.assert_array_equal(some.top(2).indices, whole.top(2).indices[:, ::2])


def test_the_damping_path_passes_through_the_rank_correlations_with_the_scores_in_force() -> None:
    scores = drawn_scores(method=GaussNewton(damping=0.5))
    dampings = (0.01, 0.1, 0.5, 1.0, 10.0, 100.0)
    others = [drawn_scores(method=GaussNewton(damping=damping)).numpy() for damping in dampings]
    own = scores.numpy()
    expected = [np.mean([spearmanr(at[:, t], own[:, t]).statistic for t in range(4)]) for at in others]

    drawing = figure(scores, "damping")

    (line,) = re.findall(r'<polyline points="([^"]*)"', drawing)
    heights = np.array([float(point.split(",")[1]) for point in line.split()])
    np.testing.assert_allclose((190 - heights) / 180, expected, atol=0.002)
    assert "those in force (0.5)" in drawing


def test_points_are_predictions_and_outputs_in_standard_deviations_of_their_target() -> None:
    generator = np.random.default_rng(0)
    kept = Predictions(generator.normal(size=(6, 3)) * 1e6, generator.normal(size=(6, 3)) + 50)

    drawing = figure(drawn_scores(predictions=kept), "retrained")

    circles = np.array(re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawing), float)
    for axis, values in enumerate(kept):
        standardised = ((values - values.mean(0)) / values.std(0)).reshape(-1)
        assert abs(np.corrcoef(circles[:, axis], standardised)[0, 1]) == pytest.approx(1, abs=1e-5)
    assert np.corrcoef(circles[:, 1], kept.retrained.reshape(-1))[0, 1] < 0  # upwards


def test_bars_hold_all_scores_and_end_where_the_scores_do() -> None:
    scores = drawn_scores()

    drawing = figure(scores, "histogram")

    assert "All 160 scores" in drawing
    assert 'class="low"' in drawing
    assert 'class="high"' in drawing


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("damping", {"method": GradDot()}, "GradDot has no kernel to damp"),
        ("damping", {"method": GaussNewton(damping=0.0)}, "a damping above 0"),
        ("damping", {"num_rows": 1}, "at least two train rows"),
        ("retrained", {}, "no outputs of retrained models"),
        ("checkpoints", {"num_checkpoints": 1}, "at least 2 checkpoints"),
        ("checkpoints", {"num_checkpoints": 33, "num_rows": 4}, "33 checkpoints are too many"),
        (
            "checkpoints",
            {"num_checkpoints": 2, "method": GaussNewton(damping=1.0, checkpoint_weights=(1, -1), q="off")},
            "subtract checkpoints",
        ),
    ],
)
def test_a_figure_that_cannot_be_drawn_says_why_in_its_place(name: str, arguments, reason: str) -> None:
    found = figure(drawn_scores(**arguments), name)

    assert reason in Parsed(found).text
    assert "Not drawn." in found
    assert "<svg" not in found


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_scores_that_are_all_equal_are_reported_like_others(tmp_path: Path, value: float) -> None:
    features = np.zeros((4, 6)) if value == 0 else np.full((4, 6), value)
    scores = drawn_scores(features=features, method=GradDot(q="off"), num_rows=4, num_targets=1)

    page = Parsed(write_report(scores, tmp_path / "r.html"))

    assert page.is_closed
    assert "nan" not in page.text.lower()


def test_only_the_figures_that_are_asked_for_are_drawn(tmp_path: Path) -> None:
    page = Parsed(write_report(drawn_scores(), tmp_path / "r.html", figures=["checkpoints", "histogram"]))

    assert len(page.all("figure")) == 2
    assert len(Parsed(write_report(drawn_scores(), tmp_path / "r.html")).all("figure")) == len(FIGURES)
