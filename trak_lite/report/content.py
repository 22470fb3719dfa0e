"""What a row of a dataset looks like: images, text, tokens with weights, tabular rows, as markup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.verdict import Predictions
from trak_lite.linalg.topk import TopRows
from trak_lite.report._html import Html, cut, join, tag
from trak_lite.report._png import as_pixels, data_uri, shrunk
from trak_lite.store import Manifest

__all__ = ["PairRender", "Render", "Renders", "ReportedScores", "rendered"]

Render: TypeAlias = Callable[[int], Any]
"""Returns what a row looks like, from its number: see :func:`rendered`."""
PairRender: TypeAlias = Callable[[int, int], Any]
"""Returns what a train row looks like for one target, from the numbers of both."""

IMAGE_SIDE: Final = 160
"""Pixels that images are shrunk to."""
_SHOWN_SIDE: Final = 96
"""CSS pixels that an image takes."""
_COARSE: Final = 48
"""Images of fewer pixels a side are shown with hard edges."""
TEXT_LENGTH: Final = 1500
_FIELD_LENGTH: Final = 200
_NUM_TOKENS: Final = 400
_NUM_FIELDS: Final = 30
LEVELS: Final = 7
"""Shades of a token's weight."""


class ScoresAtDampings(Protocol):
    """Scores of the same rows and targets at several dampings."""

    def rows(self, indices: NDArray[np.int64], /) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(L, b, M)``."""


class ReportedScores(Protocol):
    """What a report asks of scores of N train rows and M targets; :class:`trak_lite.Scores` gives it."""

    name: str
    """Name of the target set."""
    settings: dict[str, Any]
    """How the scores were made."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``."""

    @property
    def stored(self) -> bool:
        """Whether the matrix of scores is in the store."""

    @property
    def location(self) -> str | None:
        """Path of the store, ``None`` in memory."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the store."""

    @property
    def verdict(self) -> Verdict | None:
        """What retraining said of the scores."""

    @property
    def predictions(self) -> Predictions | None:
        """Outputs of retrained models, and what the scores predicted."""

    def tiles(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield ``(first row, (b, M) scores)`` of all train rows in order."""

    def top(self, k: int, *, sign: Literal["helpful", "harmful"]) -> TopRows:
        """Return the k strongest train rows of every target."""

    def damping_path(self, dampings: Sequence[float], *, targets: slice) -> ScoresAtDampings:
        """Return the scores of some targets at other dampings."""

    def checkpoint_agreement(self, *, max_rows: int, max_targets: int) -> NDArray[np.float64]:
        """Return how alike every two checkpoints rank the train rows, ``(C, C)``."""


@final
@dataclass(frozen=True, slots=True)
class Renders:
    """What shows the rows of the train set and of the targets."""

    train: Render | None = None
    """Shows a train row."""
    target: Render | None = None
    """Shows a target."""
    pair: PairRender | None = None
    """Shows a train row for one target, in place of ``train``."""

    def of_target(self, target: int) -> Html | None:
        """Return a target as markup, ``None`` if there is nothing to show but its number."""
        return None if self.target is None else rendered(self.target(target), f"target {target}")

    def of_row(self, row: int, target: int) -> Html | None:
        """Return a train row as markup, as it is shown below a target."""
        what = f"train row {row}"
        if self.pair is not None:
            return rendered(self.pair(row, target), what)
        return None if self.train is None else rendered(self.train(row), what)


def rendered(content: Any, what: str) -> Html:
    """Return what a render gave as markup.

    Args:
        content: An image (array or tensor ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)``, or of PIL), a string, a mapping
            of names to values (images among them are shown above the others), or ``(token, weight)`` pairs.
        what: How messages and screen readers name it.

    Raises:
        InvalidInputError: If it is none of these.
        NonFiniteError: If a pixel or a weight is NaN or infinite.
    """
    if isinstance(content, str):
        return tag("p", cut(content, TEXT_LENGTH), class_="text", tabindex=0)
    if isinstance(content, Mapping):
        return _fields(content, what)
    image = _image_array(content)
    if image is not None:
        return _image(image, what)
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return _tokens(content, what)
    raise InvalidInputError(
        f"The render of {what} gave a {type(content).__name__}. Expected an image (array, tensor, PIL), a string, a "
        "mapping, or (token, weight) pairs."
    )


def _image_array(content: Any) -> NDArray[Any] | None:
    """Return the array of what is an image, else ``None``."""
    if isinstance(content, Tensor):
        plain = content.detach().cpu()
        return (plain.float() if plain.is_floating_point() else plain).numpy()
    if isinstance(content, np.ndarray):
        return content
    pil = sys.modules.get("PIL.Image")  # whoever passes an image of PIL has imported it
    if pil is not None and isinstance(content, pil.Image):
        return np.asarray(content.convert("RGBA" if "A" in content.getbands() else "RGB"))
    return None


def _image(array: NDArray[Any], what: str) -> Html:
    pixels = shrunk(as_pixels(array, what), IMAGE_SIDE)
    height, width = pixels.shape[:2]
    longest = max(height, width)
    return tag(
        "img",
        src=data_uri(pixels),
        alt=what,
        width=max(1, round(_SHOWN_SIDE * width / longest)),
        height=max(1, round(_SHOWN_SIDE * height / longest)),
        class_="coarse" if longest < _COARSE else None,
    )


def _fields(row: Mapping[Any, Any], what: str) -> Html:
    """Return the fields of a row as a table, below those of them that are images."""
    images, lines = [], []
    for key, value in list(row.items())[:_NUM_FIELDS]:
        name = cut(str(key), _FIELD_LENGTH)
        image = _image_array(value)
        if image is not None and image.ndim >= 2:
            images.append(_image(image, f"{what}: {name}"))
        else:
            lines.append(tag("tr", tag("th", name, scope="row"), tag("td", _value(value))))
    if len(row) > _NUM_FIELDS:
        lines.append(tag("tr", tag("td", f"… ({len(row):,} fields in all)", colspan=2)))
    return join(images, tag("table", tag("tbody", lines), class_="fields") if lines else None)


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else cut(str(value), _FIELD_LENGTH)


def _tokens(pairs: Sequence[Any], what: str) -> Html:
    """Return tokens on a ground that says how much each adds to the score: blue raises it, orange lowers it."""
    tokens, weights = _split_pairs(pairs, what)
    largest = float(np.abs(weights).max(initial=0.0))
    shown = [
        tag("span", cut(token, _FIELD_LENGTH), class_=_shade(weight, largest), title=f"{weight:+.3g}")
        for token, weight in zip(tokens[:_NUM_TOKENS], weights.tolist(), strict=False)
    ]
    rest = None if len(tokens) <= _NUM_TOKENS else f" … ({len(tokens):,} tokens in all)"
    return tag("p", shown, rest, class_="text tokens", tabindex=0)


def _split_pairs(pairs: Sequence[Any], what: str) -> tuple[list[str], NDArray[np.float64]]:
    """Return tokens and their weights."""
    tokens, weights = [], []
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidInputError(
                f"The render of {what} gave a sequence with {pair!r:.80}. Expected (token, weight) pairs: text and a "
                "number."
            )
        tokens.append(pair[0])
        weights.append(float(pair[1]))
    values = np.array(weights)
    if not np.isfinite(values).all():
        raise NonFiniteError(
            f"A token of {what} has a weight that is NaN or infinite. Expected finite numbers."
        )
    return tokens, values


def _shade(weight: float, largest: float) -> str | None:
    """Return the class of a weight, ``"p1"`` to ``"p7"`` or ``"n1"`` to ``"n7"``; none next to 0."""
    level = round(LEVELS * abs(weight) / largest) if largest else 0
    return f"{'p' if weight > 0 else 'n'}{level}" if level else None
