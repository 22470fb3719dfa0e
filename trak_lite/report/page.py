"""The report on the scores of a target set: verdict, figures, targets with their top rows, settings, on one page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

from trak_lite._validate import known_names
from trak_lite.report._extra import require
from trak_lite.report._template import write_page
from trak_lite.report.content import PairRender, Render, Renders, ReportedScores, cut
from trak_lite.report.figures import FIGURES, drawn_figures
from trak_lite.report.gallery import cards
from trak_lite.report.survey import Survey

__all__ = ["write_report"]

_SETTING_LENGTH: Final = 600


def write_report(
    scores: ReportedScores,
    out: str | PathLike[str],
    *,
    train_render: Render | None = None,
    target_render: Render | None = None,
    pair_render: PairRender | None = None,
    title: str | None = None,
    targets: Sequence[int] | None = None,
    k: int = 5,
    figures: Sequence[str] = FIGURES,
) -> Path:
    """Write a report on scores as one HTML file that makes no requests, and return its path.

    The scores are read once, tile by tile, for the top rows and the histogram. The damping path takes one
    eigendecomposition per checkpoint and segment, of the order of K^3.

    Args:
        scores: Scores of a target set.
        out: Path of the file; an existing file is replaced when the new one is complete.
        train_render: ``train_render(row)`` returns the content of a train row: an image (array or tensor ``(H, W)``,
            ``(H, W, C)`` or ``(C, H, W)``, or a Pillow image), text, a mapping of names to values, or
            ``(token, weight)`` pairs.
        target_render: The same for targets.
        pair_render: ``pair_render(row, target)``, used instead of ``train_render`` if the content of a row depends on
            the target, such as tokens with their scores (:func:`~trak_lite.token_scores`).
        title: Heading; ``None`` names the target set.
        targets: Targets on the page; ``None`` takes the first 100. The search finds no others.
        k: Number of helpful and of harmful rows per target.
        figures: Some of ``"histogram"``, ``"damping"``, ``"retrained"``, ``"checkpoints"``.

    Raises:
        InvalidInputError: If the path is a folder, a target or figure does not exist, or the result of a render cannot
            be displayed.
        NonFiniteError: If a score, a pixel or the weight of a token is NaN or infinite.
        MissingPackageError: If a package of the extra ``report`` is not installed: Jinja2, matplotlib (for figures) or
            Pillow (for images).
    """
    names = known_names(figures, FIGURES, what="figures")
    require("jinja2", *(["matplotlib"] if names else []))  # before the scores are read
    survey = Survey.of(scores, targets, k=k)
    return write_page(
        out,
        "report.html",
        title=f"Attribution of {scores.name!r}" if title is None else title,
        searchable=True,
        scores=scores,
        figures=drawn_figures(scores, survey.histogram, names),
        which=_which(len(survey.targets), scores.shape[1]),
        cards=cards(survey, Renders(train_render, target_render, pair_render)),
        settings=_settings(scores),
    )


def _settings(scores: ReportedScores) -> list[tuple[str, str]]:
    """Return names and values of the settings of the scores and of the features, and the location of the scores."""
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("scores", {**scores.settings, "stored in": scores.location or "memory"}),
        ("rows", scores.manifest.fingerprint),
        ("made with", scores.manifest.made_with),
    )
    return [(f"{group}: {key}", _value(value)) for group, values in groups for key, value in values.items()]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return cut(text, _SETTING_LENGTH)


def _which(shown: int, num_targets: int) -> str:
    if shown == num_targets:
        return f"All {num_targets:,} targets."
    return f"{shown:,} of {num_targets:,} targets. write_report(..., targets=[...]) selects others."
