"""Charts as inline SVG; matplotlib draws them, the page gives them its light or dark colours."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from trak_lite.report._extra import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bars", "curve", "matrix", "points"]

Array = NDArray[np.floating[Any]]

_COLOURS: Final = {
    "#1f6fd1": "var(--high)",
    "#d4620d": "var(--low)",
    "#1c2330": "var(--ink)",
    "#5b6577": "var(--soft)",
    "#d9dde4": "var(--rule)",
}
"""Colours of the drawing, and the variables of ``style.css`` that replace them."""
_HIGH, _LOW, _INK, _SOFT, _RULE = _COLOURS
_STYLE: Final = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 11,
    "axes.labelcolor": _SOFT,
    "axes.edgecolor": _RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _SOFT,
    "ytick.labelcolor": _SOFT,
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
}
_SIZE: Final = (5.0, 3.2)
"""Inches of 72 units; 360 units are the width of a chart on a screen of 400 px."""
_FULL: Final = 0.7
"""Opacity of a cell of value 1 or -1; the number in it stays readable."""
_NUMBERED_CELLS: Final = 8
_TITLE: Final = "title:"
"""Prefix of the identifier of an artist whose ``<title>`` is the rest of it."""
_NAMESPACE: Final = "{http://www.w3.org/2000/svg}"
_LINK: Final = "{http://www.w3.org/1999/xlink}"
_DECIMALS: Final = re.compile(r"-?\d+\.\d{3,}")
_LOCK: Final = threading.Lock()


def bars(counts: NDArray[np.int64], edges: Array, *, label: str) -> str:
    """Return a histogram with a logarithmic axis of counts; bars below 0 and above 0 differ in colour.

    Args:
        counts: ``(b,)``.
        edges: Left edges of the bins, ``(b,)``.
        label: Description for screen readers.
    """
    width = edges[1] - edges[0] if len(edges) > 1 else max(abs(edges[0]), 1.0)
    some = counts > 0
    floor = 0.8  # below 1, so that a count of 1 has a bar

    def plot(axes: Axes) -> None:
        colours = [_LOW if edge < 0 else _HIGH for edge in edges[some]]
        axes.bar(edges[some], counts[some] - floor, 0.95 * width, floor, align="edge", color=colours)
        axes.set_yscale("log")
        axes.set_ylim(floor, 1.3 * float(counts.max()))
        axes.locator_params(axis="x", nbins=5)
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return _svg(plot, label, "score", "rows x targets")


def curve(
    x_values: Sequence[float], middle: Array, low: Array, high: Array, *, mark: float, label: str
) -> str:
    """Return a line in a band over a logarithmic axis; the other axis ends at 1.

    Args:
        x_values: Positive numbers in ascending order, L of them.
        middle: The line, ``(L,)``.
        low: Lower edge of the band, ``(L,)``.
        high: Upper edge of the band, ``(L,)``.
        mark: Position of a vertical line.
        label: Description for screen readers.
    """

    def plot(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.fill_between(x_values, low, high, color=_HIGH, alpha=0.18, linewidth=0)
        axes.axvline(mark, color=_LOW, linestyle="--", linewidth=1)
        axes.plot(x_values, middle, color=_HIGH, linewidth=2)
        axes.set_ylim(min(0.0, float(low.min())), 1.02)
        axes.locator_params(axis="y", nbins=5)
        axes.xaxis.set_major_formatter("{x:g}")

    return _svg(plot, label, "damping", "rank correlation")


def points(x_values: Array, y_values: Array, *, label: str) -> str:
    """Return a scatter plot of two arrays of one shape; ``label`` describes it for screen readers."""

    def plot(axes: Axes) -> None:
        axes.scatter(x_values, y_values, 14, _HIGH, alpha=0.45, linewidths=0)
        axes.locator_params(nbins=6, integer=True)

    return _svg(plot, label, "predicted by the scores", "retrained")


def matrix(values: Array, *, label: str) -> str:
    """Return a ``(C, C)`` matrix of numbers from -1 to 1 as cells, darker where farther from 0.

    A title of each cell has its number, which is also written into the cells of a small matrix.
    """
    count = len(values)
    rows, columns = np.indices(values.shape).reshape(2, -1)
    flat = values.reshape(-1).tolist()
    shown = range(count) if count <= _NUMBERED_CELLS else (0, count - 1)

    def plot(axes: Axes) -> None:
        colours = [(_HIGH if value >= 0 else _LOW, _FULL * abs(value)) for value in flat]
        cells = axes.bar(columns, 0.96, 0.96, rows - 0.48, color=colours)
        for cell, row, column, value in zip(cells, rows, columns, flat, strict=True):
            cell.set_gid(f"{_TITLE}checkpoints {row} and {column}: {value:.2f}")
            if count <= _NUMBERED_CELLS:
                axes.text(column, row, f"{value:.2f}", color=_INK, ha="center", va="center")
        axes.set(
            aspect="equal", xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), xticks=shown, yticks=shown
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return _svg(plot, label, "checkpoint", "checkpoint")


def _svg(plot: Callable[[Axes], None], label: str, below: str, beside: str) -> str:
    """Return what ``plot`` draws as an ``svg`` element for a page.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    require("matplotlib")
    from matplotlib import style
    from matplotlib.figure import Figure

    file = io.StringIO()
    # Identifiers are hashes of the salt and the contents: the label as salt makes them differ between the charts of a
    # page. The styles are global in matplotlib until the context ends.
    with _LOCK, style.context(["default", {**_STYLE, "svg.hashsalt": label}]):
        figure = Figure(_SIZE, frameon=False, layout="constrained")
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
    """Turn an SVG file into a part of a page, in place.

    The policy of the page forbids style attributes and ``url()``: styles become presentation attributes, and clipping,
    which no chart needs, is removed.
    """
    attributes = element.attrib
    element.tag = element.tag.removeprefix(_NAMESPACE)
    element.text, element.tail = (element.text or "").strip(), None
    for style in filter(None, attributes.pop("style", "").split("; ")):
        key, value = style.split(": ", 1)
        if key not in ("font-family", "font-size"):
            attributes[key] = _COLOURS.get(value, value)
    for key in list(attributes):
        value = " ".join(attributes.pop(key).split())
        attributes[key.removeprefix(_LINK)] = _DECIMALS.sub(lambda found: f"{float(found[0]):.2f}", value)
    attributes.pop("clip-path", None)
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    for child in list(element):
        if child.tag.removeprefix(_NAMESPACE) in ("metadata", "style", "clipPath"):
            element.remove(child)
        else:
            _adapt(child)
    if element.tag == "g" and (name := attributes.pop("id", "")).startswith(_TITLE):
        title = ElementTree.Element("title")
        title.text = name.removeprefix(_TITLE)
        element.insert(0, title)
