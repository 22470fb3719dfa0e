r"""Two-sided projection: each matrix gradient G becomes :math:`P_{out} G P_{in}^\top`, without forming G.

The projection of LoGra (Choe et al., "What is Your Data Worth to GPT?", arXiv:2405.13954): a Kronecker
product of two small matrices per parameter, applied to the factors :math:`G = \sum_t g_t x_t^\top` that a backward pass
provides. It costs ``2T(d_in k_in + d_out k_out + k_in k_out)`` flops per sample. At equal width its inner products are
noisier than those of a joint sketch: use it if gradients are too large to form.

Shapes: B samples, b of a block, T positions, a matrix parameter ``(d_out, d_in)``, its features ``(k_out, k_in)``.
Numerics: float64 gradients are projected in float64, all others in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from trak_lite.core.validate import integer, one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import (
    AbstractProjector,
    Accumulator,
    check_block,
    sample_pieces,
    side_by_side,
)
from trak_lite.projectors._scratch import FeatureRows, empty_buffer, sum_dtype
from trak_lite.projectors.random.hash import (
    AbstractEntries,
    GaussianEntries,
    RademacherEntries,
    Stream,
    parameter_key,
)
from trak_lite.projectors.sketch.countsketch import CountSketchProjector
from trak_lite.projectors.two_sided.principal_axes import DEFAULT_MAX_SIDE, PrincipalAxes, matrix_shapes
from trak_lite.types import FactoredBlock, FeatureLayout, GradientBlock, ParameterShapes

_RANDOM: dict[str, type[AbstractEntries]] = {
    entries.kind: entries for entries in (RademacherEntries, GaussianEntries)
}
"""Distributions of random side matrices by name."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter that is projected from two sides, and the columns of its features."""

    name: str
    d_out: int
    d_in: int
    k_out: int
    k_in: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.k_out * self.k_in

    def width(self, side: Stream) -> int:
        return self.k_in if side == Stream.TWO_SIDED_IN else self.k_out


