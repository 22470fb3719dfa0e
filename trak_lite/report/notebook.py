"""What a notebook shows of scores: a few lines, made from what is known or cheap to read."""

from __future__ import annotations

from typing import Final

from trak_lite.linalg.topk import TopRows
from trak_lite.report._html import Html, tag
from trak_lite.report._look import STYLE
from trak_lite.report.content import ReportedScores
from trak_lite.report.page import verdict_part

__all__ = ["notebook_summary"]

_NUM_TARGETS: Final = 5
_K: Final = 3
_CHEAP: Final = 1 << 24
"""Scores that are read for a summary at most."""


def notebook_summary(scores: ReportedScores) -> Html:
    """Return sizes, settings, verdict, and the top rows of the first targets where reading them is cheap."""
    num_rows, num_targets = scores.shape
    settings = [
        tag("tr", tag("th", key, scope="row"), tag("td", str(value)))
        for key, value in scores.settings.items()
        if value is not None
    ]
    where = scores.location or "memory"
    place = f"kept in {where}" if scores.stored else f"not kept, computed from the rows in {where}"
    return tag(
        "div",
        tag("style", STYLE),
        tag("h3", f"Scores {scores.name!r}: {num_rows:,} train rows x {num_targets:,} targets"),
        verdict_part(scores.verdict, scores.name),
        _top_rows(scores),
        tag("table", tag("tbody", settings)),
        tag("p", place, class_="note"),
        class_="trak-lite",
    )


def _top_rows(scores: ReportedScores) -> Html:
    num_rows, num_targets = scores.shape
    if not scores.stored or num_rows * num_targets > _CHEAP:
        return tag("p", "Top rows: scores.top(k), scores.gallery(targets, render).", class_="note")
    ends = [scores.top(_K, sign="helpful"), scores.top(_K, sign="harmful")]
    head = tag("thead", tag("tr", [tag("th", text) for text in ("target", "most helpful", "most harmful")]))
    lines = [
        tag("tr", tag("th", str(target), scope="row"), [tag("td", _listed(top, target)) for top in ends])
        for target in range(min(num_targets, _NUM_TARGETS))
    ]
    return tag("table", head, tag("tbody", lines))


def _listed(top: TopRows, target: int) -> str:
    pairs = zip(top.indices[target].tolist(), top.scores[target].tolist(), strict=True)
    return ", ".join(f"{row} ({score:+.2g})" for row, score in pairs)
