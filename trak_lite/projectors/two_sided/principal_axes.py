r"""Principal axes of the inputs and output gradients of matrix parameters, fitted on some batches.

The side matrices of LoGra's PCA initialisation (Choe et al., "What is Your Data Worth to GPT?", arXiv:2405.13954):
the leading eigenvectors of the uncentred covariances :math:`\sum x x^\top` and :math:`\sum g g^\top`.

Shapes: b samples of a block, T positions, a matrix parameter ``(d_out, d_in)``.
Numerics: covariances are summed in float32 (float64 for float64 gradients) where the gradients are, decomposed in
float64 on the CPU, and kept as float32.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trak_lite.core.devices import eigh_of_positive
from trak_lite.core.json_text import parse_json
from trak_lite.core.validate import one_of, positive_int
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.projectors._scratch import sum_dtype
from trak_lite.projectors.random.hash import Stream
from trak_lite.types import Batch, BlockSink, FactoredBlock, GradientBlock, OutputTerms, ParameterShapes

DEFAULT_MAX_SIDE = 16384
"""Longest side of a matrix that is projected on both sides. It includes the layers of language models of up to about
8 billion parameters and excludes their embeddings and heads, whose vocabulary side is longer."""

_FORMAT = "trak_lite.principal_axes.1"
_SUFFIXES = {
    Stream.TWO_SIDED_OUT: ":out",
    Stream.TWO_SIDED_IN: ":in",
}  # in the order of a shape (d_out, d_in)


def matrix_shapes(parameters: ParameterShapes, max_side: int) -> dict[str, tuple[int, int]]:
    """Return ``(d_out, d_in)`` of every parameter that is projected on both sides, in model order.

    These are the non-empty parameters with at least two axes whose sides are at most ``max_side``. All axes but the
    first form the input side, as in the factors of a convolution.

    Example:
        >>> matrix_shapes({"conv": (8, 3, 5, 5), "bias": (8,), "embedding": (50257, 64)}, max_side=16384)
        {'conv': (8, 75)}
    """
    shapes = {name: (shape[0], math.prod(shape[1:])) for name, shape in parameters.items() if len(shape) >= 2}
    return {name: shape for name, shape in shapes.items() if min(shape) > 0 and max(shape) <= max_side}


class GradientStream(Protocol):
    """Protocol of the gradient computers that axes are fitted with."""

    @property
    def parameters(self) -> ParameterShapes:
        """Shapes of the differentiated parameters by canonical name, in model order."""

    def stream_gradients(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass the gradient blocks of a batch to ``sink``."""