@final
class TwoSidedProjector(AbstractProjector):
    r"""Projects every matrix gradient G to ``k_out x k_in`` numbers :math:`P_{out} G P_{in}^\top`.

    Parameters with at least two axes are treated as matrices ``(d_out, d_in)``; for convolutions all axes but the first
    form the input side. All other parameters (biases, norms) and matrices with a side longer than ``max_side`` (the
    embeddings of a large vocabulary) are the rest, which another projector sketches into the last columns. A side with
    no more entries than features is not projected, so small matrices are preserved exactly.

    For random matrices :math:`E\langle \phi(x), \phi(y)\rangle = \langle x, y\rangle`, over the whole row and in
    each segment. Entries depend only on (seed, model_id, parameter name, side, coordinates).

    Example:
        >>> projector = TwoSidedProjector(2, rest_dim=3)
        >>> projector.layout({"fc.weight": (4, 5), "fc.bias": (4,)}).to_json()
        [['fc.weight', 0, 4], ['rest', 4, 7]]
    """

    def __init__(
        self,
        k_in: int,
        k_out: int | None = None,
        *,
        rest_dim: int | None = None,
        matrices: str | PrincipalAxes = "rademacher",
        seed: int = 0,
        device: str | torch.device | None = None,
        rest: AbstractProjector | None = None,
        layout: str = "module",
        max_side: int = DEFAULT_MAX_SIDE,
    ) -> None:
        """Store the settings; nothing is drawn.

        The attribute ``proj_dim`` is ``k_in * k_out``, the features of one matrix; K is ``layout(...).width``.

        Args:
            k_in: Features along the input side of a matrix.
            k_out: Features along the output side; ``None`` for ``k_in``.
            rest_dim: Features of the rest; ``None`` for ``k_in * k_out``.
            matrices: ``"rademacher"``, ``"gaussian"``, or fitted :class:`PrincipalAxes`.
            seed: Any integer.
            device: Device of the projection; ``None`` for the gradients' device.
            rest: Projector of the rest, instead of a :class:`CountSketchProjector` with ``rest_dim`` features.
            layout: ``"module"`` gives every matrix and the rest a separate segment, hence a separate kernel;
                ``"joint"`` makes all columns one segment.
            max_side: Longest side of a matrix that is projected on both sides.

        Raises:
            InvalidInputError: If an argument is out of range, ``rest`` and ``rest_dim`` are both given, or the axes
                were fitted for another ``k_in`` or ``k_out``.
        """
        self.k_in = positive_int(k_in=k_in)
        self.k_out = self.k_in if k_out is None else positive_int(k_out=k_out)
        self._axes = matrices if isinstance(matrices, PrincipalAxes) else None
        kind = "principal_axes" if isinstance(matrices, PrincipalAxes) else one_of(_RANDOM, matrices=matrices)
        if self._axes is not None and (self._axes.k_in, self._axes.k_out) != (self.k_in, self.k_out):
            raise InvalidInputError(
                f"The principal axes were fitted with k_in={self._axes.k_in} and k_out={self._axes.k_out}, expected "
                f"{self.k_in} and {self.k_out}. Fit them with these numbers, or pass the numbers that they were fitted "
                "with."
            )
        device = None if device is None else torch.device(device)
        super().__init__(0, self.k_in * self.k_out, integer(seed=seed), kind, device)
        if rest is not None and rest_dim is not None:
            raise InvalidInputError(
                f"Both rest and rest_dim={rest_dim} were given. Give the projector of the rest its own width, and "
                "leave rest_dim out."
            )
        rest_dim = self.proj_dim if rest_dim is None else positive_int(rest_dim=rest_dim)
        self.rest = CountSketchProjector(rest_dim, seed=seed, device=device) if rest is None else rest
        self.layout_kind = one_of(("module", "joint"), layout=layout)
        self.max_side = positive_int(max_side=max_side)
        self._owner: tuple[int, torch.device] | None = None
        self._made: dict[tuple[str, Stream], Tensor] = {}

    @classmethod
    def of_width(
        cls, proj_dim: int, *, seed: int = 0, device: str | torch.device | None = None, layout: str = "module"
    ) -> Self:
        """Return a projector with about ``proj_dim`` features per matrix: ``k_in = k_out = floor(sqrt(proj_dim))``.

        Example:
            >>> TwoSidedProjector.of_width(2048).k_in
            45
        """
        return cls(math.isqrt(positive_int(proj_dim=proj_dim)), seed=seed, device=device, layout=layout)

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project collected gradients by parameter name; principal axes do not depend on ``model_id``.

        Raises:
            InvalidInputError: If the gradients are one ``(B, P)`` tensor, disagree on B, or are not floating point.
        """
        if isinstance(grads, Tensor):
            raise InvalidInputError(
                f"A gradient tensor of shape {tuple(grads.shape)} has no matrices in it. Pass the gradients by "
                "parameter name, each (B, *parameter.shape)."
            )
        return super().project(grads, model_id)

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows.

        It adds the features of each matrix to their columns, and hands everything else to the rest.

        Raises:
            InvalidInputError: If the principal axes were fitted for other matrices.
        """
        matrices, others = self._divide(parameters)
        # Made even where nothing is left for it, so that it refuses blocks of unknown names.
        rest = self.rest.accumulator(num_samples, model_id=model_id, parameters=others)
        by_name = {matrix.name: matrix for matrix in matrices}
        sums = FeatureRows(num_samples, matrices[-1].stop if matrices else 0, self.device)

        def add(block: GradientBlock) -> None:
            matrix = by_name.get(block.name)
            if matrix is None:
                rest.add(block)
                return
            check_block(block, num_samples, parameters)
            if isinstance(block, FactoredBlock):
                self._add_factors(sums, matrix, block, model_id)
            else:
                self._add_rows(sums, matrix, block, model_id)

        def features() -> Tensor:
            rest_features = rest.features() if others else None
            total = sums.whole(None if rest_features is None else rest_features.device)
            return total if rest_features is None else torch.cat([total, rest_features.to(total.device)], 1)

        return Accumulator(add, features)

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return one segment per matrix in model order plus the rest; with ``layout="joint"``, a single segment.

        Raises:
            InvalidInputError: If the principal axes were fitted for other matrices.
        """
        matrices, rest = self._divide(parameters)
        inner = self.rest.layout(rest).segments if rest else ()
        widths = [(matrix.name, matrix.stop - matrix.start) for matrix in matrices]
        widths += [("rest" if len(inner) == 1 else f"rest.{part.name}", part.width) for part in inner]
        whole = side_by_side(widths)
        return FeatureLayout.joint(whole.width) if self.layout_kind == "joint" and whole.width else whole

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the features, including a digest of fitted axes."""
        axes = self._axes
        return {
            **super().fingerprint(),
            "kind": "two_sided",
            "k_in": self.k_in,
            "k_out": self.k_out,
            "matrices": self.proj_type if axes is None else {"kind": self.proj_type, "digest": axes.digest},
            "layout": self.layout_kind,
            "max_side": self.max_side,
            "rest": self.rest.fingerprint(),
        }

    def free_memory(self) -> None:
        """Free all matrices; they are generated or copied again when needed."""
        self._made.clear()
        self.rest.free_memory()

    def side_product(
        self, values: Tensor, matrix: _Matrix, side: Stream, model_id: int
    ) -> tuple[Tensor, float]:
        """Return ``values (b, n, d) @ side matrix (d, k)``, unscaled, and the scale.

        The matrices of one model and device at a time are kept. A side with d = k is kept whole. Random matrices are
        scaled by 1/sqrt(k): then P^T P is the identity in expectation. Axes are orthonormal and not scaled.
        """
        width, size, device = matrix.width(side), values.shape[2], values.device
        if size == width:
            return values, 1.0
        if self._owner != (model_id, device):
            self._made.clear()
            self._owner = (model_id, device)
        key = matrix.name, side
        if key not in self._made:
            self._made[key] = (
                self._axes.axes(*key).to(device)
                if self._axes is not None
                else self._drawn(parameter_key(self.seed, model_id, *key), size, width, device)
            )
        scale = 1.0 if self._axes is not None else 1 / math.sqrt(width)
        return values @ self._made[key].to(values.dtype), scale

    def _add_factors(self, sums: FeatureRows, matrix: _Matrix, block: FactoredBlock, model_id: int) -> None:
        """Add ``sum_t (g_t P_out) (x_t P_in)^T``: the gradient is not formed."""
        inputs, output_grads = block.inputs.detach(), block.output_grads.detach()
        total = sums.of(sum_dtype(inputs.dtype, output_grads.dtype), inputs.device)
        product, positions = self.side_product, inputs.shape[1]
        for piece in sample_pieces(block.num_samples, 8 * positions * (matrix.d_in + matrix.d_out)):
            x, in_scale = product(inputs[piece].to(total), matrix, Stream.TWO_SIDED_IN, model_id)
            g, out_scale = product(output_grads[piece].to(total), matrix, Stream.TWO_SIDED_OUT, model_id)
            _add(total, matrix, block.start + piece.start, g.transpose(1, 2) @ x, in_scale * out_scale)

    def _add_rows(self, sums: FeatureRows, matrix: _Matrix, block: GradientBlock, model_id: int) -> None:
        """Add ``P_out^T G P_in`` of formed gradients."""
        rows = block.dense().detach()
        total, product = sums.of(sum_dtype(rows.dtype), rows.device), self.side_product
        for piece in sample_pieces(block.num_samples, 8 * matrix.d_in * matrix.d_out):
            grads = rows[piece].to(total).reshape(-1, matrix.d_out, matrix.d_in)
            x, in_scale = product(grads, matrix, Stream.TWO_SIDED_IN, model_id)
            g, out_scale = product(x.transpose(1, 2), matrix, Stream.TWO_SIDED_OUT, model_id)
            _add(total, matrix, block.start + piece.start, g.transpose(1, 2), in_scale * out_scale)

    def _drawn(self, key: int, num_rows: int, width: int, device: torch.device) -> Tensor:
        """Return the random matrix of a key, float32 ``(num_rows, width)``."""
        kind = _RANDOM[self.proj_type]
        drawn = empty_buffer(num_rows, kind.width(width), dtype=torch.float32, device=device)
        kind(width, num_rows, device).draw_(drawn, key, 0)
        return empty_buffer(num_rows, width, dtype=torch.float32, device=device).copy_(drawn[:, :width])

    def _divide(self, parameters: ParameterShapes) -> tuple[list[_Matrix], ParameterShapes]:
        """Return the matrices with their columns, in model order, and the shapes of the rest."""
        shapes = matrix_shapes(parameters, self.max_side)
        matrices: list[_Matrix] = []
        start = 0
        for name, (d_out, d_in) in shapes.items():
            if self._axes is not None and self._axes.shapes.get(name) != (d_out, d_in):
                raise InvalidInputError(
                    f"The principal axes have the shape {self._axes.shapes.get(name)} for {name!r}, expected "
                    f"{(d_out, d_in)}. Fit them on this model, with the same parameters and the same max_side."
                )
            matrices.append(_Matrix(name, d_out, d_in, min(d_out, self.k_out), min(d_in, self.k_in), start))
            start = matrices[-1].stop
        return matrices, {name: shape for name, shape in parameters.items() if name not in shapes}


def _add(total: Tensor, matrix: _Matrix, start: int, features: Tensor, scale: float) -> None:
    """Add features ``(b, k_out, k_in)`` of a matrix to the rows from ``start`` on."""
    rows = total[start : start + features.shape[0], matrix.start : matrix.stop]
    rows.add_(features.reshape(features.shape[0], -1), alpha=scale)
