"""Compute the scores of one target set from stored rows, settings and kernels.

Shapes: N train rows, M targets, K feature width, C checkpoints, G groups of checkpoints, L dampings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite._devices import copied_ahead, wide_dtype
from trak_lite._validate import some_of
from trak_lite.data.batches import rows_in_batches
from trak_lite.data.columns import Column
from trak_lite.data.datasets import every_nth, spread_rows
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.kernel import (
    KernelSettings,
    SegmentKernel,
    eigenpath_segments,
    precondition,
    precondition_path,
)
from trak_lite.linalg.products import self_scores
from trak_lite.linalg.spread import agreement, expected_agreement
from trak_lite.methods import AbstractInverseMethod, AbstractMethod
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.parallel.ranks import Ranks
from trak_lite.run.columns import stored_columns
from trak_lite.run.settings import row_kind
from trak_lite.run.tables import (
    FEATURES,
    OUT_TO_LOSS,
    as_tensor,
    score_table_spec,
    table_path,
    target_table_path,
)
from trak_lite.scoring.grams import fisher_of, grams_of, kernels_of, make_grams
from trak_lite.scoring.tiles import ScoreTerm, error_tile, group_tile, score_tile, tile_ranges
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Manifest
from trak_lite.types import FeatureLayout

__all__ = ["Reliability", "ScoreSource", "UnstoredRows", "transforms_rows"]

logger = logging.getLogger(__name__)

_PAIR_ROWS = 1024
_RANKED_VALUES = 1 << 24  # scores that are ranked at a time
_HELD_BYTES = 2 << 30


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """Agreement between checkpoints (or runs), for each target."""

    agreement: NDArray[np.float64]
    """``(M,)`` Spearman correlation over train rows between the scores of two checkpoints (runs), mean over pairs."""
    expected: NDArray[np.float64]
    """``(M,)`` expected correlation with the mean over as many other checkpoints or runs (Spearman-Brown)."""
    reliable: NDArray[np.bool_]
    """``(M,)`` whether ``expected`` reaches the threshold."""


@final
@dataclass(frozen=True, slots=True)
class UnstoredRows:
    """Describes scores that were computed from gradients of which no row is stored."""

    name: str
    """Name of the target set."""
    method: AbstractMethod
    """The method of the scores."""
    manifest: Manifest
    """Settings and versions that the gradients were computed with."""
    task: AbstractModelOutput | None = None
    """Defines f; ``None`` if it is not known."""


@final
class ScoreSource:
    """Computes scores, their errors and self-influence from stored train and target rows. It stores no scores.

    All ``ranks`` call :meth:`terms` at the same time and compute the kernels together.
    """

    def __init__(
        self,
        store: AbstractFeatureStore,
        train: Sequence[AbstractRowTable],
        name: str,
        method: AbstractMethod,
        *,
        layout: FeatureLayout,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        if method.kernel is not None and transforms_rows(method):
            raise InvalidInputError(
                f"{method.name} has a kernel and overrides transform(), which is used only without a kernel. Return "
                "None as kernel, or remove transform()."
            )
        self.method = method
        self.store = store
        self.train = list(train)
        """Tables of the train rows, one per checkpoint."""
        self.name = name
        self._weights = method.weights(len(self.train))
        self._layout = method.layout_of(layout)
        self.device = device
        self.ranks = Ranks() if ranks is None else ranks
        self._held: dict[str, list[SegmentKernel]] | None = None
        self._named: set[str] = set()
        """Modules without a contribution that were named in the log."""

    def hold_kernels(self, held: dict[str, list[SegmentKernel]]) -> None:
        """Use factorised kernels again, as long as those of all checkpoints take at most 2 GiB.

        Args:
            held: Kernels by the content of the train rows. Sources of the same method and layout may share it.
        """
        if len(self.train) * sum(segment.width**2 for segment in self._layout.segments) * 8 <= _HELD_BYTES:
            self._held = held

    def factorise(self) -> Iterator[None]:
        """Factorise the kernels of one checkpoint at each step and hold them, if :meth:`hold_kernels` allows it."""
        if self._held is None or self.method.kernel is None:
            return
        for table in self.train:
            self._kernels(table, self.method.kernel)
            yield

    @property
    def manifest(self) -> Manifest:
        """Settings and versions that the rows were made with."""
        return self.store.manifest

    def columns(self) -> dict[str, Column]:
        """Return the stored columns of the train rows by name."""
        return stored_columns(self.store)

    @property
    def num_rows(self) -> int:
        """N."""
        return self.train[0].spec.num_rows

    @property
    def width(self) -> int:
        """K."""
        return self._layout.width

    @property
    def num_checkpoints(self) -> int:
        """C."""
        return len(self.train)

    @property
    def num_targets(self) -> int:
        """M."""
        return self._targets(self.train[0]).spec.num_rows

    @property
    def target_identity(self) -> Mapping[str, Any]:
        """JSON values that identify the targets, and their task if it is not that of the train rows."""
        found: Mapping[str, Any] = self._targets(self.train[0]).spec.fingerprint.get("targets", {})
        return found

    def target_contents(self) -> list[str]:
        """Return a digest of the stored target rows of every checkpoint."""
        return [self._targets(table).content_key() for table in self.train]

    def terms(self, targets: slice | NDArray[np.int64] = slice(None)) -> list[ScoreTerm]:
        """Return one term per checkpoint, with the targets multiplied by (H + lambda I)^-1 and the weight.

        Args:
            targets: Targets to select.

        Raises:
            SingularKernelError: If a kernel is singular at the method's damping.
        """
        kernel = self.method.kernel
        if kernel is not None:
            paths = [table_path(table) for table in self.train]
            make_grams(self.store, paths, kernel, self._layout, device=self.device, ranks=self.ranks)
        transform = self._transformed if transforms_rows(self.method) else None
        return [
            ScoreTerm(table, (self._behind_kernel(table, targets) * weight).float(), transform)
            for table, weight in zip(self.train, self._weights, strict=True)
        ]

    def gram_of_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the products of some train rows with each other, ``(rows, rows)`` float64 where the device has it.

        In contrast to scores, both sides are multiplied by q, and checkpoints by the absolute value of their weight.
        """
        size = (len(rows), len(rows))
        total = torch.zeros(size, dtype=wide_dtype(self.device), device=self.device)
        for own, solved in self._metric_rows(rows):
            total += own @ solved.T
        return (total + total.T) / 2

    def terms_of_rows(self, rows: NDArray[np.int64], coefficients: Tensor) -> list[ScoreTerm]:
        """Return one term per checkpoint for combinations of the rows of :meth:`gram_of_rows` as targets.

        Args:
            rows: Train rows.
            coefficients: ``(rows, R)``, one column per target.
        """
        transform = self._transformed if transforms_rows(self.method) else None
        terms = []
        parts = zip(self.train, self._weights, self._metric_rows(rows), strict=True)
        for table, weight, (_, solved) in parts:
            targets = coefficients.to(solved).T @ solved * abs(weight) ** 0.5
            terms.append(ScoreTerm(table, targets.float(), transform))
        return terms

    def path_terms(self, dampings: Sequence[float | None], targets: slice = slice(None)) -> list[ScoreTerm]:
        """Return one term per checkpoint, with the targets at every damping, ``(L * M, K)``, dampings first.

        Args:
            dampings: Lambdas in units of the mean eigenvalue; ``None`` is the default damping.
            targets: Targets to select.

        Raises:
            InvalidInputError: If the method has no kernel.
            SingularKernelError: If a kernel is singular at a damping.
        """
        kernel = self.method.kernel
        if kernel is None:
            raise InvalidInputError(
                f"{self.method.name} has no kernel, so it has no damping. Use the damping path of scores of "
                "GaussNewton, Fisher or TRAK."
            )
        terms = []
        for table, weight in zip(self.train, self._weights, strict=True):
            path, fisher = table_path(table), fisher_of(self.method)
            grams = grams_of(self.store, path, kernel, self._layout, device=self.device, fisher=fisher)
            eigen = eigenpath_segments(grams, layout=self._layout)
            solved = precondition_path(
                self._rows(table, targets),
                eigen,
                dampings,
                layout=self._layout,
                num_rows=self.num_rows,
                settings=kernel,
            )
            terms.append(ScoreTerm(table, (solved * weight).flatten(0, 1).float()))
        return terms

    def tiles(
        self,
        terms: Sequence[ScoreTerm] | None = None,
        *,
        chunk_rows: int | None = None,
        share: tuple[int, int] = (0, 1),
        wanted: NDArray[np.bool_] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(first row, scores)`` for all train rows in order, bitwise equal to a stored score table.

        Args:
            terms: One term per checkpoint; ``None`` calls :meth:`terms`.
            chunk_rows: Rows per chunk of the score table; ``None`` is that of a table of all targets.
            share: ``(r, n)`` yields the r-th of n parts of the chunks.
            wanted: ``(N,)`` leaves out tiles without a wanted row; their train rows are not read.
        """
        terms = self.terms() if terms is None else terms
        if chunk_rows is None:
            chunk_rows = score_table_spec(self.num_rows, len(terms[0].targets), {}).chunk_rows
        for rows in tile_ranges(self.num_rows, chunk_rows, share=share):
            if wanted is None or wanted[rows.start : rows.stop].any():
                yield rows.start, self.scores_of(rows, terms)

    def row_factors(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the factors (q, its mean, or 1) of some train rows' products with targets, ``(C, rows)``."""
        own = np.stack([table.read_rows(OUT_TO_LOSS, rows) for table in self.train]).astype(np.float64)
        if self.method.q == "off":
            return np.ones_like(own)
        return own if self.method.q == "inside" else np.broadcast_to(own.mean(0), own.shape)

    def row_features(self, rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return the stored features of some train rows, ``(rows, K)`` for each checkpoint."""
        return [table.read_rows(FEATURES, rows) for table in self.train]

    def scores_of(self, rows: range | NDArray[np.int64], terms: Sequence[ScoreTerm] | None = None) -> Tensor:
        """Return the scores of some train rows, ``(rows, M)`` float32."""
        terms = self.terms() if terms is None else terms
        return score_tile(terms, rows, q=self.method.q, device=self.device)

    def self_influence(self) -> NDArray[np.float32]:
        """Return the score of every train row for itself, ``(N,)``.

        Raises:
            InvalidInputError: If target rows cannot be computed from stored train rows: the method multiplies targets
                by an inverse curvature before they are projected, or the train rows are Adam updates.
        """
        if row_kind(self.manifest) == "adam_update":
            raise InvalidInputError(
                "Self-influence needs the gradients of train rows, and these are Adam updates (normalize="
                "'adam_update'). Score the train data as targets and take the diagonal."
            )
        if isinstance(self.method, AbstractInverseMethod):
            raise InvalidInputError(
                f"Self-influence with {self.method.name} needs train rows multiplied by the inverse curvature, but "
                "only targets are. Use another method, or score the train data as targets and take the diagonal."
            )
        total = np.zeros(self.num_rows)
        out_to_loss = np.zeros(self.num_rows)
        for table, weight in zip(self.train, self._weights, strict=True):
            own = self._own_products(table)
            products = ((first, own(as_tensor(rows, self.device))) for first, rows in table.blocks(FEATURES))
            parts = [part.astype(np.float64) for _, part in copied_ahead(products)]
            q = table.read(OUT_TO_LOSS).astype(np.float64)
            total += weight * np.concatenate(parts) * (q if self.method.q == "inside" else 1.0)
            out_to_loss += q
        if self.method.q == "outside":
            total *= out_to_loss / len(self.train)
        return total.astype(np.float32)

    def standard_error(
        self, rows: NDArray[np.int64] | None, targets: slice, runs: Sequence[Hashable] | None
    ) -> NDArray[np.float32]:
        """Return the standard errors of the scores of some or all (``None``) train rows, ``(rows, targets)``."""
        groups = self.groups(runs)
        terms = self.terms(targets)
        plan: Iterable[range] | Iterable[NDArray[np.int64]]
        if rows is None:
            chunk_rows = score_table_spec(self.num_rows, len(terms[0].targets), {}).chunk_rows
            plan = tile_ranges(self.num_rows, chunk_rows)
        else:
            plan = rows_in_batches(rows, _PAIR_ROWS)
        out = np.empty((self.num_rows if rows is None else len(rows), len(terms[0].targets)), np.float32)
        done = 0
        errors = (
            (len(part), error_tile(terms, groups, part, q=self.method.q, device=self.device)) for part in plan
        )
        for count, tile in copied_ahead(errors):
            out[done : done + count] = tile
            done += count
        return out

    def pair_errors(self, rows: NDArray[np.int64], runs: Sequence[Hashable] | None) -> NDArray[np.float32]:
        """Return the standard errors of the scores of rows ``rows[j]`` for target j, ``(M, k)``."""
        groups = self.groups(runs)
        terms = self.terms()
        wanted = np.unique(rows)
        out = np.empty(rows.shape, np.float32)
        for part in rows_in_batches(wanted, _PAIR_ROWS):
            tile = error_tile(terms, groups, part, q=self.method.q, device=self.device).cpu().numpy()
            here = (rows >= part[0]) & (rows <= part[-1])
            target, _ = np.nonzero(here)
            out[here] = tile[np.searchsorted(part, rows[here]), target]
        return out

    def reliability(self, runs: Sequence[Hashable] | None, *, threshold: float, max_rows: int) -> Reliability:
        """Return the agreement of checkpoints or runs on ``max_rows`` evenly spaced train rows."""
        groups = self.groups(runs)
        rows = spread_rows(self.num_rows, max_rows)
        width = max(1, _RANKED_VALUES // (len(rows) * len(groups)))
        single = []
        for start in range(0, self.num_targets, width):
            terms = self.terms(slice(start, start + width))
            single.append(agreement([self._group_scores(terms, group, groups, rows) for group in groups]))
        found = torch.cat(single)
        expected = expected_agreement(found, len(groups)).cpu().numpy()
        return Reliability(found.cpu().numpy(), expected, expected >= threshold)

    def pairwise_agreement(self, *, max_rows: int, max_targets: int) -> NDArray[np.float64]:
        """Return the Spearman correlations of every two checkpoints' rankings, ``(C, C)``, averaged over targets.

        Args:
            max_rows: Number of evenly spaced train rows to rank.
            max_targets: Number of evenly spaced targets to average over.
        """
        groups = self.groups(None)
        rows = spread_rows(self.num_rows, max_rows)
        terms = self.terms(every_nth(self.num_targets, max_targets))
        own = [self._group_scores(terms, group, groups, rows) for group in groups]
        found = np.eye(len(own))
        for a, b in combinations(range(len(own)), 2):
            found[a, b] = found[b, a] = float(agreement([own[a], own[b]]).mean())
        return found

    def groups(self, runs: Sequence[Hashable] | None) -> list[list[int]]:
        """Return the checkpoint numbers of each run in order of first appearance; ``None`` makes each a group.

        Raises:
            InvalidInputError: If there is not one label per checkpoint, there is only one group, or checkpoint weights
                have both signs and ``runs`` is ``None``.
        """
        if runs is None and min(self._weights) < 0 < max(self._weights):
            raise InvalidInputError(
                f"checkpoint_weights {self._weights} have both signs, so the checkpoints are not repeats of one "
                "measurement. Group them: runs=[...], one label per checkpoint."
            )
        labels = list(range(len(self.train))) if runs is None else list(runs)
        if len(labels) != len(self.train):
            raise InvalidInputError(
                f"runs has {len(labels)} labels, but {len(self.train)} checkpoints were scored. Give one label per "
                "checkpoint, in their order."
            )
        groups: dict[Hashable, list[int]] = {}
        for place, label in enumerate(labels):
            groups.setdefault(label, []).append(place)
        if len(groups) < 2:
            raise InvalidInputError(
                f"Uncertainty needs at least 2 {'checkpoints' if runs is None else 'runs'}, got {len(groups)}. "
                "Featurize more checkpoints: those of one run cost no training."
            )
        return list(groups.values())

    def _group_scores(
        self,
        terms: Sequence[ScoreTerm],
        group: Sequence[int],
        groups: Sequence[Sequence[int]],
        rows: NDArray[np.int64],
    ) -> Tensor:
        """Return the scores of a group of checkpoints alone, ``(rows, M)``."""
        q = self.method.q
        products, factors = group_tile(terms, group, len(groups), rows, q=q, device=self.device)
        return products if factors is None else products * factors.to(products)[:, None]

    def _behind_kernel(self, table: AbstractRowTable, targets: slice | NDArray[np.int64]) -> Tensor:
        """Return a checkpoint's targets multiplied by (H + lambda I)^-1, or transformed, ``(M, K)``."""
        rows = self._rows(table, targets)
        kernel = self.method.kernel
        if kernel is None:
            return _same_shape(self.method.transform_targets(rows, self._layout), rows, self.method).float()
        if self.ranks.rank == 0:
            rows = precondition(rows, self._kernels(table, kernel), layout=self._layout)
        rows = rows.to(wide_dtype(self.device))
        self.ranks.send_to_all(rows)
        return rows

    def _metric_rows(self, rows: NDArray[np.int64]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some train rows, and these multiplied by (H + lambda I)^-1, ``(rows, K)``, for each checkpoint.

        Both are multiplied by q and by the root of the absolute weight of the checkpoint.
        """
        for table, weight, q in zip(self.train, self._weights, self.row_factors(rows), strict=True):
            found = torch.from_numpy(table.read_rows(FEATURES, rows)).to(self.device)
            if transforms_rows(self.method):
                found = self._transformed(found)
            wide = found.to(wide_dtype(self.device))
            wide = wide * torch.from_numpy(q * abs(weight) ** 0.5).to(wide)[:, None]
            kernel = self.method.kernel
            if kernel is None:
                yield wide, wide
            else:
                yield wide, precondition(wide, self._kernels(table, kernel), layout=self._layout).to(wide)

    def _own_products(self, table: AbstractRowTable) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the product of each train row with itself, ``(b, K) -> (b,)``."""
        kernel = self.method.kernel
        if kernel is not None:
            kernels = self._kernels(table, kernel)
            return lambda rows: self_scores(rows, kernels, layout=self._layout)

        def own(rows: Tensor) -> Tensor:
            wide = rows.to(wide_dtype(rows.device))
            return (self._transformed(wide) * self.method.transform_targets(wide, self._layout)).sum(1)

        return own

    def _transformed(self, rows: Tensor) -> Tensor:
        return _same_shape(self.method.transform(rows, self._layout), rows, self.method)

    def _kernels(self, table: AbstractRowTable, kernel: KernelSettings) -> list[SegmentKernel]:
        if self._held is None:
            return self._new_kernels(table, kernel)
        key = f"{table_path(table)} {table.content_key()}"
        if key not in self._held:
            self._held[key] = self._new_kernels(table, kernel)
        return self._held[key]

    def _new_kernels(self, table: AbstractRowTable, kernel: KernelSettings) -> list[SegmentKernel]:
        path, fisher = table_path(table), fisher_of(self.method)
        kernels = kernels_of(self.store, path, kernel, self._layout, device=self.device, fisher=fisher)
        pairs = zip(self._layout.segments, kernels, strict=True)
        lost = [segment.name for segment, found in pairs if not found.multiplier]
        if not self._named.issuperset(lost):
            self._named.update(lost)
            logger.warning(
                "The kernel of module %s is zero or beneath the smallest normal number: it contributes nothing to the "
                "scores %r.",
                some_of(map(repr, lost)),
                self.name,
            )
        return kernels

    def _rows(self, table: AbstractRowTable, targets: slice | NDArray[np.int64]) -> Tensor:
        """Return the target features of a checkpoint, ``(M, K)``."""
        return torch.from_numpy(self._targets(table).read(FEATURES)[targets]).to(self.device)

    def _targets(self, table: AbstractRowTable) -> AbstractRowTable:
        return self.store.open_table(target_table_path(self.name, self.method, table))


def transforms_rows(method: AbstractMethod) -> bool:
    """Whether a method changes rows before the product."""
    own = type(method)
    return (
        own.transform is not AbstractMethod.transform
        or own.transform_targets is not AbstractMethod.transform_targets
    )


def _same_shape(transformed: Tensor, rows: Tensor, method: AbstractMethod) -> Tensor:
    """Return transformed rows; raise if their shape has changed."""
    if transformed.shape != rows.shape:
        raise InvalidInputError(
            f"{method.name}.transform returned the shape {tuple(transformed.shape)} for rows {tuple(rows.shape)}. "
            "Return the same shape."
        )
    return transformed
