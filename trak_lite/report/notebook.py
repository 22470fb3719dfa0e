"""Summary of scores for notebooks."""

from __future__ import annotations

from typing import Final

from trak_lite.linalg.topk import TopRows
from trak_lite.report._template import fragment
from trak_lite.report.content import ReportedScores

__all__ = ["notebook_summary"]

_NUM_TARGETS: Final = 5
_K: Final = 3
_MOST_SCORES: Final = 1 << 24
"""Largest number of scores that the summary reads."""


def notebook_summary(scores: ReportedScores) -> str:
    """Return sizes, settings, verdict and the top rows of the first targets as HTML.

    Scores that are many, or not in the store, are not read: their summary has no top rows.

    Raises:
        MissingPackageError: If Jinja2 is not installed.
    """
    num_rows, num_targets = scores.shape
    place = scores.location or "memory"
    top = None
    if scores.stored and num_rows * num_targets <= _MOST_SCORES:
        helpful, harmful = scores.top(_K, sign="helpful"), scores.top(_K, sign="harmful")
        shown = range(min(num_targets, _NUM_TARGETS))
        top = [(target, _listed(helpful, target), _listed(harmful, target)) for target in shown]
    return fragment(
        "summary.html",
        scores=scores,
        settings=[(key, str(value)) for key, value in scores.settings.items() if value is not None],
        top=top,
        place=f"stored in {place}" if scores.stored else f"not stored, computed from the rows in {place}",
    )


def _listed(top: TopRows, target: int) -> str:
    pairs = zip(top.indices[target].tolist(), top.scores[target].tolist(), strict=True)
    return ", ".join(f"{row} ({score:+.2g})" for row, score in pairs)
