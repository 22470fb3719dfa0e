"""Four small charts as inline SVG, which takes its colours from the page: light or dark.

Each function returns markup; lengths are in the units of a 360 x 230 view, which is the size at 400 px.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trak_lite.report._html import Html, tag

__all__ = ["bars", "curve", "matrix", "points"]

_WIDTH, _HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 350, 10, 190
_NUMBERED_CELLS: Final = 8

Array = NDArray[np.floating[Any]]


def bars(counts: NDArray[np.int64], edges: Array, *, label: str) -> Html:
    """Return a histogram with a logarithmic axis of counts; bars below 0 and above 0 differ in colour."""
    width = edges[1] - edges[0] if len(edges) > 1 else max(abs(edges[0]), 1.0)
    x = _axis(float(edges[0]), float(edges[-1] + width), _LEFT, _RIGHT)
    top = float(np.log10(counts.max()) + 0.1)
    heights = np.where(counts > 0, np.log10(np.maximum(counts, 1)) + 0.1, 0.0)
    y = _axis(0.0, top, _BOTTOM, _TOP)
    parts = [
        tag(
            "rect",
            x=_n(x(edge)),
            y=_n(y(height)),
            width=_n(max(x(edge + width) - x(edge) - 0.5, 0.5)),
            height=_n(_BOTTOM - y(height)),
            class_="low" if edge < 0 else "high",
        )
        for edge, height in zip(edges.tolist(), heights.tolist(), strict=True)
        if height
    ]
    powers = range(int(np.log10(counts.max())) + 1)
    step = max(1, len(powers) // 5)
    parts += [_left_tick(y(power + 0.1), f"{10**power:,}") for power in powers[::step]]
    ends = (float(edges[0]), float(edges[-1] + width))
    ticks = sorted({ends[0], ends[1], *([0.0] if ends[0] < 0 < ends[1] else [])})
    parts += [_bottom_tick(x(value), f"{value:.2g}", place) for value, place in _placed(ticks)]
    return _drawing(parts, label, "score", "rows x targets")


def curve(
    x_values: Sequence[float], middle: Array, low: Array, high: Array, *, mark: float, label: str
) -> Html:
    """Return a line in a band over a logarithmic axis, with one place marked; the other axis ends at 1."""
    places = np.log10(x_values)
    bottom = min(0.0, float(low.min()))
    x = _axis(float(places[0]), float(places[-1]), _LEFT + 8, _RIGHT - 8)
    y = _axis(bottom, 1.0, _BOTTOM, _TOP)
    band = [*zip(places, high, strict=True), *reversed(list(zip(places, low, strict=True)))]
    here = _n(x(float(np.log10(mark))))
    parts = [
        tag("polygon", points=_path(band, x, y), class_="band"),
        tag("polyline", points=_path(list(zip(places, middle, strict=True)), x, y), class_="line"),
        tag("line", x1=here, x2=here, y1=_TOP, y2=_BOTTOM, class_="mark"),
        *(_left_tick(y(value), f"{value:.1f}") for value in sorted({round(bottom, 1), 0.0, 0.5, 1.0})),
        *(_bottom_tick(x(place), f"{10**place:g}", "middle") for place in places.tolist()),
    ]
    return _drawing(parts, label, "damping", "rank correlation")


def points(x_values: Array, y_values: Array, *, label: str) -> Html:
    """Return a scatter plot of two arrays of one shape."""
    x = _axis(*_extent(x_values), _LEFT + 6, _RIGHT - 6)
    y = _axis(*_extent(y_values), _BOTTOM - 6, _TOP + 6)
    pairs = zip(x_values.reshape(-1).tolist(), y_values.reshape(-1).tolist(), strict=True)
    parts = [tag("circle", cx=_n(x(a)), cy=_n(y(b)), r=2, class_="dot") for a, b in pairs]
    for value in _whole_numbers(x_values):
        parts.append(_bottom_tick(x(value), f"{value:g}", "middle"))
    for value in _whole_numbers(y_values):
        parts.append(_left_tick(y(value), f"{value:g}"))
    return _drawing(parts, label, "predicted by the scores", "retrained")


def matrix(values: Array, *, label: str) -> Html:
    """Return a square of cells between -1 and 1, darker where nearer to either; few cells bear their numbers."""
    count = len(values)
    side = (_BOTTOM - _TOP) / count
    left = (_WIDTH - side * count) / 2
    parts = []
    for row, column in np.ndindex(values.shape):
        value = float(values[row, column])
        x, y = left + column * side, _TOP + row * side
        parts.append(
            tag(
                "rect",
                tag("title", f"checkpoints {row} and {column}: {value:.2f}"),
                x=_n(x),
                y=_n(y),
                width=_n(side - 1),
                height=_n(side - 1),
                fill_opacity=f"{abs(value):.2f}",
                class_="high" if value >= 0 else "low",
            )
        )
        if count <= _NUMBERED_CELLS:
            parts.append(_text(x + side / 2, y + side / 2 + 4, f"{value:.2f}", "middle", class_="on"))
    for place in range(count) if count <= _NUMBERED_CELLS else (0, count - 1):
        parts.append(_text(left + (place + 0.5) * side, _BOTTOM + 14, str(place), "middle"))
        parts.append(_text(left - 6, _TOP + (place + 0.5) * side + 4, str(place), "end"))
    return _drawing(parts, label, "checkpoint", "checkpoint", framed=False)


def _axis(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """Return the map of ``low`` to ``start`` and ``high`` to ``stop``."""
    scale = (stop - start) / (high - low) if high > low else 0.0
    return lambda value: start + (value - low) * scale


def _extent(values: Array) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _whole_numbers(values: Array) -> list[float]:
    """Return a few whole numbers within the range of values."""
    low, high = _extent(values)
    found = [float(value) for value in range(math.ceil(low), math.floor(high) + 1)]
    return found[:: max(1, len(found) // 5)]


def _placed(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Return ticks with how their texts stand: the outer ones stay inside the drawing."""
    anchors = ["start", *["middle"] * (len(ticks) - 2), "end"]
    return list(zip(ticks, anchors, strict=True))


def _drawing(parts: Sequence[Html], label: str, below: str, beside: str, *, framed: bool = True) -> Html:
    """Return the whole drawing with its axes and their names."""
    middle = (_TOP + _BOTTOM) / 2
    frame = (
        tag("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="axis"),
        tag("line", x1=_LEFT, x2=_LEFT, y1=_TOP, y2=_BOTTOM, class_="axis"),
    )
    return tag(
        "svg",
        frame if framed else None,
        parts,
        _text((_LEFT + _RIGHT) / 2, _BOTTOM + 34, below, "middle", class_="name"),
        tag(
            "text",
            beside,
            transform=f"translate(12 {_n(middle)}) rotate(-90)",
            text_anchor="middle",
            class_="name",
        ),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=label,
    )


def _left_tick(y: float, text: str) -> Html:
    return _text(_LEFT - 5, y + 4, text, "end")


def _bottom_tick(x: float, text: str, anchor: str) -> Html:
    return _text(x, _BOTTOM + 16, text, anchor)


def _text(x: float, y: float, text: str, anchor: str, class_: str | None = None) -> Html:
    return tag("text", text, x=_n(x), y=_n(y), text_anchor=anchor, class_=class_)


def _path(pairs: Sequence[tuple[Any, Any]], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    return " ".join(f"{_n(x(float(a)))},{_n(y(float(b)))}" for a, b in pairs)


def _n(value: float) -> str:
    """Return a length in few characters."""
    return f"{value:.1f}".removesuffix(".0")
