"""Standard errors of scores, and agreement on rankings, over checkpoints or over independent runs.

Shapes: N train rows, M targets, C checkpoints, G groups of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import copied_ahead, wide_dtype
from trak_lite.data.batches import rows_in_batches
from trak_lite.data.datasets import every_nth, spread_rows
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.spread import agreement, expected_agreement, pair_sums, standard_error
from trak_lite.run.tables import score_table_spec
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.tiles import ScoreTerm, mean_q, summed_products, tile_ranges

_PAIR_ROWS = 1024
_RANKED_VALUES = 1 << 24  # scores that are ranked at a time


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """Agreement between checkpoints (or runs), for each target."""

    agreement: NDArray[np.float64]
    """``(M,)`` Spearman correlation over train rows between the scores of two checkpoints (runs), mean over pairs."""
    expected: NDArray[np.float64]
    """``(M,)`` expected correlation with the mean over as many others with such weights (Spearman-Brown)."""
    reliable: NDArray[np.bool_]
    """``(M,)`` whether ``expected`` reaches the threshold."""

    def __str__(self) -> str:
        """Return how many targets are reliable, and the medians and ranges of both correlations."""
        spans = (
            f"{np.median(values):.2f} ({values.min():.2f} to {values.max():.2f})"
            for values in (self.agreement, self.expected)
        )
        return (
            "{} of {} targets have a reliable ranking of train rows; median over targets (lowest to highest): two "
            "checkpoints or runs agree by {}, and all with as many others by {}."
        ).format(self.reliable.sum(), len(self.reliable), *spans)


@final
class Repeats:
    """Checkpoints, or runs of several checkpoints, as repeated measurements of the same scores."""

    def __init__(self, source: ScoreSource, runs: Sequence[Hashable] | None) -> None:
        """Group the checkpoints by their labels; ``None`` makes each a group."""
        if runs is None and min(source.weights) < 0 < max(source.weights):
            raise InvalidInputError(
                f"checkpoint_weights {source.weights} have both signs, so the checkpoints are not repeats of one "
                "measurement. Group them: runs=[...], one label per checkpoint."
            )
        labels = list(range(len(source.train))) if runs is None else list(runs)
        if len(labels) != len(source.train):
            raise InvalidInputError(
                f"runs has {len(labels)} labels, but {len(source.train)} checkpoints were scored. Give one label per "
                "checkpoint, in their order."
            )
        groups: dict[Hashable, list[int]] = {}
        for index, label in enumerate(labels):
            groups.setdefault(label, []).append(index)
        self._source = source
        self._groups = list(groups.values())
        self._shares = [math.fsum(abs(source.weights[index]) for index in group) for group in self._groups]
        """Weight of each group in the scores."""
        if sum(share > 0 for share in self._shares) < 2:
            of = "" if all(self._shares) else f" with a weight other than 0 of {len(groups)}"
            raise InvalidInputError(
                f"Uncertainty needs at least 2 {'checkpoints' if runs is None else 'runs'}, got "
                f"{sum(share > 0 for share in self._shares)}{of}. Featurize more checkpoints: those of one run cost no "
                "training."
            )

    def standard_error(self, rows: NDArray[np.int64] | None, target: int | None) -> NDArray[np.float32]:
        """Return the standard errors of the scores of some or all (``None``) train rows for one target, or for all.

        Returns:
            ``(rows, M)``, ``(rows,)`` for one target, or ``(M, k)`` for rows ``(M, k)``, those of each target.
        """
        if rows is not None and rows.ndim == 2:
            return self._pair_errors(rows)
        terms = self._source.terms(slice(None) if target is None else slice(target, target + 1))
        num_rows, num_targets = self._source.num_rows, len(terms[0].targets)
        plan: Iterable[range] | Iterable[NDArray[np.int64]]
        if rows is None:
            plan = tile_ranges(num_rows, score_table_spec(num_rows, num_targets, {}).chunk_rows)
        else:
            plan = rows_in_batches(rows, _PAIR_ROWS)
        out = np.empty((num_rows if rows is None else len(rows), num_targets), np.float32)
        done = 0
        for count, tile in copied_ahead((len(part), self._errors(terms, part)) for part in plan):
            out[done : done + count] = tile
            done += count
        return out if target is None else out[:, 0]

    def _pair_errors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the standard errors of the scores of rows ``rows[j]`` for target j, ``(M, k)``."""
        terms = self._source.terms()
        out = np.empty(rows.shape, np.float32)
        for part in rows_in_batches(np.unique(rows), _PAIR_ROWS):
            tile = self._errors(terms, part).cpu().numpy()
            here = (rows >= part[0]) & (rows <= part[-1])
            target, _ = np.nonzero(here)
            out[here] = tile[np.searchsorted(part, rows[here]), target]
        return out

    def reliability(self, *, threshold: float, max_rows: int) -> Reliability:
        """Return the agreement on ``max_rows`` evenly spaced train rows."""
        rows = spread_rows(self._source.num_rows, max_rows)
        weighted = np.flatnonzero(self._shares)  # the others have no ranking
        parts = ([part[index] for index in weighted] for part in self._parts(rows, slice(None)))
        agreements = torch.cat([agreement(part) for part in parts])
        # a mean with the shares s is as noisy as the plain mean of this number of groups, which is G for equal shares
        shares = [share / max(self._shares) for share in self._shares]  # of exactly 1 if they are equal
        equal = math.fsum(shares) ** 2 / math.fsum(share**2 for share in shares)
        expected = expected_agreement(agreements, equal).cpu().numpy()
        return Reliability(agreements.cpu().numpy(), expected, expected >= threshold)

    def pairwise_agreement(self, *, max_rows: int, max_targets: int) -> NDArray[np.float64]:
        """Return the mean Spearman correlations of all pairs, ``(G, G)``, over evenly spaced rows and targets."""
        rows = spread_rows(self._source.num_rows, max_rows)
        targets = every_nth(self._source.num_targets, max_targets)
        sums = sum(pair_sums(part).cpu().numpy() for part in self._parts(rows, targets))
        means = np.asarray(sums) / len(range(self._source.num_targets)[targets])
        np.fill_diagonal(means, 1.0)
        return means

    def _errors(self, terms: Sequence[ScoreTerm], rows: range | NDArray[np.int64]) -> Tensor:
        values, factors = self._parts_of_means(terms, rows)
        sizes = [len(group) if self._source.method.q == "outside" else 1 for group in self._groups]
        return standard_error(values, self._shares, factors, sizes)

    def _parts(self, rows: NDArray[np.int64], targets: slice) -> Iterator[list[Tensor]]:
        """Yield the scores of every group alone ``(rows, M)``, for as many targets at a time as are ranked together."""
        width = max(1, _RANKED_VALUES // (len(rows) * len(self._groups)))
        chosen = range(self._source.num_targets)[targets]
        for start in range(0, len(chosen), width):
            part = chosen[start : start + width]
            terms = self._source.terms(slice(part.start, part.stop, part.step))
            pairs = zip(*self._parts_of_means(terms, rows), strict=True)
            yield [products * factors.to(products)[:, None] for products, factors in pairs]

    def _parts_of_means(
        self, terms: Sequence[ScoreTerm], rows: range | NDArray[np.int64]
    ) -> tuple[Iterator[Tensor], list[Tensor]]:
        """Return each group's parts of the mean products and of the mean q (1 if it is not outside), times G."""
        groups, q = [[terms[index] for index in group] for group in self._groups], self._source.method.q
        products = (summed_products(group, rows, q).mul_(len(groups)) for group in groups)
        if q != "outside":
            device = terms[0].targets.device
            return products, [torch.ones(len(rows), dtype=wide_dtype(device), device=device)] * len(groups)
        sizes = [len(group) * len(groups) / len(terms) for group in groups]
        return products, [mean_q(group, rows) * size for group, size in zip(groups, sizes, strict=True)]
