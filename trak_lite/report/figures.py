"""Figures of a report: distribution of the scores, effect of damping and checkpoints, agreement with retraining.

Shapes: N train rows, M targets, C checkpoints, S subsets, L dampings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.data.datasets import every_nth
from trak_lite.errors import InvalidInputError, SingularKernelError
from trak_lite.evaluation import spearman
from trak_lite.report import _charts
from trak_lite.report.content import ReportedScores
from trak_lite.report.survey import Histogram

__all__ = ["FIGURES", "drawn_figures"]

FIGURES: Final = ("histogram", "damping", "retrained", "checkpoints")
"""Names of the figures, in the order of the page."""
_NUM_BARS: Final = 64
_DAMPINGS: Final = (0.01, 0.1, 1.0, 10.0, 100.0)
_RANKED_ROWS: Final = 2000
_RANKED_TARGETS: Final = 16
_MOST_POINTS: Final = 800
_MOST_CHECKPOINTS: Final = 32

Drawing = tuple[str, str]
"""SVG and caption."""


@final
@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the page."""

    title: str
    svg: str | None
    """The drawing as markup, ``None`` if these scores do not have it."""
    caption: str
    """Describes the drawing, or says why there is none."""


def drawn_figures(scores: ReportedScores, histogram: Histogram, names: Sequence[str]) -> Iterator[Figure]:
    """Yield figures in the order of ``FIGURES``.

    Args:
        scores: Scores of a target set.
        histogram: Histogram of the scores.
        names: Names of figures, from ``FIGURES``.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    makers: dict[str, tuple[str, Callable[[], Drawing]]] = {
        "histogram": ("Scores", lambda: _histogram(histogram)),
        "damping": ("Damping path", lambda: _damping(scores)),
        "retrained": ("Prediction and retraining", lambda: _retrained(scores)),
        "checkpoints": ("Agreement of checkpoints", lambda: _checkpoints(scores)),
    }
    for name in FIGURES:
        if name in names:
            title, make = makers[name]
            try:
                figure = Figure(title, *make())
            except (InvalidInputError, SingularKernelError) as reason:
                figure = Figure(title, None, str(reason))
            yield figure


def _histogram(histogram: Histogram) -> Drawing:
    """Draw the histogram of all scores."""
    counts, edges = histogram.bars(_NUM_BARS)
    total = f"{counts.sum():,}"
    return (
        _charts.bars(counts, edges, label=f"Histogram of {total} scores"),
        f"All {total} scores; the axis of counts is logarithmic. Above 0 a train row helps a target, below it harms.",
    )


def _damping(scores: ReportedScores) -> Drawing:
    """Draw the rank correlation of the scores with the scores at other dampings."""
    own = scores.settings.get("damping")  # without a kernel there is none, and damping_path raises
    dampings = sorted({*_DAMPINGS, *([float(own)] if own else [])})
    path = scores.damping_path(dampings, targets=every_nth(scores.shape[1], _RANKED_TARGETS))
    num_rows = scores.shape[0]
    rows = np.arange(num_rows)[every_nth(num_rows, _RANKED_ROWS)]
    if len(rows) < 2 or not own:
        raise InvalidInputError("Ranks need at least two train rows and a damping above 0.")
    values = path.rows(rows).astype(np.float64)
    here = values[dampings.index(float(own))]
    found = np.array([_correlations(at, here) for at in values])
    middle, low, high = found.mean(1), found.min(1), found.max(1)
    return (
        _charts.curve(dampings, middle, low, high, mark=float(own), label="Rank correlation over dampings"),
        f"Rank correlation of the scores, whose damping is {own:g}, with the scores at other dampings, over "
        f"{len(rows):,} train rows: mean and range of {found.shape[1]} targets. Where the line is flat and near 1, "
        "damping changes the ranking little.",
    )


def _correlations(one: NDArray[np.float64], other: NDArray[np.float64]) -> list[float]:
    """Return the Spearman correlation of every two columns."""
    return [float(spearman(a, b)) for a, b in zip(one.T, other.T, strict=True)]


def _retrained(scores: ReportedScores) -> Drawing:
    """Draw predicted outputs against the outputs of retrained models, both standardised by target."""
    predictions = scores.predictions
    if predictions is None:
        raise InvalidInputError(
            "There are no outputs of retrained models for these scores. Call trak_lite.verify(scores, train_fn, "
            "targets), which trains on a few subsets and does not repeat finished trainings."
        )
    most = max(1, _MOST_POINTS // len(predictions.summed))
    some = every_nth(predictions.summed.shape[1], most)
    predicted, retrained = (_standardised(part[:, some]) for part in predictions)
    num_subsets, num_targets = predicted.shape
    return (
        _charts.points(predicted, retrained, label="Predicted outputs against those of retrained models"),
        f"Outputs of models retrained on {num_subsets} random subsets, for {num_targets} targets, against the sums of "
        "the scores of the rows in the subsets, in standard deviations of each target.",
    )


def _standardised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return columns of mean 0 and standard deviation 1; constant ones become 0."""
    centred: NDArray[np.float64] = values - values.mean(0)
    deviation = centred.std(0)
    return centred / np.where(deviation > 0, deviation, 1.0)


def _checkpoints(scores: ReportedScores) -> Drawing:
    """Draw the rank correlations between the scores of every two checkpoints."""
    count = scores.settings["checkpoints"]
    if count > _MOST_CHECKPOINTS:
        raise InvalidInputError(
            f"{count} checkpoints are too many to draw (at most {_MOST_CHECKPOINTS}); "
            "scores.checkpoint_agreement() returns their correlations."
        )
    found = scores.checkpoint_agreement(max_rows=_RANKED_ROWS, max_targets=_RANKED_TARGETS)
    off: NDArray[Any] = found[~np.eye(len(found), dtype=bool)]
    return (
        _charts.matrix(found, label="Rank correlation between checkpoints"),
        f"Rank correlation between the scores of two checkpoints alone; the mean is {off.mean():.2f}. Near 0, the "
        "ranking of train rows is mostly noise.",
    )
