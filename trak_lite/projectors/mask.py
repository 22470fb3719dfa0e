r"""Mask projections: features are a random subset of the gradient entries, optionally sketched.

They are fast, because most of the gradient is not read. But inner products have a large variance,
:math:`(P/K') \sum_i x_i^2 y_i^2`, which has no bound if a few coordinates dominate. Provided for comparison.

The K' chosen entries of a segment are those with the smallest 32-bit words h(i), which depend on (seed, model_id,
parameter name, local index i). They are a uniform sample without replacement, independent of the order of the
parameters. The j-th chosen entry has the j-th smallest word. Words are drawn in tiles, and only words below a bound are
stored, so the memory holds K' entries and one tile.

Shapes: B samples, b of a block, P gradient entries, K' chosen entries (``mask_dim``), K features (``proj_dim``).
Numerics: float64 gradients give float64 features, all others float32. Sums have a fixed order, so dense gradients give
the same bits on every device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.validate import integer, one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import (
    AbstractProjector,
    Accumulator,
    by_module,
    check_block,
    sample_pieces,
    side_by_side,
)
from trak_lite.projectors._scratch import FeatureRows, sum_dtype
from trak_lite.projectors.random.hash import (
    Stream,
    hash_offsets,
    hash_signs,
    hash_words_,
    parameter_key,
    wrap32,
)
from trak_lite.types import FactoredBlock, FeatureLayout, GradientBlock, ParameterShapes, num_entries

# These numbers are appended to the keys of the stream, which gives separate keys.
_CHOICE, _BUCKET, _SIGN = 1, 2, 3
_TILE: Final = 1 << 20
_WORDS: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class _Plan:
    """Chosen entries, scales and sketch for the gradients of one model."""

    entries: Mapping[str, tuple[Tensor, Tensor]]
    """``(n,)`` int64 local indices and positions among all chosen entries, by the name of the parameters that have
    some."""
    scale: Tensor
    """``(K',)`` float64 factors of the chosen entries."""
    fold: tuple[Tensor, Tensor] | None
    """``(R, K)`` int64 indices and float32 signs of a sparse sketch in gather form: feature k is the sum over r of
    ``sign[r, k] * chosen[index[r, k]]``; the index after the last chosen entry selects a zero. ``None`` if the entries
    are the features. Gathering has a fixed order of additions on every device; scattering would need atomic additions
    on a GPU."""

    def features(self, chosen: Tensor) -> Tensor:
        """Return the features ``(B, K)`` of chosen entries ``(B, K')``."""
        scaled = chosen * self.scale.to(chosen)
        if self.fold is None:
            return scaled
        padded = torch.cat([scaled, scaled.new_zeros(scaled.shape[0], 1)], 1)
        indices, signs = (part.to(scaled.device) for part in self.fold)
        features = scaled.new_zeros(scaled.shape[0], indices.shape[1])
        for index, sign in zip(indices, signs.to(scaled.dtype), strict=True):
            features.addcmul_(padded.index_select(1, index), sign)
        return features


class MaskProjector(AbstractProjector):
    r"""Selects K random entries of the gradient, scaled by :math:`\sqrt{P/K}`, so that inner products are unbiased.

    The entries are a uniform sample without replacement. They depend on (seed, model_id, parameter names and sizes),
    but not on the order of the parameters.

    Example:
        >>> MaskProjector(2).project({"w": torch.ones(1, 8)}, model_id=0)
        tensor([[2., 2.]])
    """

    kind: ClassVar[str] = "mask"
    """Name of the map in the store's manifest."""

    def __init__(
        self, proj_dim: int, *, seed: int = 0, device: str | torch.device | None = None, layout: str = "joint"
    ) -> None:
        """Store the settings; nothing is chosen. Arguments are those of :class:`GraSSProjector`; K' is K."""
        device = None if device is None else torch.device(device)
        super().__init__(0, positive_int(proj_dim=proj_dim), integer(seed=seed), self.kind, device)
        self.mask_dim = self.proj_dim
        self.layout_kind = one_of(("joint", "module"), layout=layout)
        self._plan: _Plan | None = None
        self._owner: tuple[int, tuple[tuple[str, tuple[int, ...]], ...]] | None = None

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows; entries are chosen once per model.

        It collects the chosen entries ``(B, K')`` of each block, and sketches them at the end.
        """
        owner = (model_id, tuple((name, tuple(shape)) for name, shape in parameters.items()))
        if self._plan is None or self._owner != owner:
            self._owner, self._plan = owner, self._make_plan(model_id, parameters)
        plan = self._plan
        chosen = FeatureRows(num_samples, len(plan.scale), self.device)
        none = torch.empty(0, dtype=torch.int64, device="cpu")

        def add(block: GradientBlock) -> None:
            check_block(block, num_samples, parameters)
            index, column = plan.entries.get(block.name, (none, none))
            if isinstance(block, FactoredBlock):
                values = _entries_of_factors(block, index)
            else:
                dense = block.dense().detach()
                values = dense.index_select(1, index.to(dense.device)).to(sum_dtype(dense.dtype))
            rows = chosen.of(values.dtype, values.device)[block.start : block.start + block.num_samples]
            rows.index_add_(1, column.to(rows.device), values.to(rows))

        return Accumulator(add, lambda: plan.features(chosen.whole()))

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return one segment, or one per module; each has K columns, or its number of entries if that is smaller."""
        sizes = {name: num_entries(shapes) for name, shapes in self._segments(parameters).items()}
        return side_by_side((name, min(self.proj_dim, size)) for name, size in sizes.items())

    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the features, as JSON values."""
        settings = {"kind": self.kind, "mask_dim": self.mask_dim, "layout": self.layout_kind}
        return {**super().fingerprint(), **settings}

    def free_memory(self) -> None:
        """Free the chosen entries; they are chosen again when needed."""
        self._plan = self._owner = None

    def _segments(self, parameters: ParameterShapes) -> dict[str, ParameterShapes]:
        """Return the parameters of every segment that has entries, by segment name."""
        groups = by_module(parameters) if self.layout_kind == "module" else {"joint": parameters}
        return {segment: shapes for segment, shapes in groups.items() if num_entries(shapes)}

    def _make_plan(self, model_id: int, parameters: ParameterShapes) -> _Plan:
        """Choose the entries of every segment and the features that they are added to."""
        key = functools.partial(parameter_key, self.seed, model_id)
        entries: dict[str, tuple[Tensor, Tensor]] = {}
        scales = [torch.empty(0, dtype=torch.float64, device="cpu")]
        features = [np.empty(0, np.int64)]
        signs = [np.empty(0, np.float32)]
        start = width = 0
        for segment, shapes in self._segments(parameters).items():
            size = num_entries(shapes)
            count = min(self.mask_dim, size)
            keys = {name: key(name, Stream.MASK, _CHOICE) for name in sorted(shapes)}
            sizes = [num_entries({name: shapes[name]}) for name in keys]
            entries.update(_choose(keys, sizes, count, start=start))
            scales.append(torch.full((count,), math.sqrt(size / count), dtype=torch.float64, device="cpu"))
            columns = min(self.proj_dim, size)
            if count > columns:
                buckets = hash_offsets(key(segment, Stream.MASK, _BUCKET), count, size=columns)
                sign = hash_signs(
                    key(segment, Stream.MASK, _SIGN), 0, count, device=torch.device("cpu")
                ).numpy()
            else:
                buckets, sign = list(range(count)), np.ones(count, np.float32)
            features.append(np.array(buckets) + width)
            signs.append(sign)
            start, width = start + count, width + columns
        fold = _gather_form(np.concatenate(features), np.concatenate(signs), width)
        return _Plan(entries, torch.cat(scales), fold if self.mask_dim > self.proj_dim and start else None)


@final
class GraSSProjector(MaskProjector):
    """Selects K' random entries, scales them, and adds each with a random sign to one of K random features.

    Inner products are unbiased. If a segment has not more chosen entries than features, the entries are the features.
    A larger ``mask_dim`` only appends entries.

    Source: Hu et al., "GraSS: Scalable Data Attribution with Gradient Sparsification and Sparse Projection"
    (arXiv:2505.18976), with the random mask.

    Example:
        >>> GraSSProjector(2).project({"w": torch.ones(1, 9)}, model_id=0).shape
        torch.Size([1, 2])
    """

    kind = "grass"

    def __init__(
        self,
        proj_dim: int,
        *,
        mask_dim: int | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        layout: str = "joint",
    ) -> None:
        """Store the settings; nothing is chosen.

        Args:
            proj_dim: K, number of features, of all parameters together or of every module.
            mask_dim: K', number of selected entries per segment; ``None`` for 4K.
            seed: Any integer.
            device: Device of the features; ``None`` for the gradients' device.
            layout: ``"joint"`` for one segment of K features, ``"module"`` for one per module (the parameters whose
                names agree up to the last dot).

        Raises:
            InvalidInputError: If an argument is out of range, or ``mask_dim`` is below ``proj_dim``.
        """
        super().__init__(proj_dim, seed=seed, device=device, layout=layout)
        self.mask_dim = 4 * self.proj_dim if mask_dim is None else positive_int(mask_dim=mask_dim)
        if self.mask_dim < self.proj_dim:
            raise InvalidInputError(
                f"mask_dim={mask_dim} entries cannot fill proj_dim={proj_dim} features. Give a mask_dim of at least "
                "proj_dim, or use MaskProjector."
            )


def _choose(
    keys: Mapping[str, int], sizes: Sequence[int], count: int, *, start: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the ``count`` entries with the smallest words, at positions ``start, start + 1, ...``."""
    expected = count + 8 * math.isqrt(count) + 16  # fewer than count are found with probability 1e-15
    entries: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    while sum(len(index) for _, index in entries) < count:
        bound = min(_WORDS, expected * _WORDS // sum(sizes) + 1)
        entries = [_words_below(bound, key, size) for key, size in zip(keys.values(), sizes, strict=True)]
        expected *= 2
    owner = np.repeat(np.arange(len(keys)), [len(index) for _, index in entries])
    words, index = (np.concatenate(column) for column in zip(*entries, strict=True))
    order = np.lexsort((index, owner, words))[:count]  # equal words: by name, then by index
    owner, index = owner[order], index[order]
    by_name = {name: np.flatnonzero(owner == rank) for rank, name in enumerate(keys)}
    return {
        name: (torch.from_numpy(index[positions]), torch.from_numpy(positions + start))
        for name, positions in by_name.items()
    }


def _words_below(bound: int, key: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the words of ``h(key, 0) .. h(key, size - 1)`` below ``bound``, minus 2**31, and their indices."""
    words, indices = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    tile, scratch = (torch.empty(min(size, _TILE), dtype=torch.int32, device="cpu") for _ in range(2))
    for start in range(0, size, _TILE):
        count = min(_TILE, size - start)
        drawn = hash_words_(tile[:count], key, start, scratch=scratch[:count])
        drawn.add_(wrap32(1 << 31))  # the signed numbers now have the order of the unsigned words
        (index,) = torch.nonzero(drawn <= bound - 1 - (1 << 31), as_tuple=True)
        words.append(drawn[index].numpy().astype(np.int64))
        indices.append(index.numpy() + start)
    return np.concatenate(words), np.concatenate(indices)


def _gather_form(
    features: NDArray[np.int64], signs: NDArray[np.float32], width: int
) -> tuple[Tensor, Tensor]:
    """Return the chosen entries that are added to each feature, ``(R, K)``, and their signs, given those of each entry.

    An entry has round r if r earlier entries have its feature.
    """
    order = np.argsort(features, kind="stable")
    filled = np.bincount(features, minlength=width)
    rounds = np.arange(len(order)) - (np.cumsum(filled) - filled)[features[order]]
    shape = int(filled.max(initial=0)), width
    # Not entry 0 where there is none: if it is not finite, its product with a sign of 0 is not 0.
    index, sign = np.full(shape, len(order)), np.zeros(shape, np.float32)
    index[rounds, features[order]] = order
    sign[rounds, features[order]] = signs[order]
    return torch.from_numpy(index), torch.from_numpy(sign)


def _entries_of_factors(block: FactoredBlock, index: Tensor) -> Tensor:
    """Return the entries ``(b, n)`` of a factored gradient; no other entries are formed."""
    inputs, output_grads = block.inputs.detach(), block.output_grads.detach()
    dtype = sum_dtype(inputs.dtype, output_grads.dtype)
    index = index.to(inputs.device)
    d_in = max(1, inputs.shape[2])
    rows, columns = index // d_in, index % d_in
    values = torch.zeros(block.num_samples, len(index), dtype=dtype, device=inputs.device)
    for piece in sample_pieces(block.num_samples, 24 * inputs.shape[1] * len(index)):
        x = inputs[piece].index_select(2, columns).to(dtype)
        g = output_grads[piece].index_select(2, rows).to(dtype)
        values[piece] = (x * g).sum(1)
    return values
