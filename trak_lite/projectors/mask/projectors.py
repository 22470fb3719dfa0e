r"""Mask projections: features are a random subset of the gradient entries, optionally sketched.

They are fast, because most of the gradient is not read. But inner products have a large variance,
:math:`(P/K') \sum_i x_i^2 y_i^2`, which has no bound if a few coordinates dominate. Provided for comparison.

Shapes: B samples, b of a block, P gradient entries, K' chosen entries (``mask_dim``), K features (``proj_dim``).
Numerics: float64 gradients give float64 features, all others float32. Sums have a fixed order, so dense gradients give
the same bits on every device.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from trak_lite._validate import one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import AbstractFeatureAccumulator, AbstractProjector
from trak_lite.projectors._blocks import block_rows
from trak_lite.projectors._factored import check_factors, sample_pieces
from trak_lite.projectors._scratch import FeatureRows, sum_dtype
from trak_lite.projectors.dense.projectors import integer_seed
from trak_lite.projectors.mask.plan import Fold, MaskPlan, make_plan
from trak_lite.types import FactoredBlock, FeatureLayout, GradientBlock, ParameterShapes, Segment, num_entries

__all__ = ["AbstractMaskProjector", "GraSSProjector", "MaskProjector"]


class AbstractMaskProjector(AbstractProjector):
    """Base class: chooses ``mask_dim`` entries and sums them into ``proj_dim`` features.

    The entries are a uniform sample without replacement. They depend on (seed, model_id, parameter names and sizes),
    but not on the order of the parameters. A larger ``mask_dim`` only appends entries.
    """

    kind: ClassVar[str]
    """Name of the map in the store's manifest."""

    @abstractmethod
    def __init__(
        self, proj_dim: int, *, mask_dim: int, seed: int, device: str | torch.device | None, layout: str
    ) -> None:
        device = None if device is None else torch.device(device)
        super().__init__(0, positive_int(proj_dim=proj_dim), integer_seed(seed), self.kind, device)
        self.mask_dim = positive_int(mask_dim=mask_dim)
        self.layout_kind = one_of(("joint", "module"), layout=layout)
        self._plan: MaskPlan | None = None
        self._owner: tuple[int, tuple[tuple[str, tuple[int, ...]], ...]] | None = None

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows; entries are chosen once per model."""
        owner = (model_id, tuple((name, tuple(shape)) for name, shape in parameters.items()))
        if self._plan is None or self._owner != owner:
            self._owner = owner
            self._plan = make_plan(
                self._segments(parameters),
                mask_dim=self.mask_dim,
                proj_dim=self.proj_dim,
                seed=self.seed,
                model_id=model_id,
            )
        chosen = FeatureRows(num_samples, len(self._plan.scale), self.device)
        return _MaskAccumulator(self._plan, num_samples, parameters, chosen)

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return one segment, or one per module; each has K columns, or its number of entries if that is smaller."""
        segments: list[Segment] = []
        start = 0
        for name, shapes in self._segments(parameters).items():
            stop = start + min(self.proj_dim, num_entries(shapes))
            segments.append(Segment(name, start, stop))
            start = stop
        return FeatureLayout(tuple(segments))

    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the features, as JSON values."""
        own = {"kind": self.kind, "mask_dim": self.mask_dim, "layout": self.layout_kind}
        return {**super().fingerprint(), **own}

    def free_memory(self) -> None:
        """Free the chosen entries; they are chosen again when needed."""
        self._plan = self._owner = None

    def _segments(self, parameters: ParameterShapes) -> dict[str, ParameterShapes]:
        """Return the parameters of every segment that has entries, by segment name."""
        groups: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in parameters.items():
            segment = name.rpartition(".")[0] if self.layout_kind == "module" else "joint"
            groups.setdefault(segment, {})[name] = tuple(shape)
        return {segment: shapes for segment, shapes in groups.items() if num_entries(shapes)}


@final
class MaskProjector(AbstractMaskProjector):
    r"""Selects K random entries of the gradient, scaled by :math:`\sqrt{P/K}`, so that inner products are unbiased.

    Example:
        >>> MaskProjector(2).project({"w": torch.ones(1, 8)}, model_id=0)
        tensor([[2., 2.]])
    """

    kind = "mask"

    def __init__(
        self, proj_dim: int, *, seed: int = 0, device: str | torch.device | None = None, layout: str = "joint"
    ) -> None:
        """Store the settings; nothing is chosen. Arguments are those of :class:`GraSSProjector`; K' is K."""
        super().__init__(
            proj_dim, mask_dim=positive_int(proj_dim=proj_dim), seed=seed, device=device, layout=layout
        )


