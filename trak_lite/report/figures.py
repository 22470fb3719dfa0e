"""Figures of a report, which matplotlib draws: distribution of scores, effect of damping and checkpoints, retraining.

Shapes: N train rows, M targets, C checkpoints, S subsets, L dampings.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import require_packages
from trak_lite.data.datasets import every_nth
from trak_lite.errors import InvalidInputError, MissingStoreError, SingularKernelError, StateError
from trak_lite.evaluation import spearman
from trak_lite.linalg.products import standardised
from trak_lite.report.content import ReportedScores
from trak_lite.report.survey import Histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES: Final = ("histogram", "damping", "retrained", "checkpoints")
"""Names of the figures, in the order of the page."""
_NUM_BARS: Final = 64
_DAMPINGS: Final = (0.01, 0.1, 1.0, 10.0, 100.0)
_RANKED_ROWS: Final = 2000
_RANKED_TARGETS: Final = 16
_MOST_POINTS: Final = 800
_MOST_CHECKPOINTS: Final = 32
_NUMBERED_CELLS: Final = 8

_COLOURS: Final = {
    "#1f6fd1": "var(--high)",
    "#d4620d": "var(--low)",
    "#1c2330": "var(--ink)",
    "#5b6577": "var(--soft)",
    "#d9dde4": "var(--rule)",
}
"""Colours in matplotlib, and the variables of ``style.css`` that replace them in the page."""
_HIGH, _LOW, _INK, _SOFT, _RULE = _COLOURS
_STYLE: Final = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "font.size": 11,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **{f"{axis}tick.color": _RULE for axis in "xy"},
    **{f"{axis}tick.labelcolor": _SOFT for axis in "xy"},
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
}
_TITLE: Final = "title:"
"""Prefix of the gid of an artist. The rest of the gid becomes its ``<title>``, which browsers show on hover."""
_NAMESPACE: Final = "{http://www.w3.org/2000/svg}"
_LOCK: Final = threading.Lock()

_Drawing: TypeAlias = tuple[str, str]
"""SVG and caption."""


def drawn_figures(
    scores: ReportedScores, histogram: Histogram, names: Sequence[str]
) -> Iterator[tuple[str, str | None, str]]:
    """Yield title, SVG and caption of some of ``FIGURES``; where the SVG is ``None``, the caption is the reason."""
    makers: dict[str, tuple[str, Callable[[], _Drawing]]] = {
        "histogram": ("Scores", lambda: _histogram(histogram)),
        "damping": ("Damping path", lambda: _damping(scores)),
        "retrained": ("Prediction and retraining", lambda: _retrained(scores)),
        "checkpoints": ("Agreement of checkpoints", lambda: _checkpoints(scores)),
    }
    for title, make in (makers[name] for name in FIGURES if name in names):
        drawing: tuple[str | None, str]
        try:
            drawing = make()
        except (InvalidInputError, SingularKernelError, StateError) as reason:
            drawing = None, str(reason)
        except MissingStoreError:  # scores outlast them, and a killed drop_checkpoint removes them first
            drawing = None, "The features of the targets are not in the store."
        yield title, *drawing


def chart(plot: Callable[[Axes], None], label: str, below: str, beside: str) -> str:
    """Return what ``plot`` draws as an ``svg`` element of 360 units in width, in the colours of the page.

    The label, for screen readers, differs between the charts of a page. ``below`` and ``beside`` name the axes.
    """
    require_packages("matplotlib", extra="report")
    from matplotlib import style
    from matplotlib.figure import Figure

    file = io.StringIO()
    # matplotlib's settings are global until the context ends. The salt makes identifiers reproducible, and different
    # in every chart of a page.
    with _LOCK, style.context(["default", {**_STYLE, "svg.hashsalt": label}]):
        figure = Figure((5.0, 3.2), frameon=False, layout="constrained")
        axes = figure.add_subplot(xlabel=below)
        axes.set_ylabel(beside, rotation_mode="anchor")
        axes.patch.set_visible(False)
        plot(axes)
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    _adapt(root)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _adapt(element: ElementTree.Element) -> None:
    """Turn an SVG document into a part of a page, in place.

    The policy of the page forbids style attributes and ``url()``: styles become presentation attributes, and clipping,
    which no figure needs, is removed.
    """
    attributes = element.attrib
    element.tag = element.tag.removeprefix(_NAMESPACE)
    element.text, element.tail = (element.text or "").strip(), None
    for style in filter(None, attributes.pop("style", "").split("; ")):
        key, value = style.split(": ", 1)
        if not key.startswith("font"):
            attributes[key] = _COLOURS.get(value, value)
    for key in list(attributes):
        attributes[key.rpartition("}")[2]] = " ".join(attributes.pop(key).split())
    attributes.pop("clip-path", None)
    for child in list(element):
        if child.tag.removeprefix(_NAMESPACE) in ("metadata", "style", "clipPath"):
            element.remove(child)
        else:
            _adapt(child)
    if element.tag == "g" and (name := attributes.pop("id", "")).startswith(_TITLE):
        title = ElementTree.Element("title")
        title.text = name.removeprefix(_TITLE)
        element.insert(0, title)


def _histogram(histogram: Histogram) -> _Drawing:
    counts, edges = histogram.bars(_NUM_BARS)
    width = edges[1] - edges[0] if len(edges) > 1 else max(abs(edges[0]), 1.0)
    some, floor = counts > 0, 0.8  # the axis starts below 1: a bin with one score has a bar

    def plot(axes: Axes) -> None:
        colours = [_LOW if edge < 0 else _HIGH for edge in edges[some]]
        axes.bar(edges[some], counts[some] - floor, 0.95 * width, floor, align="edge", color=colours)
        axes.set(yscale="log", ylim=(floor, 1.3 * counts.max()))
        axes.locator_params(axis="x", nbins=5)
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return (
        chart(plot, f"Histogram of {counts.sum():,} scores", "score", "rows x targets"),
        f"All {counts.sum():,} scores; the axis of counts is logarithmic. Above 0 a train row helps a target, below it "
        "harms.",
    )


def _damping(scores: ReportedScores) -> _Drawing:
    """Draw the rank correlation of the scores with the scores at other dampings."""
    damping = scores.settings.get("damping")  # without a kernel damping_path raises
    dampings = sorted({*_DAMPINGS, *([float(damping)] if damping else [])})
    path = scores.damping_path([*dampings, damping], targets=every_nth(scores.shape[1], _RANKED_TARGETS))
    num_rows = scores.shape[0]
    rows = np.arange(num_rows)[every_nth(num_rows, _RANKED_ROWS)]
    if len(rows) < 2 or damping == 0:
        raise InvalidInputError("Ranks need at least two train rows and a damping above 0.")
    *values, here = path.rows(rows).astype(np.float64)
    rho = np.array([[spearman(a, b) for a, b in zip(at.T, here.T, strict=True)] for at in values])

    def plot(axes: Axes) -> None:
        axes.fill_between(dampings, rho.min(1), rho.max(1), color=_HIGH, alpha=0.18, linewidth=0)
        if damping is not None:
            axes.axvline(damping, color=_LOW, linestyle="--", linewidth=1)
        axes.plot(dampings, rho.mean(1), color=_HIGH, linewidth=2)
        axes.set(xscale="log", ylim=(min(0.0, rho.min()), 1.02))
        axes.locator_params(axis="y", nbins=5)
        axes.xaxis.set_major_formatter("{x:g}")

    named = "the default" if damping is None else f"{damping:g}"
    return (
        chart(plot, "Rank correlation over dampings", "damping", "rank correlation"),
        f"Rank correlation of the scores, whose damping is {named}, with the scores at other dampings, over "
        f"{len(rows):,} train rows: mean and range of {rho.shape[1]} targets. Where the line is flat and near 1, "
        "damping changes the ranking little.",
    )


def _retrained(scores: ReportedScores) -> _Drawing:
    """Draw predicted outputs against the outputs of retrained models, both standardised by target."""
    predictions = scores.predictions
    if predictions is None:
        raise InvalidInputError(
            "There are no outputs of retrained models for these scores. Call trak_lite.verify(scores, train_fn, "
            "targets), which trains on a few subsets and does not repeat finished trainings."
        )
    most = max(1, _MOST_POINTS // len(predictions.summed))
    some = every_nth(predictions.summed.shape[1], most)
    predicted, retrained = (standardised(part[:, some]) for part in predictions)

    def plot(axes: Axes) -> None:
        axes.scatter(predicted, retrained, 20, _HIGH, alpha=0.45, linewidths=0)
        axes.locator_params(nbins=6, integer=True)

    label = "Predicted outputs against outputs of retrained models"
    return (
        chart(plot, label, "predicted by the scores", "retrained"),
        f"Outputs of models retrained on {len(predicted)} random subsets, for {predicted.shape[1]} targets, against "
        "the sums of the scores of the rows in the subsets, in standard deviations of each target.",
    )


def _checkpoints(scores: ReportedScores) -> _Drawing:
    """Draw the rank correlations between the scores of every two checkpoints as cells; few cells have their numbers."""
    count = scores.settings.get("checkpoints", 0)
    if count > _MOST_CHECKPOINTS:
        raise InvalidInputError(
            f"{count} checkpoints are too many to draw (at most {_MOST_CHECKPOINTS}); "
            "scores.checkpoint_agreement() returns their correlations."
        )
    agreement = scores.checkpoint_agreement(max_rows=_RANKED_ROWS, max_targets=_RANKED_TARGETS)
    off: NDArray[Any] = agreement[~np.eye(count, dtype=bool)]
    rows, columns = np.indices(agreement.shape).reshape(2, -1)
    flat = agreement.reshape(-1).tolist()

    def plot(axes: Axes) -> None:
        # numbers stay readable
        colours = [(_HIGH if value >= 0 else _LOW, 0.7 * abs(value)) for value in flat]
        cells = axes.bar(columns, 0.96, 0.96, rows - 0.48, color=colours)
        for cell, row, column, value in zip(cells, rows, columns, flat, strict=True):
            cell.set_gid(f"{_TITLE}checkpoints {row} and {column}: {value:.2f}")
            if count <= _NUMBERED_CELLS:
                axes.text(column, row, f"{value:.2f}", color=_INK, ha="center", va="center")
        ticks = range(count) if count <= _NUMBERED_CELLS else (0, count - 1)
        ends = (-0.5, count - 0.5)
        axes.set(aspect="equal", xlim=ends, ylim=ends[::-1], xticks=ticks, yticks=ticks)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return (
        chart(plot, "Rank correlation between checkpoints", "checkpoint", "checkpoint"),
        f"Rank correlation between the scores of two checkpoints alone; the mean is {off.mean():.2f}. Near 0, the "
        "ranking of train rows is mostly noise.",
    )
