"""What notebooks show: the summary of scores and the gallery."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from report_cases import VERDICT, Parsed, drawn_scores
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.errors import InvalidInputError
from trak_lite.methods import GaussNewton
from trak_lite.report import page as page_module


def stored_scores():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    attributor = Attributor(
        torch.nn.Linear(4, 3), "image_classification", None, proj_dim=8, method=GaussNewton(damping=1.0)
    )
    attributor.featurize(data)
    return attributor.score(data, name="itself")


def test_the_summary_shows_settings_verdict_and_the_top_rows_of_the_first_targets() -> None:
    scores = stored_scores()

    page = Parsed(scores._repr_html_())

    first = scores.top(3, target=0)
    listed = ", ".join(f"{i} ({s:+.2g})" for i, s in zip(first.indices, first.scores, strict=True))
    assert "Scores 'itself': 12 train rows x 12 targets" in page.text
    assert f"0{listed}" in page.text
    assert "methodGaussNewton" in page.text
    assert "damping1" in page.text
    assert "Not tested yet" in page.text
    assert page.is_closed


def test_the_summary_reads_no_scores_where_that_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = stored_scores()
    monkeypatch.setattr(page_module, "_SUMMARY_SCORES", 100)

    assert "Top rows: scores.top(k)" in scores._repr_html_()
    assert "Top rows: scores.top(k)" in drawn_scores()._repr_html_()  # not kept: every look computes them


def test_names_are_escaped_in_the_summary() -> None:
    scores = drawn_scores(verdict=VERDICT)
    scores.name, scores.settings["<i>"] = "<script>alert(1)</script>", "</table>"

    page = Parsed(scores._repr_html_())

    assert page.names <= {"div", "style", "h3", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert "'<script>alert(1)</script>'" in page.text
    assert "LDS 0.500 [0.400, 0.600] on 6 subsets" in page.text


def test_a_gallery_shows_rows_in_a_notebook_and_on_a_page(tmp_path: Path) -> None:
    scores = drawn_scores()

    gallery = scores.gallery([2], lambda row: f"text {row};", target_render=lambda t: np.eye(3) * t, k=2)

    rows = [*scores.top(2, target=2).indices, *scores.top(2, target=2, sign="harmful").indices]
    for page in (Parsed(gallery._repr_html_()), Parsed(gallery.save(tmp_path / "gallery.html"))):
        assert [found["data-row"] for found in page.all("li")] == [str(row) for row in rows]
        assert all(f"text {row};" in page.text for row in rows)
        assert len(page.all("img")) == 1
        assert not page.all("script")


def test_a_gallery_without_render_shows_row_numbers() -> None:
    page = Parsed(drawn_scores().gallery([0], k=1)._repr_html_())

    assert len(page.all("li")) == 2
    assert "row " in page.text


def test_a_gallery_of_a_target_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no target 9"):
        drawn_scores().gallery([9])
