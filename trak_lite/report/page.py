"""The report on the scores of a target set: verdict, figures, targets with their top rows, settings, on one page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

from trak_lite._validate import known_names
from trak_lite.evaluation import Verdict
from trak_lite.report._html import Html, cut, tag
from trak_lite.report.content import PairRender, Render, Renders, ReportedScores
from trak_lite.report.document import search_field, written
from trak_lite.report.figures import FIGURES, drawn_figures
from trak_lite.report.gallery import cards
from trak_lite.report.survey import Survey

__all__ = ["settings_table", "verdict_part", "write_report"]

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
    """Write a report on scores as one HTML file that works offline and asks for nothing, and return its path.

    The scores are read once, tile by tile, for the top rows and the histogram; the damping path takes one
    eigendecomposition per checkpoint and segment, of the order of K^3.

    Args:
        scores: What it is about.
        out: The file; one that is there is replaced when the new one is whole.
        train_render: ``train_render(row)`` returns what a train row looks like: an image (array or tensor ``(H, W)``,
            ``(H, W, C)`` or ``(C, H, W)``, or of PIL), text, a mapping of names to values, or ``(token, weight)``
            pairs.
        target_render: The same for targets.
        pair_render: ``pair_render(row, target)`` in place of ``train_render``, where a row looks different for every
            target, such as tokens with their own scores (:func:`~trak_lite.token_scores`).
        title: Heading; ``None`` names the target set.
        targets: Targets to show; ``None`` takes the first 100. They alone are on the page and can be searched.
        k: Rows at either end of a target.
        figures: Which of ``"histogram"``, ``"damping"``, ``"retrained"``, ``"checkpoints"``.

    Raises:
        InvalidInputError: If the path is a folder, a target or figure is unknown, or what a render returned cannot be
            shown.
        NonFiniteError: If a score, a pixel or a token's weight is NaN or infinite.
    """
    names = known_names(figures, FIGURES, what="figures")
    survey = Survey.of(scores, targets, k=k)
    renders = Renders(train_render, target_render, pair_render)
    heading = f"Attribution of {scores.name!r}" if title is None else title
    return written(out, heading, _parts(scores, survey, renders, names), script=True)


def _parts(
    scores: ReportedScores, survey: Survey, renders: Renders, figures: Sequence[str]
) -> Iterator[Html]:
    """Yield the page part by part, so that no more than one target's markup is held."""
    num_rows, num_targets = scores.shape
    yield tag("p", f"{num_rows:,} train rows, {num_targets:,} targets", class_="note")
    links = [tag("a", name.capitalize(), href=f"#{name}") for name in ("targets", "figures", "settings")]
    yield tag("nav", links)
    yield tag("section", tag("h2", "Are these scores true?"), verdict_part(scores.verdict, scores.name))
    yield tag("h2", "Figures", id="figures")
    yield tag("div", drawn_figures(scores, survey.histogram, figures), class_="figures")
    yield tag("h2", "Targets", id="targets")
    yield tag("p", _which(survey, num_targets), class_="note")
    yield tag(
        "p", "Tokens on blue raise the score of their row, tokens on orange lower it.", class_="note legend"
    )
    yield search_field()
    yield from cards(survey, renders)
    yield tag("h2", "Settings", id="settings")
    yield settings_table(scores)


def verdict_part(verdict: Verdict | None, name: str) -> Html:
    """Return what retraining said about scores, or how to ask it."""
    if verdict is None:
        how = f"verify(attributor.scores({name!r}), train_fn, targets) retrains on a few subsets of the rows and says."
        return tag("p", f"Not tested yet. {how}", class_="note verdict")
    first, *rest = str(verdict).split("\n")
    calibrated = rest[len(verdict.baselines) :]
    rows = [
        tag("tr", tag("td", one.name), tag("td", str(one.lds)), tag("td", str(one.lead)))
        for one in verdict.baselines
    ]
    head = tag("thead", tag("tr", [tag("th", text) for text in ("instead", "LDS", "the scores lead by")]))
    return tag(
        "div",
        tag("p", f"LDS {verdict.lds.mean:.3f}", class_="lds"),
        tag("p", first, class_="note"),
        tag("table", head, tag("tbody", rows)),
        [tag("p", line, class_="note") for line in calibrated],
        class_="verdict",
    )


def settings_table(scores: ReportedScores) -> Html:
    """Return how scores were made, what their rows were made with, and where they are."""
    manifest = scores.manifest
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("scores", {**scores.settings, "kept in": scores.location or "memory"}),
        ("rows", manifest.fingerprint),
        ("made with", manifest.made_with),
    )
    lines = [
        tag("tr", tag("th", f"{group}: {key}", scope="row"), tag("td", _value(value)))
        for group, settings in groups
        for key, value in settings.items()
    ]
    return tag("table", tag("tbody", lines), class_="settings")


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return cut(text, _SETTING_LENGTH)


def _which(survey: Survey, num_targets: int) -> str:
    shown = len(survey.targets)
    if shown == num_targets:
        return f"All {num_targets:,} targets."
    return f"{shown:,} of {num_targets:,} targets; others are shown by write_report(..., targets=[...])."
