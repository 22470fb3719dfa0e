"""Content of the rows of a dataset: images (as PNG, by Pillow), text, tokens with weights, tabular rows."""

from __future__ import annotations

import base64
import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, SupportsFloat, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.validate import require_packages
from trak_lite.data.columns import Column
from trak_lite.errors import (
    InvalidInputError,
    MissingPackageError,
    NonFiniteError,
    refuse_machine_failure,
    summary,
)
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.verdict import OneRunVerdict, Predictions
from trak_lite.linalg.topk import TopRows
from trak_lite.store import Manifest

logger = logging.getLogger(__name__)

Render: TypeAlias = Callable[[int], Any]
"""Returns the content of a row from its number; :func:`rendered` lists the types of content."""
PairRender: TypeAlias = Callable[[int, int], Any]
"""Returns the content of a train row for one target, from the numbers of both."""
Content: TypeAlias = dict[str, Any]
"""Values of the macro ``content`` in ``parts.html``."""

LEVELS: Final = 7
"""Shades of the weight of a token, for each sign."""
_TEXT_LENGTH: Final = 1500
_FIELD_LENGTH: Final = 200
_NUM_TOKENS: Final = 400
_NUM_FIELDS: Final = 30
_CHANNELS: Final = (1, 3, 4)
_STORED_SIDE: Final = 160
"""Most pixels of a side in the page."""
_SHOWN_SIDE: Final = 96
"""Longer side in the page, in CSS pixels."""
_COARSE_SIDE: Final = 48
"""Images with fewer pixels are displayed without smoothing."""


class ScoresAtDampings(Protocol):
    """Scores of the same rows and targets at several dampings."""

    def rows(self, indices: NDArray[np.int64], /) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(L, b, M)``."""


class ReportedScores(Protocol):
    """What a report reads of the scores of N train rows and M targets; :class:`trak_lite.Scores` has it."""

    name: str
    """Name of the target set."""
    settings: dict[str, Any]
    """Settings of the scores."""
    location: str | None
    """Path of the store, ``None`` in memory."""
    manifest: Manifest
    """Manifest of the store."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``."""

    @property
    def stored(self) -> bool:
        """Whether the matrix of scores is in the store."""

    @property
    def verdict(self) -> Verdict | None:
        """Agreement of the scores with retraining, ``None`` without ``verify``."""

    @property
    def one_run_verdict(self) -> OneRunVerdict | None:
        """Agreement of the scores with repetitions of one run, ``None`` without ``verify_run``."""

    @property
    def predictions(self) -> Predictions | None:
        """Outputs of retrained models and the outputs that the scores predict, ``None`` without ``verify``."""

    @property
    def columns(self) -> dict[str, Column]:
        """Stored columns of the train rows by name."""

    def tiles(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield ``(first row, (b, M) scores)`` of all train rows in order, or of the tiles with a wanted row."""

    def top(self, k: int, *, sign: Literal["helpful", "harmful"]) -> TopRows:
        """Return the k strongest train rows of every target."""

    def damping_path(self, dampings: Sequence[float | None], *, targets: slice) -> ScoresAtDampings:
        """Return the scores of some targets at other dampings."""

    def checkpoint_agreement(self, *, max_rows: int, max_targets: int) -> NDArray[np.float64]:
        """Return the rank correlations between the scores of every two checkpoints, ``(C, C)``."""


@final
@dataclass(frozen=True, slots=True)
class Renders:
    """Functions that return the content of train rows and targets; without one, a row is its number."""

    train: Render | None = None
    target: Render | None = None
    pair: PairRender | None = None
    """Used for train rows instead of ``train``."""
    _logged: set[type[Exception]] = field(init=False, default_factory=set, compare=False)

    def of_target(self, target: int) -> Content | None:
        """Return the content of a target."""
        return None if self.target is None else self._content(f"target {target}", self.target, target)

    def of_row(self, row: int, target: int) -> Content | None:
        """Return the content of a train row for a target."""
        what = f"train row {row}"
        if self.pair is not None:
            return self._content(what, self.pair, row, target)
        return None if self.train is None else self._content(what, self.train, row)

    def _content(self, what: str, render: Callable[..., Any], *numbers: int) -> Content:
        """Return what a render gives; if it cannot be shown, the error as text. The first of each type is logged."""
        try:
            return rendered(render(*numbers), what)
        except MissingPackageError:
            raise
        except Exception as error:  # the user's function may raise any
            refuse_machine_failure(error)
            said = f"{what} cannot be shown: {summary(error)}"
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.warning(said)
            return rendered(said, what)


def rendered(content: Any, what: str) -> Content:
    """Return the result of a render as values of the template.

    Args:
        content: An image (array or tensor ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)``, or a Pillow image), a string, a
            mapping of names to values (images are displayed above the other values), or ``(token, weight)`` pairs.
        what: Name of the row in messages and alternative texts.

    Raises:
        InvalidInputError: If it has another type.
        NonFiniteError: If a pixel or a weight is NaN or infinite.
        MissingPackageError: If it has an image and Pillow is not installed.
    """
    if isinstance(content, str):
        return {"text": cut(content, _TEXT_LENGTH)}
    if isinstance(content, Mapping):
        return _fields(content, what)
    array = _image_array(content)
    if array is not None:
        return {"images": [_encoded(array, what)]}
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return _tokens(content, what)
    raise InvalidInputError(
        f"The render of {what} gave a {type(content).__name__}. Expected an image (array, tensor, PIL), a string, a "
        "mapping, or (token, weight) pairs."
    )


def cut(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text, followed by its length if some are left out.

    Example:
        >>> cut("abcdef", 3)
        'abc … (6 characters in all)'
    """
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters in all)"


