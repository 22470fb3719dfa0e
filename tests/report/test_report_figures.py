"""Figures against dense arrays: what is counted, correlated and drawn, and the reason where nothing is drawn."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from late import Late
from report_cases import Histogram, Parsed, drawn_scores, predictions
from tiny_runs import labelled

from trak_lite import Attributor, Scores
from trak_lite.errors import InvalidInputError
from trak_lite.methods import GaussNewton, GradDot
from trak_lite.report import write_report
from trak_lite.store import ZarrFeatureStore

matplotlib = Late("matplotlib")

FIGURES = ("histogram", "damping", "checkpoints", "retrained")


def figure(folder: Path, scores: Scores, name: str) -> tuple[str | None, str]:
    """Return the chart on the page, if there is one, and what is written below."""
    path = write_report(scores, folder / "r.html", figures=[name], targets=[0], k=1)
    page = path.read_text(encoding="utf-8")
    (inside,) = re.findall("<figure.*?</figure>", page, re.S)
    svg = re.search("<svg.*</svg>", inside, re.S)
    return svg and svg[0], Parsed(re.sub("<svg.*</svg>", "", inside, flags=re.S)).text


class Chart:
    """Positions in a chart, with the values that the ticks of its axes give to them."""

    def __init__(self, svg: str) -> None:
        self.root = ElementTree.fromstring(svg)
        ticks = []
        for group in self.root.iter("g"):
            for mark, text in zip(group.findall("g/g/use"), group.findall("g/text"), strict=False):
                value = float(text.text.replace("\u2212", "-").replace(",", ""))
                ticks.append((float(mark.attrib["x"]), float(mark.attrib["y"]), value))
        (left, _), (bottom, _) = (Counter(tick[axis] for tick in ticks).most_common(1)[0] for axis in (0, 1))
        self._x = [(x, value) for x, y, value in ticks if y == bottom and x > left]
        self._y = [(y, value) for x, y, value in ticks if x == left and y <= bottom]

    def values(self, points: np.ndarray, *, log: str = "") -> np.ndarray:
        """Return ``(n, 2)`` positions in the units of the axes; ``log`` names the logarithmic axes."""
        found = np.empty_like(points)
        for axis, (name, ticks) in enumerate((("x", self._x), ("y", self._y))):
            places, values = np.array(ticks).T
            slope, start = np.polyfit(places, np.log10(values) if name in log else values, 1)
            found[:, axis] = slope * points[:, axis] + start
        return found

    def paths(self, **attributes: str) -> list[np.ndarray]:
        """Return the corners of paths with these attributes, ``(n, 2)`` each."""
        return [
            np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.attrib["d"]), float)
            for path in self.root.iter("path")
            if attributes.items() <= path.attrib.items()
        ]

    def marks(self, **attributes: str) -> np.ndarray:
        """Return the positions of marks with these attributes, ``(n, 2)``."""
        found = [use.attrib for use in self.root.iter("use") if attributes.items() <= use.attrib.items()]
        return np.array([(float(use["x"]), float(use["y"])) for use in found])


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
PARTS = st.lists(st.lists(FLOATS, max_size=9), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None)
@given(PARTS, st.sampled_from([4, 16, 64]))
@example([[1.0]], 4)  # an edge of the range
def test_a_histogram_of_parts_counts_every_number_in_its_bin(parts, most):
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


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.mean([*map(reference.spearman, one.T, other.T)]))


def test_agreement_of_checkpoints_is_the_rank_correlation_of_their_own_scores(tmp_path):
    method = GaussNewton(damping=1.0, q="inside")
    scores = drawn_scores(num_checkpoints=3, method=method)
    alone = [replace(method, checkpoint_weights=weights) for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    own = [drawn_scores(num_checkpoints=3, method=one).numpy() for one in alone]
    found = scores.checkpoint_agreement()
    expected = [[rank_correlation(a, b) for b in own] for a in own]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    off = found[~np.eye(3, dtype=bool)].mean()
    svg, caption = figure(tmp_path, scores, "checkpoints")
    assert f"the mean is {off:.2f}" in caption
    cells = Parsed(svg).inside["title"]
    assert all(f"checkpoints {a} and {b}: {found[a, b]:.2f}" in cells for a in range(3) for b in range(3))
    assert scores.reliability().agreement.mean() == pytest.approx(off)


def test_the_scores_of_a_checkpoint_are_ranked_once_for_all_pairs(monkeypatch):
    ranked, sort = [], torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda *given, **more: ranked.append(1) or sort(*given, **more))
    drawn_scores(num_checkpoints=5, method=GaussNewton(damping=1.0)).checkpoint_agreement()
    assert len(ranked) == 5


@pytest.mark.parametrize(
    "at_once", [1 << 24, 40]
)  # scores that are ranked together: those of all targets, or of two
def test_agreement_takes_evenly_spaced_rows_and_targets(at_once, monkeypatch):
    monkeypatch.setattr("trak_lite.scoring.uncertainty._RANKED_VALUES", at_once)
    off = GaussNewton(damping=1.0, q="off")
    shape = {"num_checkpoints": 2, "num_rows": 40, "num_targets": 5}
    alone = [replace(off, checkpoint_weights=weights) for weights in ((1, 0), (0, 1))]
    own = [drawn_scores(method=method, **shape).numpy()[::4, ::2] for method in alone]
    found = drawn_scores(method=off, **shape).checkpoint_agreement(max_rows=10, max_targets=3)
    np.testing.assert_array_equal(found.diagonal(), 1)
    assert found[0, 1] == pytest.approx(rank_correlation(*own))
    for name in ("max_rows", "max_targets"):
        with pytest.raises(InvalidInputError, match="at least 1, got 0"):
            drawn_scores().checkpoint_agreement(**{name: 0})


def test_the_damping_path_passes_through_the_rank_correlations(tmp_path):
    scores = drawn_scores(method=GaussNewton(damping=0.5))
    dampings = (0.01, 0.1, 0.5, 1.0, 10.0, 100.0)
    others = [drawn_scores(method=GaussNewton(damping=damping)).numpy() for damping in dampings]
    svg, caption = figure(tmp_path, scores, "damping")
    chart = Chart(svg)
    (line,) = chart.paths(fill="none", stroke="var(--high)")
    (mark,) = chart.paths(stroke="var(--low)")
    found = chart.values(line, log="x")
    np.testing.assert_allclose(found[:, 0], np.log10(dampings), atol=0.002)
    expected = [rank_correlation(at, scores.numpy()) for at in others]
    np.testing.assert_allclose(found[:, 1], expected, atol=0.002)
    np.testing.assert_allclose(chart.values(mark, log="x")[:, 0], np.log10(0.5), atol=0.002)
    assert "whose damping is 0.5" in caption


def test_points_are_predictions_and_outputs_in_standard_deviations_of_their_target(tmp_path):
    drawn = predictions(3)
    kept = type(drawn)(drawn.summed * 1e6, drawn.retrained + 50)
    chart = Chart(figure(tmp_path, drawn_scores(predictions=kept), "retrained")[0])
    found = chart.values(chart.marks(fill="var(--high)"))
    for axis, values in enumerate(kept):
        standardised = ((values - values.mean(0)) / values.std(0)).reshape(-1)
        np.testing.assert_allclose(found[:, axis], standardised, atol=0.002)


def test_bars_hold_all_scores_and_end_where_the_scores_do(tmp_path):
    scores = drawn_scores(num_rows=1000, num_targets=8)
    svg, caption = figure(tmp_path, scores, "histogram")
    assert "All 8,000 scores" in caption
    histogram = Histogram()
    histogram.add(scores.numpy())
    counts, edges = histogram.bars(64)
    assert {"1", "10", "100", "1,000"} <= set(re.findall(">([^<]+)</text>", svg))
    chart = Chart(svg)
    for colour, side in (("low", edges < 0), ("high", edges >= 0)):
        bars = [chart.values(corners, log="y") for corners in chart.paths(fill=f"var(--{colour})")]
        some = side & (counts > 0)
        assert len(bars) == some.sum() > 0
        np.testing.assert_allclose([bar[:, 1].max() for bar in bars], np.log10(counts[some]), atol=0.002)
        width = edges[1] - edges[0]
        np.testing.assert_allclose([bar[:, 0].min() for bar in bars], edges[some], atol=0.05 * width)


def test_charts_take_their_colours_from_the_page_whatever_the_user_set(tmp_path):
    """The policy of the page forbids styles and ``url()``; fixed colours would not follow the colour scheme."""
    scores = drawn_scores(predictions=predictions())
    for name in FIGURES:
        svg, _ = figure(tmp_path, scores, name)
        attributes = [found for _, found in Parsed(svg).elements]
        colours = {found[key] for found in attributes for key in ("fill", "stroke") if key in found}
        assert colours <= {"none", "var(--high)", "var(--low)", "var(--ink)", "var(--soft)", "var(--rule)"}
        assert not [found for found in attributes if {"style", "clip-path"} & set(found)]
        assert "url(" not in svg
    own = {"axes.facecolor": "red", "axes.grid": True, "svg.fonttype": "path", "font.size": 30}
    with matplotlib.rc_context(own):
        before = dict(matplotlib.rcParams)
        assert figure(tmp_path, scores, name)[0] == svg
        assert dict(matplotlib.rcParams) == before


SIGNED = GaussNewton(damping=1.0, checkpoint_weights=(1, -1), q="off")


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("damping", {"method": GradDot()}, "GradDot has no kernel, so it has no damping"),
        ("damping", {"method": GaussNewton(damping=0.0)}, "a damping above 0"),
        ("damping", {"num_rows": 1}, "at least two train rows"),
        ("retrained", {}, "no outputs of retrained models"),
        ("checkpoints", {"num_checkpoints": 1}, "at least 2 checkpoints"),
        ("checkpoints", {"num_checkpoints": 33, "num_rows": 4}, "33 checkpoints are too many"),
        ("checkpoints", {"num_checkpoints": 2, "method": SIGNED}, "have both signs"),
    ],
)
def test_a_figure_that_cannot_be_drawn_says_why(tmp_path, name, arguments, reason):
    svg, said = figure(tmp_path, drawn_scores(**arguments), name)
    assert svg is None
    assert reason in said


@pytest.mark.parametrize("name", ["damping", "checkpoints"])
def test_finished_scores_whose_targets_have_no_features_are_reported_without_the_figure(tmp_path, name):
    model, path = torch.nn.Linear(4, 3), tmp_path / "a.zarr"
    made = Attributor(model, "image_classification", path, proj_dim=4)
    made.featurize(labelled(12), [torch.nn.Linear(4, 3).state_dict() for _ in range(2)])
    scores = made.score(labelled(3))
    assert figure(tmp_path, scores, name)[0] is not None
    with ZarrFeatureStore.open(path, "r+") as store:
        store.drop_table("targets/targets/ckpt-0")  # what a killed drop_checkpoint leaves
    svg, said = figure(tmp_path, Attributor.open(path, model).scores("targets"), name)
    assert svg is None
    assert "The features of the targets are not in the store." in said


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_scores_that_are_all_equal_are_reported_like_others(tmp_path, value):
    scores = drawn_scores(features=np.full((4, 6), value), method=GradDot(q="off"), num_rows=4, num_targets=1)
    page = Parsed(write_report(scores, tmp_path / "r.html"))
    assert page.is_closed
    assert "nan" not in page.text.lower()
