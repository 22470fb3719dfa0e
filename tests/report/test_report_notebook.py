"""What notebooks show: the summary of scores and the gallery."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from report_cases import VERDICT, Baseline, Calibration, OneRunVerdict, Parsed, drawn_scores, in_a_notebook
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.errors import InvalidInputError
from trak_lite.methods import GaussNewton


@pytest.fixture(scope="module")
def stored_scores():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    model, method = torch.nn.Linear(4, 3), GaussNewton(damping=1.0)
    attributor = Attributor(model, "image_classification", None, proj_dim=8, method=method)
    attributor.featurize(data)
    return attributor.score(data, name="itself")


def test_the_summary_shows_settings_verdict_and_the_top_rows_of_the_first_targets(stored_scores):
    page = in_a_notebook(stored_scores)
    for target in range(5):
        first = stored_scores.top(3, target=target)
        listed = ", ".join(f"{i} ({s:+.2g})" for i, s in zip(first.indices, first.scores, strict=True))
        assert f"{target}{listed}" in page.text
    said = ("Scores 'itself': 12 train rows x 12 targets", "methodGaussNewton", "damping1", "Not tested yet")
    assert [text for text in said if text not in page.text] == []
    assert len(page.all("table")) == 2
    assert page.is_closed
    style = page.inside["style"]  # JupyterLab sets the background of every second row by a more specific rule
    assert ".trak-lite tr { background: none !important; }" in style
    dark = re.findall(r"(\S.*) \{ (?:color-scheme: dark; |\.trak-lite \{ )(--ink: #e6e9ef[^}]*)\}", style)
    assert [colours for _, colours in dark] == [dark[0][1]] * 2


def test_the_summary_reads_no_scores_where_that_is_dear(monkeypatch, stored_scores):
    monkeypatch.setattr("trak_lite.report.page._SUMMARY_SCORES", 143)  # one less than there are
    for scores in (stored_scores, drawn_scores()):  # the second are not kept: every look computes them
        assert "Top rows: scores.top(k)" in in_a_notebook(scores).text
    monkeypatch.setattr("trak_lite.report.page._SUMMARY_SCORES", 144)
    assert "Top rows: scores.top(k)" not in in_a_notebook(stored_scores).text


def test_names_and_settings_are_escaped_and_cut():
    scores = drawn_scores(verdict=VERDICT, num_rows=500, num_targets=400)
    scores.name, scores.settings["<i>"] = "<script>alert(1)</script>", "</table>"
    scores.settings.update({f"setting {i}": "x" * 100_000 for i in range(300)}, **{"y" * 100_000: 1})
    hostile = "</td><script>alert(1)</script>" + "\x1b[2J" + "x" * 5000
    baselines = tuple(Baseline(hostile, VERDICT.lds, VERDICT.lds) for _ in range(50))
    verdict = dataclasses.replace(VERDICT, baselines=baselines)
    escaped = ["'<script>alert(1)</script>'", "LDS 0.500 [0.400, 0.600] on 6 subsets"]
    of_verdict = ["</td><script>alert(1)</script>\\x1b[2Jxxx", "40 more"]
    for one, said, rows in ((scores, escaped, 30), (verdict, of_verdict, 11)):
        page = in_a_notebook(one)
        tags = {"div", "style", "h3", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"}
        assert page.names <= tags
        assert [text for text in said if text not in page.text] == []
        assert "\x1b" not in page.text
        assert len(page.text) < 10_000
        assert len(page.all("tr")) <= rows


def test_a_verdict_is_a_table_and_readable_text():
    page = in_a_notebook(VERDICT)
    assert page.is_closed
    assert page.names == {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert not any(attributes for _, attributes in page.elements)  # the colours are those of the notebook
    assert "gradient dot product, no kernel0.300 [0.200, 0.400]0.200 [0.100, 0.300]" in page.text
    assert "LDS 0.500 [0.400, 0.600] on 6 subsets" in page.text
    assert repr(VERDICT).splitlines() == ["Verdict", *(f"  {line}" for line in str(VERDICT).splitlines())]
    lds, parts = VERDICT.lds, (("0",) * 9, ((0, 6),) * 9, (None,) * 9, (0.1,) * 729)
    calibration = Calibration(True, lds, lds, lds, 3, ("off",), *parts)
    verdict = dataclasses.replace(VERDICT, calibration=calibration)
    assert str(calibration) in in_a_notebook(verdict).text
    assert len(repr(verdict)) < 1000
    without = in_a_notebook(dataclasses.replace(VERDICT, baselines=()))
    assert not without.all("table")
    assert "LDS 0.500 [" in without.text
    verdict = OneRunVerdict(((0.01, lds), (0.5, lds)), 6, 4, 0.99, 0.95, "0")
    page = in_a_notebook(verdict)
    assert page.is_closed
    assert "1%0.500 [0.400, 0.600]50%0.500 [0.400, 0.600]" in page.text
    assert "metasmoothness 0.990" in page.text
    assert repr(verdict).splitlines()[1:] == [f"  {line}" for line in str(verdict).splitlines()]


def test_a_gallery_shows_rows_in_a_notebook_and_on_a_page(tmp_path):
    scores = drawn_scores()
    gallery = scores.gallery([2], lambda row: f"text {row};", target_render=lambda t: np.eye(3) * t, k=2)
    rows = [*scores.top(2, target=2).indices, *scores.top(2, target=2, sign="harmful").indices]
    for page in (in_a_notebook(gallery), Parsed(gallery.save(tmp_path / "gallery.html"))):
        assert page.rows() == rows
        assert all(f"text {row};" in page.text for row in rows)
        assert len(page.all("img")) == 1
        assert not page.all("script")
    page = in_a_notebook(scores.gallery([0], k=1))  # without a render, rows are shown by number
    assert len(page.all("li")) == 2
    assert "row " in page.text
    with pytest.raises(InvalidInputError, match="no target 9"):
        scores.gallery([9])