def _fields(row: Mapping[Any, Any], what: str) -> Content:
    images, fields = [], []
    for key, value in list(row.items())[:_NUM_FIELDS]:
        name = cut(str(key), _FIELD_LENGTH)
        array = _image_array(value)
        if array is not None and array.ndim >= 2:
            images.append(_encoded(array, f"{what}: {name}"))
        else:
            real = isinstance(value, float | np.floating)
            fields.append((name, f"{value:.6g}" if real else cut(str(value), _FIELD_LENGTH)))
    rest = f"… ({len(row):,} fields in all)" if len(row) > _NUM_FIELDS else ""
    return {"images": images, "fields": fields, "rest": rest}


def _tokens(pairs: Sequence[Any], what: str) -> Content:
    """Return tokens, shaded by the sign of their weight and its share of the largest one."""
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], SupportsFloat)):
            raise InvalidInputError(
                f"The render of {what} gave a sequence with {pair!r:.80}. Expected (token, weight) pairs: text and a "
                "number."
            )
    weights = np.array([float(weight) for _, weight in pairs])
    if not np.isfinite(weights).all():
        raise NonFiniteError(
            f"A token of {what} has a weight that is NaN or infinite. Expected finite numbers."
        )
    largest = float(np.abs(weights).max(initial=0.0))
    tokens = []
    for (text, _), weight in zip(pairs[:_NUM_TOKENS], weights.tolist(), strict=False):
        level = round(LEVELS * abs(weight) / largest) if largest else 0
        # class of the background: p1 to p7, n1 to n7
        shade = f"{'p' if weight > 0 else 'n'}{level}" if level else None
        tokens.append((cut(text, _FIELD_LENGTH), f"{weight:+.3g}", shade))
    rest = f"… ({len(pairs):,} tokens in all)" if len(pairs) > _NUM_TOKENS else ""
    return {"tokens": tokens, "rest": rest}


def _image_array(content: Any) -> NDArray[Any] | None:
    """Return the array of a tensor, an array or a Pillow image, ``None`` for other content."""
    if isinstance(content, Tensor):
        plain = content.detach().cpu()
        return (plain.float() if plain.is_floating_point() else plain).numpy()
    if isinstance(content, np.ndarray):
        return content
    pillow = sys.modules.get("PIL.Image")  # a Pillow image exists only if Pillow is imported
    if pillow is not None and isinstance(content, pillow.Image):
        return np.asarray(content.convert("RGBA" if "A" in content.getbands() else "RGB"))
    return None


def _encoded(array: NDArray[Any], what: str) -> dict[str, Any]:
    """Return an image as the attributes of an ``img`` element, reduced to means over blocks of pixels if it is large.

    uint8 stays as it is, booleans become black and white. Other values are scaled from [0, 1] if all lie there, from
    [0, 255] if they are integers that lie there, and from their own range otherwise (normalised inputs).
    """
    require_packages("PIL", extra="report")
    from PIL.Image import fromarray

    image = fromarray(_bytes_of(_channels_last(array, what), what))
    step = -(-max(image.size) // _STORED_SIDE)
    if step > 1:
        image = image.reduce(step)
    file = io.BytesIO()
    image.save(file, "png", optimize=True)
    longest = max(image.size)
    width, height = (max(1, round(_SHOWN_SIDE * side / longest)) for side in image.size)
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
    return {"src": uri, "alt": what, "width": width, "height": height, "coarse": longest < _COARSE_SIDE}


def _channels_last(array: NDArray[Any], what: str) -> NDArray[Any]:
    """Return an image as ``(H, W)`` for one channel, else ``(H, W, C)``."""
    image = array
    if array.ndim == 3 and array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS:
        image = np.moveaxis(array, 0, 2)
    if not array.size or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in _CHANNELS):
        raise InvalidInputError(
            f"The image of {what} has shape {array.shape}. Expected (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 "
            "channels."
        )
    return image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image


def _bytes_of(image: NDArray[Any], what: str) -> NDArray[np.uint8]:
    """Return an image as contiguous uint8."""
    if image.dtype.kind not in "buif":
        raise InvalidInputError(f"The image of {what} has dtype {image.dtype}. Expected real numbers.")
    if image.dtype == np.uint8:
        return np.ascontiguousarray(image)
    values = image.astype(np.float64)
    if not np.isfinite(values).all():
        raise NonFiniteError(
            f"The image of {what} has a value that is NaN or infinite. Replace it in render."
        )
    low, high = float(values.min()), float(values.max())
    if image.dtype.kind in "ui" and low >= 0 and 1 < high <= 255:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scale = 255.0 / (high - low) if high > low else 0.0
    return np.rint((values - low) * scale).astype(np.uint8, order="C")