@final
class PrincipalAxes:
    """Orthonormal axes per matrix parameter and side, for a :class:`~trak_lite.projectors.TwoSidedProjector`.

    A side with at most k entries has no axes and is not projected.

    Example:
        >>> axes = PrincipalAxes({"w": (2, 1)}, {"w:out": torch.tensor([[0.6], [0.8]])}, k_in=1, k_out=1)
        >>> axes.shapes, axes.axes("w", Stream.TWO_SIDED_OUT).shape
        ({'w': (2, 1)}, torch.Size([2, 1]))
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, int]], columns: Mapping[str, Tensor], *, k_in: int, k_out: int
    ) -> None:
        """Store fitted axes; use :meth:`fit` or :meth:`load` to obtain them.

        Args:
            shapes: ``(d_out, d_in)`` of the matrix parameters by name.
            columns: Axes ``(d_in, k_in)`` under ``"name:in"`` and ``(d_out, k_out)`` under ``"name:out"``, for exactly
                the sides that have more entries than axes.
            k_in: Axes of an input side.
            k_out: Axes of an output side.

        Raises:
            InvalidInputError: If axes are missing, superfluous, of a wrong shape, or not finite.
        """
        self.k_in = positive_int(k_in=k_in)
        self.k_out = positive_int(k_out=k_out)
        self.shapes = {name: (int(d_out), int(d_in)) for name, (d_out, d_in) in shapes.items()}
        expected = _axes_shapes(self.shapes, self.k_in, self.k_out)
        actual = {key: tuple(axes.shape) for key, axes in columns.items()}
        if actual != expected:
            wrong = [key for key in {**expected, **actual} if expected.get(key) != actual.get(key)][:3]
            raise InvalidInputError(
                f"Principal axes {wrong} have shapes {[actual.get(key) for key in wrong]}, expected "
                f"{[expected.get(key) for key in wrong]} (None: no axes). Fit the axes again."
            )
        self._columns = {
            key: torch.empty(axes.shape, dtype=torch.float32, device="cpu").copy_(axes.detach())
            for key, axes in columns.items()
        }
        infinite = [key for key, axes in self._columns.items() if not bool(axes.isfinite().all())]
        if infinite:
            raise InvalidInputError(
                f"Principal axes {infinite[:3]} hold NaN or infinity. Fit the axes again."
            )
        digest = hashlib.sha256(json.dumps(self._header()).encode())
        for key in sorted(self._columns):
            digest.update(key.encode())
            digest.update(self._columns[key].numpy().tobytes())
        self.digest = digest.hexdigest()
        """SHA-256 of the sizes and the bytes of the axes."""

    @classmethod
    def fit(
        cls,
        computer: GradientStream,
        batches: Iterable[Batch],
        *,
        k_in: int,
        k_out: int | None = None,
        max_side: int = DEFAULT_MAX_SIDE,
        covariances: str = "factors",
    ) -> Self:
        r"""Fit axes on the gradients of some batches.

        Memory: ``d^2`` numbers for every side with d > k entries.

        Args:
            computer: Any gradient computer.
            batches: Batches for the computer, on the model's device; a few thousand positions suffice.
            k_in: Axes of an input side.
            k_out: Axes of an output side; ``None`` for ``k_in``.
            max_side: Matrices with a longer side get no axes.
            covariances: ``"factors"`` sums :math:`x x^\top` and :math:`g g^\top` over all positions, and the
                covariances of the gradients for parameters whose gradients are not factored. ``"gradients"`` sums
                :math:`G^\top G` and :math:`G G^\top` over samples for every parameter: the axes do not depend on the
                gradient computer, and positions without a gradient have no effect.

        Raises:
            InvalidInputError: If a parameter has no gradient, or, with ``"factors"``, its gradients are factored in
                one block and dense in another.
            NonFiniteError: If a covariance is not finite.
        """
        shapes = matrix_shapes(computer.parameters, positive_int(max_side=max_side))
        k_in = positive_int(k_in=k_in)
        k_out = k_in if k_out is None else positive_int(k_out=k_out)
        one_of(("factors", "gradients"), covariances=covariances)
        collected = _Covariances(shapes, _axes_shapes(shapes, k_in, k_out), covariances == "factors")
        for batch in batches:
            computer.stream_gradients(batch, collected.add)
        return cls(shapes, collected.axes(), k_in=k_in, k_out=k_out)

    def axes(self, name: str, side: Stream) -> Tensor:
        """Return the float32 axes ``(d, k)`` of one side of a parameter, on the CPU, strongest first."""
        return self._columns[name + _SUFFIXES[side]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the axes atomically to a safetensors file."""
        partial = Path(f"{os.fspath(path)}.partial")
        metadata = {"format": _FORMAT, "sizes": json.dumps(self._header()), "digest": self.digest}
        safetensors.torch.save_file(self._columns, partial, metadata)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load axes that :meth:`save` wrote, bitwise equal.

        Raises:
            InvalidInputError: If the file is missing, unreadable, of another format or modified.
        """
        try:
            with safetensors.safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                columns = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, safetensors.SafetensorError) as error:
            raise InvalidInputError(
                f"Cannot read principal axes from {os.fspath(path)} ({error}). Expected a file that "
                "PrincipalAxes.save wrote; fit the axes again if it is lost."
            ) from error
        if metadata.get("format") != _FORMAT:
            raise InvalidInputError(
                f"{os.fspath(path)} has format {metadata.get('format')!r}, expected {_FORMAT!r}. Pass a file that "
                "PrincipalAxes.save wrote."
            )
        text = metadata.get("sizes", "")
        try:
            sizes = parse_json(text.encode())
            shapes = {name: (int(d_out), int(d_in)) for name, (d_out, d_in) in sizes["shapes"].items()}
            k_in, k_out = int(sizes["k_in"]), int(sizes["k_out"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{os.fspath(path)} does not contain the sizes of its matrices: {text[:80]!r}. Pass a file that "
                "PrincipalAxes.save wrote."
            ) from error
        axes = cls(shapes, columns, k_in=k_in, k_out=k_out)
        if axes.digest != metadata.get("digest"):
            raise InvalidInputError(
                f"The axes in {os.fspath(path)} have the digest {axes.digest}, expected {metadata.get('digest')}: the "
                "file was changed after it was written. Restore it, or fit the axes again."
            )
        return axes

    def _header(self) -> dict[str, Any]:
        shapes = {name: list(self.shapes[name]) for name in sorted(self.shapes)}
        return {"k_in": self.k_in, "k_out": self.k_out, "shapes": shapes}


@final
@dataclass(eq=False)
class _Covariances:
    """Sums the covariances of the sides that need axes."""

    _shapes: Mapping[str, tuple[int, int]]
    _axes_shapes: Mapping[str, tuple[int, int]]
    _from_factors: bool
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _factored: dict[str, bool] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, block: GradientBlock) -> None:
        if block.name not in self._shapes:
            return
        factored = isinstance(block, FactoredBlock) and self._from_factors
        if self._factored.setdefault(block.name, factored) != factored:
            raise InvalidInputError(
                f"The gradients of {block.name!r} came factored in one block and formed in another, and the two have "
                "covariances on different scales. Use batches of one shape, or covariances='gradients'."
            )
        if isinstance(block, FactoredBlock):
            dtype = sum_dtype(block.inputs.dtype, block.output_grads.dtype)
            inputs, output_grads = block.inputs.to(dtype), block.output_grads.to(dtype)
            sides: tuple[tuple[Tensor, Tensor | None], ...] = (output_grads, inputs), (inputs, output_grads)
        else:
            grads = block.dense().reshape(-1, *self._shapes[block.name])
            grads = grads.to(sum_dtype(grads.dtype))
            sides = (grads.transpose(1, 2), None), (grads, None)
        for suffix, (side, other) in zip(_SUFFIXES.values(), sides, strict=True):
            key = block.name + suffix
            if key in self._axes_shapes:
                # G^T G = X^T (O O^T) X: the gradient G = O^T X of a sample is not formed.
                weighted = (
                    side if other is None or self._from_factors else (other @ other.transpose(1, 2)) @ side
                )
                covariance = weighted.flatten(0, 1).T @ side.flatten(0, 1)
                self._sums[key] = covariance if key not in self._sums else self._sums[key] + covariance

    def axes(self) -> dict[str, Tensor]:
        """Return the leading eigenvectors under the keys of the constructor's ``axes_shapes``."""
        missing = [key for key in self._axes_shapes if key not in self._sums]
        if missing:
            raise InvalidInputError(
                f"The batches gave no gradient of {missing[:3]}, so no axes can be fitted. Pass at least one batch, "
                "and a computer with these parameters in grad_wrt."
            )
        return {key: _leading(key, self._sums[key], shape[1]) for key, shape in self._axes_shapes.items()}


def _leading(key: str, covariance: Tensor, count: int) -> Tensor:
    """Return the ``count`` leading eigenvectors as columns, strongest first, each with a positive largest entry."""
    if not bool(covariance.isfinite().all()):
        raise NonFiniteError(
            f"The covariance of {key!r} holds NaN or infinity. Look for a sample whose gradient is not finite; "
            "gradients in float16 overflow easily."
        )
    matrix = covariance.to("cpu", torch.float64)
    vectors = eigh_of_positive((matrix + matrix.T) / 2)[1][:, -count:].flip(1)
    # An eigenvector's sign is arbitrary: make it deterministic.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * largest.sign()).to(torch.float32)


def _axes_shapes(shapes: Mapping[str, tuple[int, int]], k_in: int, k_out: int) -> dict[str, tuple[int, int]]:
    """Return the shape ``(d, k)`` of the axes of every side with more than k entries, by key."""
    counts = dict(zip(_SUFFIXES.values(), (k_out, k_in), strict=True))
    return {
        name + suffix: (size, counts[suffix])
        for name, shape in shapes.items()
        for suffix, size in zip(counts, shape, strict=True)
        if size > counts[suffix]
    }
