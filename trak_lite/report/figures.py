"""What a report draws of scores: how they are distributed, how far damping and checkpoints matter, how true they are.

Shapes: N train rows, M targets, C checkpoints, S subsets, L dampings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trak_lite.data.datasets import every_nth
from trak_lite.errors import InvalidInputError, SingularKernelError
from trak_lite.evaluation import spearman
from trak_lite.report import _charts
from trak_lite.report._html import Html, tag
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

Figure = tuple[Html, str]
"""A drawing and the sentence below it."""


def drawn_figures(scores: ReportedScores, histogram: Histogram, names: Sequence[str]) -> Iterator[Html]:
    """Yield the figures; one that these scores cannot have says why in its place.

    Args:
        scores: What they are about.
        histogram: Of the scores, from the pass that found the top rows.
        names: Which of ``FIGURES``.
    """
    makers: dict[str, tuple[str, Callable[[], Figure]]] = {
        "histogram": ("Scores", lambda: _histogram(histogram)),
        "damping": ("Damping path", lambda: _damping(scores)),
        "retrained": ("Prediction and retraining", lambda: _retrained(scores)),
        "checkpoints": ("Agreement of checkpoints", lambda: _checkpoints(scores)),
    }
    for name in FIGURES:
        if name in names:
            title, make = makers[name]
            yield _figure(title, make)


def _figure(title: str, make: Callable[[], Figure]) -> Html:
    try:
        drawing, caption = make()
    except (InvalidInputError, SingularKernelError) as reason:  # said to the reader in place of the drawing
        return tag("figure", tag("h3", title), tag("p", f"Not drawn. {reason}", class_="note"))
    return tag("figure", tag("h3", title), drawing, tag("figcaption", caption))


def _histogram(histogram: Histogram) -> Figure:
    counts, edges = histogram.bars(_NUM_BARS)
    total = f"{counts.sum():,}"
    return (
        _charts.bars(counts, edges, label=f"Histogram of {total} scores"),
        f"All {total} scores; the axis of counts is logarithmic. Above 0 a train row helps a target, below it harms.",
    )


def _damping(scores: ReportedScores) -> Figure:
    """Draw the rank correlation of scores at other dampings with those in force."""
    own = scores.settings.get("damping")  # methods without a kernel have none, and path() refuses them
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
        f"Rank correlation of the scores at other dampings with those in force ({own:g}), over {len(rows):,} train "
        f"rows: mean and range of {found.shape[1]} targets. Where it is flat, damping hardly matters.",
    )


def _correlations(one: NDArray[np.float64], other: NDArray[np.float64]) -> list[float]:
    """Return the Spearman correlation of every two columns."""
    return [float(spearman(a, b)) for a, b in zip(one.T, other.T, strict=True)]


def _retrained(scores: ReportedScores) -> Figure:
    """Draw what scores predicted for subsets against what retrained models said, both standardised by target."""
    kept = scores.predictions
    if kept is None:
        raise InvalidInputError(
            "There are no outputs of retrained models beside these scores. Call trak_lite.verify(scores, train_fn, "
            "targets); a few trainings on subsets are enough, and those that were kept are not repeated."
        )
    most = max(1, _MOST_POINTS // len(kept.summed))
    some = every_nth(kept.summed.shape[1], most)
    predicted, retrained = (_standardised(part[:, some]) for part in kept)
    num_subsets, num_targets = predicted.shape
    return (
        _charts.points(predicted, retrained, label="Predicted outputs against those of retrained models"),
        f"Models retrained on {num_subsets} random subsets, {num_targets} targets: their outputs against the sum of "
        "the scores of the rows they were trained on, each target in its own standard deviations.",
    )


def _standardised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return columns of mean 0 and standard deviation 1; constant ones become 0."""
    centred: NDArray[np.float64] = values - values.mean(0)
    deviation = centred.std(0)
    return centred / np.where(deviation > 0, deviation, 1.0)


def _checkpoints(scores: ReportedScores) -> Figure:
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
        f"Rank correlation between what two checkpoints alone would score: {off.mean():.2f} in the mean. Where they "
        "do not agree, the ranking of train rows is mostly noise.",
    )