@final
class GraSSProjector(AbstractMaskProjector):
    """Selects K' random entries, scales them, and adds each with a random sign to one of K random features.

    Inner products are unbiased. If a segment has not more chosen entries than features, the entries are the features.

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
        mask_dim = 4 * positive_int(proj_dim=proj_dim) if mask_dim is None else mask_dim
        super().__init__(proj_dim, mask_dim=mask_dim, seed=seed, device=device, layout=layout)
        if self.mask_dim < self.proj_dim:
            raise InvalidInputError(
                f"mask_dim={mask_dim} entries cannot fill proj_dim={proj_dim} features. Give a mask_dim of at least "
                "proj_dim, or use MaskProjector."
            )


@final
@dataclass(eq=False)
class _MaskAccumulator(AbstractFeatureAccumulator):
    """Collects the chosen entries of each block, and sketches them at the end."""

    _plan: MaskPlan
    _num_samples: int
    _parameters: ParameterShapes
    _chosen: FeatureRows
    """Sums of the chosen entries ``(B, K')``."""

    @torch.no_grad()
    def add(self, block: GradientBlock) -> None:
        entries = self._plan.entries.get(block.name)
        index = torch.empty(0, dtype=torch.int64, device="cpu") if entries is None else entries.index
        if isinstance(block, FactoredBlock):
            check_factors(block, self._num_samples, self._parameters)
            values = _entries_of_factors(block, index)
        else:
            rows = block_rows(block, self._num_samples, self._parameters)
            values = rows.index_select(1, index.to(rows.device)).to(sum_dtype(rows.dtype))
        chosen = self._chosen.of(values.dtype, values.device)
        if entries is not None:
            rows = chosen[block.start : block.start + block.num_samples]
            rows.index_add_(1, entries.column.to(rows.device), values.to(rows))

    def features(self) -> Tensor:
        chosen = self._chosen.whole()
        scaled = chosen * self._plan.scale.to(chosen)
        return scaled if self._plan.fold is None else _folded(scaled, self._plan.fold)


def _entries_of_factors(block: FactoredBlock, index: Tensor) -> Tensor:
    """Return the entries ``(b, n)`` of a factored gradient; no other entries are formed."""
    inputs, output_grads = block.inputs.detach(), block.output_grads.detach()
    dtype = sum_dtype(torch.promote_types(inputs.dtype, output_grads.dtype))
    index = index.to(inputs.device)
    d_in = max(1, inputs.shape[2])
    rows, columns = index // d_in, index % d_in
    values = torch.zeros(block.num_samples, len(index), dtype=dtype, device=inputs.device)
    for piece in sample_pieces(block.num_samples, 24 * inputs.shape[1] * len(index)):
        x = inputs[piece].index_select(2, columns).to(dtype)
        g = output_grads[piece].index_select(2, rows).to(dtype)
        values[piece] = (x * g).sum(1)
    return values


def _folded(chosen: Tensor, fold: Fold) -> Tensor:
    """Return the features ``(B, K)`` of scaled entries ``(B, K')``."""
    padded = torch.cat([chosen, chosen.new_zeros(chosen.shape[0], 1)], 1)
    features = chosen.new_zeros(chosen.shape[0], fold.index.shape[1])
    for index, sign in zip(fold.index.to(chosen.device), fold.sign.to(chosen), strict=True):
        features.addcmul_(padded.index_select(1, index), sign)
    return features
