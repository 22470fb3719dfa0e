"""Products of unprojected gradients of train rows with target gradients, computed in a stream without storing rows.

Shapes: B samples of a batch, m targets, P gradient entries per sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import final

from torch import Tensor

from trak_lite.core.devices import precise
from trak_lite.core.normalization import Normalization
from trak_lite.core.progress import progress_bar
from trak_lite.data.batches import rows_in_batches
from trak_lite.data.datasets import RowNumbers
from trak_lite.featurizing.gradient_norms import GradientNorms
from trak_lite.featurizing.kronecker.units import sample_slices
from trak_lite.featurizing.passes import RowPass
from trak_lite.projectors import AbstractProjector, NoOpProjector
from trak_lite.projectors._base import Accumulator, check_block
from trak_lite.types import GradientBlock, OutputTerms, ParameterShapes, num_entries, scaled_rows


def unit(rows: Tensor, squared_norms: Tensor) -> Tensor:
    """Return rows divided by the norms of gradients; zero for a norm of zero."""
    return scaled_rows(rows, Normalization("unit").factors(squared_norms))


@final
class ProductProjector(AbstractProjector):
    """A projector whose features are the inner products of a gradient with given gradients of targets."""

    def __init__(self, targets: Mapping[str, Tensor], *, to_unit: bool = False) -> None:
        """Take the gradients of m targets by parameter name, ``(m, *shape)`` in float32 or float64.

        ``to_unit`` divides the products by the norm of the gradient.
        """
        self._to_unit = to_unit
        self._targets = {name: part.reshape(len(part), -1) for name, part in targets.items()}
        some = next(iter(self._targets.values()))
        super().__init__(0, len(some), 0, "na", some.device)
        self._like = some

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows."""
        products, norms = self._like.new_zeros(num_samples, self.proj_dim), GradientNorms(num_samples)

        def add(block: GradientBlock) -> None:
            check_block(block, num_samples, parameters)
            if self._to_unit:
                norms.add(block)
            for part in block.parts:
                narrow, targets = part.narrowed(self._targets[block.name])
                for samples in sample_slices(block.num_samples, targets.shape[1]):
                    rows = precise(narrow.samples(samples).dense().detach()).to(targets)
                    first = block.start + samples.start
                    products[first : first + len(rows)].addmm_(rows, targets.T)

        return Accumulator(add, lambda: unit(products, norms.squared()) if self._to_unit else products)


def gradients_of(
    passes: RowPass, wanted: RowNumbers, parameters: ParameterShapes, *, label: str, progress: bool | None
) -> Tensor:
    """Return the gradients ``(len(wanted), P)`` of some rows in float32 or better, parameters in model order."""
    gradients: Tensor | None = None
    start = 0
    whole = NoOpProjector(device=passes.device)
    for features, _ in projected(passes, wanted, whole, label=label, progress=progress):
        features = precise(features)
        if gradients is None:
            gradients = features.new_empty(len(wanted), num_entries(parameters))
        gradients[start : start + len(features)] = features
        start += len(features)
    assert gradients is not None  # a dataset has at least one row
    return gradients


def projected(
    passes: RowPass, wanted: RowNumbers, projector: AbstractProjector, *, label: str, progress: bool | None
) -> Iterator[tuple[Tensor, OutputTerms]]:
    """Yield the features and terms of every batch of some rows, with the checks of stored rows; nothing is stored."""
    passes = replace(passes, projector=projector)
    plan = rows_in_batches(wanted, passes.rows.batch_size)
    num_left = iter(range(len(wanted), 0, -passes.rows.batch_size))
    with progress_bar(len(wanted), label=label, progress=progress) as bar:
        for computed in passes.stream(plan, num_left.__next__):
            computed.refuse_non_finite(computed.finite().cpu().numpy())
            yield computed.features, computed.terms
            bar.update(len(computed.wanted))
