"""Compute the scores of one target set from stored rows, settings and kernels.

Shapes: N train rows, M targets, K feature width, C checkpoints, L dampings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import copied_ahead, wide_dtype
from trak_lite.core.json_text import digest_of
from trak_lite.core.ranks import Ranks
from trak_lite.core.validate import some_of
from trak_lite.errors import InvalidInputError, NonFiniteError, StateError
from trak_lite.featurizing.row_checks import STEPS
from trak_lite.linalg.kernel import SegmentKernel, precondition
from trak_lite.linalg.products import product_dtype, self_scores
from trak_lite.methods import METHODS, AbstractMethod
from trak_lite.run import tables
from trak_lite.scoring.grams import Grams
from trak_lite.scoring.tiles import ScoreTerm, score_tile, tile_ranges
from trak_lite.store import AbstractFeatureStore, AbstractRowTable
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.types import FeatureLayout

logger = logging.getLogger(__name__)

_HELD_BYTES = 2 << 30
HeldKernels: TypeAlias = dict[str, list[SegmentKernel]]
"""Factorised kernels by the content of the train rows."""


@final
@dataclass(eq=False, repr=False)
class ScoreSource:
    """Computes scores, their errors and self-influence from stored train and target rows. It stores no scores."""

    store: AbstractFeatureStore
    train: Sequence[AbstractRowTable]
    """Tables of the train rows, one per checkpoint."""
    name: str
    """Of the target set."""
    method: AbstractMethod
    _: KW_ONLY
    layout: FeatureLayout
    """Segments of a feature row: given as stored, kept as the method uses them."""
    target_identity: Mapping[str, Any]
    """JSON values that identify the targets, and their task if it is not that of the train rows."""
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    """All of them call :meth:`terms` at the same time and compute the kernels together."""

    def __post_init__(self) -> None:
        kernel, method = self.method.kernel, self.method
        if kernel is not None and method.transforms_rows:
            raise InvalidInputError(
                f"{method.name} has a kernel and overrides transform(), which is used only without a kernel. Return "
                "None as kernel, or remove transform()."
            )
        self.weights, self.layout = method.weights(len(self.train)), method.layout_of(self.layout)
        self._grams: Grams | None = None
        if kernel is not None:
            self._grams = Grams(self.store, kernel, self.layout, self.device, method.fisher_fit)
        self._held: HeldKernels | None = None
        self._named: set[str] = set()
        """Modules that were named in the log: without a contribution, or with nothing but rounding in a direction."""

    def hold_kernels(self, held: HeldKernels) -> None:
        """Use factorised kernels again, as long as those of all checkpoints take at most 2 GiB.

        Sources of the same method and layout may share ``held``.
        """
        if len(self.train) * sum(segment.width**2 for segment in self.layout.segments) * 8 <= _HELD_BYTES:
            self._held = held

    def factorise(self) -> Iterator[None]:
        """Factorise the kernels of one checkpoint at each step and hold them, if :meth:`hold_kernels` allows it."""
        if self._held is not None and self._grams is not None:
            for table in self.train:
                self._kernels(table, self._grams)
                yield

    @property
    def num_rows(self) -> int:
        """N."""
        return self.train[0].spec.num_rows

    @property
    def digests(self) -> list[str]:
        """Digest of the weights of every checkpoint."""
        return [table.spec.fingerprint["weights"] for table in self.train]

    @property
    def num_targets(self) -> int:
        """M."""
        return self.targets_of(self.train[0]).spec.num_rows

    def targets_of(self, table: AbstractRowTable) -> AbstractRowTable:
        """Return the stored targets of the checkpoint of a train table, as the method reads them.

        Raises :class:`StateError` if they are of other targets, or of other weights with the same path.
        """
        targets = self.store.open_table(tables.target_table_path(self.name, self.method, table))
        if not _are_of(targets, table, self.target_identity):
            raise StateError(
                f"The features of the targets {self.name!r} at {tables.table_path(table)} are no longer those of these "
                "scores: they were dropped, and are now of other targets or weights. Score again, under another name."
            )
        return targets

    def check_targets(self) -> None:
        """Raise if stored targets are of fewer train rows, or are not the same at every checkpoint.

        Targets that are multiplied by a curvature depend on the train rows that it was fitted to. ``store.merge`` of
        two copies in which a name has other targets gives a store with both.
        """
        identity = self.target_identity
        curvature = identity.get("curvature") if isinstance(identity, Mapping) else None
        fitted = curvature.get("dataset") if isinstance(curvature, Mapping) else None
        if fitted not in (None, digest_of(self.store.manifest.fingerprint.get("dataset", {}))):
            raise StateError(
                f"The targets {self.name!r} are multiplied by a curvature that was fitted to fewer train rows than the "
                f"store has now. Score under another name, or drop_scores({self.name!r}) and score again."
            )
        first, *others = self.train
        for table in others:
            targets = self.store.open_table(tables.target_table_path(self.name, self.method, table))
            compare_fingerprints(
                {"targets": targets.spec.fingerprint.get("targets", {})},
                {"targets": identity},
                where=f"{self.name!r} at {tables.table_path(table)}",
                remedy=f"Here is {tables.table_path(first)}. Call drop_scores({self.name!r}, features=True), and score "
                "each set of targets under a name of its own.",
            )

    def terms(self, targets: slice | NDArray[np.int64] = slice(None)) -> list[ScoreTerm]:
        """Return one term per checkpoint, with some targets multiplied by (H + lambda I)^-1 and the weight."""
        grams, dtype = self._grams, torch.float32
        if grams is not None:
            grams.make(self.train, self.ranks)
            # The trace, which lambda_reg is small or large against, is not known yet.
            is_absolute = grams.settings.lambda_reg is not None
            dtype = wide_dtype(self.device) if is_absolute else self.product_dtype(grams.settings.damping)
        terms = []
        for table, weight in zip(self.train, self.weights, strict=True):
            rows = self._rows(table, targets)
            if grams is None:
                solved = self._transformed(rows, self.method.transform_targets).float()
            else:
                if self.ranks.rank == 0:
                    rows = precondition(rows, self._kernels(table, grams), layout=self.layout)
                solved = rows.to(wide_dtype(self.device))
                self.ranks.send_to_all(solved)
            terms.append(ScoreTerm(table, (solved * weight).to(dtype), self._transformed))
        return terms

    def gram_of_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the products of some train rows with each other, ``(rows, rows)`` float64 where the device has it.

        In contrast to scores, both sides are multiplied by q, and checkpoints by the absolute value of their weight.
        """
        size = (len(rows), len(rows))
        total = torch.zeros(size, dtype=wide_dtype(self.device), device=self.device)
        for features, solved in self._metric_rows(rows):
            total += features @ solved.T
        return (total + total.T) / 2

    def terms_of_rows(self, rows: NDArray[np.int64], coefficients: Tensor) -> list[ScoreTerm]:
        """Return one term per checkpoint for combinations of the rows of :meth:`gram_of_rows` as targets.

        A target is a column of ``coefficients``, ``(rows, R)``.
        """
        terms = []
        parts = zip(self.train, self.weights, self._metric_rows(rows), strict=True)
        for table, weight, (_, solved) in parts:
            targets = coefficients.to(solved).T @ solved * abs(weight) ** 0.5
            terms.append(ScoreTerm(table, targets.float(), self._transformed))
        return terms

    def path_terms(self, dampings: Sequence[float | None], targets: slice = slice(None)) -> list[ScoreTerm]:
        """Return one term per checkpoint, with some targets at every damping, ``(L * M, K)``, dampings first.

        Raises :class:`InvalidInputError` if the method has no kernel.
        """
        if self._grams is None:
            raise InvalidInputError(
                f"{self.method.name} has no kernel, so it has no damping. Use the damping path of scores of "
                "GaussNewton, Fisher or TRAK."
            )
        terms = []
        for table, weight in zip(self.train, self.weights, strict=True):
            solved = torch.cat([rows * weight for rows in self.at_dampings(table, dampings, targets)])
            terms.append(ScoreTerm(table, solved.to(self.product_dtype(*dampings))))
        return terms

    def product_dtype(self, *dampings: float | None) -> torch.dtype:
        """Return the dtype of targets that were multiplied by (H + lambda I)^-1 at these dampings."""
        width = max(segment.width for segment in self.layout.segments)  # the trace in units of the damping
        return product_dtype(dampings, width, rank=min(self.num_rows, width), device=self.device)

    def tiles(
        self,
        terms: Sequence[ScoreTerm] | None = None,
        *,
        share: tuple[int, int] = (0, 1),
        wanted: NDArray[np.bool_] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(first row, scores)`` for all train rows in order, bitwise equal to a stored score table.

        ``share`` ``(r, n)`` yields the r-th of n parts of the chunks. ``wanted`` ``(N,)`` leaves out tiles without a
        wanted row; their train rows are not read.
        """
        terms = self.terms() if terms is None else terms
        chunk_rows = tables.score_table_spec(self.num_rows, len(terms[0].targets), {}).chunk_rows
        for rows in tile_ranges(self.num_rows, chunk_rows, share=share):
            if wanted is None or wanted[rows.start : rows.stop].any():
                yield rows.start, self.scores_of(rows, terms)

    def row_factors(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the factors (q, its mean, or 1) of some train rows' products with targets, ``(C, rows)``."""
        q = np.stack([table.read_rows(tables.OUT_TO_LOSS, rows) for table in self.train]).astype(np.float64)
        if self.method.q == "off":
            return np.ones_like(q)
        return q if self.method.q == "inside" else np.broadcast_to(q.mean(0), q.shape)

    def row_features(self, rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return the stored features of some train rows, ``(rows, K)`` for each checkpoint."""
        return [table.read_rows(tables.FEATURES, rows) for table in self.train]

    def mean_out_to_loss(self) -> NDArray[np.float64]:
        """Return the mean q of every train row over checkpoints, ``(N,)``."""
        mean: NDArray[np.float64] = np.mean(
            [table.read(tables.OUT_TO_LOSS) for table in self.train], axis=0, dtype=np.float64
        )
        return mean

    def plain_targets(self) -> list[Tensor] | None:
        """Return the target features of every checkpoint, ``(M, K)`` float64.

        ``None`` if a checkpoint has none of them that are not multiplied by an inverse curvature: EKFAC scores do not
        need any.
        """
        paths = [tables.target_path(self.name, tables.model_id_of(table)) for table in self.train]
        if not set(paths) <= set(self.store.table_names(tables.plain_target_folder(self.name))):
            return None
        plain, identity = (
            [self.store.open_table(path) for path in paths],
            tables.without_fit(self.target_identity),
        )
        if not all(
            _are_of(targets, table, identity) for targets, table in zip(plain, self.train, strict=True)
        ):
            return None
        rows = (torch.from_numpy(targets.read(tables.FEATURES)) for targets in plain)
        return [features.to(self.device, torch.float64) for features in rows]

    def at_dampings(
        self, table: AbstractRowTable, dampings: Sequence[float | None], targets: slice = slice(None)
    ) -> Iterator[Tensor]:
        """Yield some targets of a checkpoint multiplied by (H + lambda I)^-1 at other dampings, ``(M, K)`` each."""
        assert self._grams is not None  # the caller has checked the method
        rows = self._rows(table, targets)
        for kernels in self._grams.at_dampings(table, dampings):
            self._name_rounded(table, kernels)
            solved = precondition(rows, kernels, layout=self.layout)
            del kernels  # before those of the next damping are made
            yield solved

    def scores_of(self, rows: range | NDArray[np.int64], terms: Sequence[ScoreTerm] | None = None) -> Tensor:
        """Return the scores of some train rows, ``(rows, M)`` float32."""
        terms = self.terms() if terms is None else terms
        return score_tile(terms, rows, q=self.method.q)

    def self_influence(self) -> NDArray[np.float32]:
        """Return the score of every train row for itself, ``(N,)``.

        Raises :class:`InvalidInputError` if target rows cannot be computed from stored train rows, and
        :class:`NonFiniteError` if a product is beyond float32.
        """
        if tables.row_kind(self.store.manifest) == "adam_update":
            raise InvalidInputError(
                "Self-influence needs the gradients of train rows, and these are Adam updates (normalize="
                "'adam_update'). Score the train data as targets and take the diagonal."
            )
        if self.method.inverse is not None:
            raise InvalidInputError(
                f"Self-influence with {self.method.name} needs train rows multiplied by the inverse curvature, but "
                "only targets are. Use another method, or score the train data as targets and take the diagonal, "
                "times q for the influence on the loss."
            )
        total = np.zeros(self.num_rows)
        out_to_loss = np.zeros(self.num_rows)
        for table, weight in zip(self.train, self.weights, strict=True):
            self_products = self._own_products(table)
            products = (
                (first, self_products(tables.as_tensor(rows, self.device)))
                for first, rows in table.blocks(tables.FEATURES)
            )
            parts = [part.astype(np.float64) for _, part in copied_ahead(products)]
            q = table.read(tables.OUT_TO_LOSS).astype(np.float64)
            total += weight * np.concatenate(parts) * (q if self.method.q == "inside" else 1.0)
            out_to_loss += q
        if self.method.q == "outside":
            total *= out_to_loss / len(self.train)
        with np.errstate(over="ignore"):
            scores: NDArray[np.float32] = total.astype(np.float32)
        beyond = np.flatnonzero(~np.isfinite(scores))
        if beyond.size:
            raise NonFiniteError(
                f"The self-influence of rows {beyond[:5].tolist()} is beyond float32: products of their features are "
                "too large. Multiply f by a constant, so that its gradients are smaller."
            )
        return scores

    def _metric_rows(self, rows: NDArray[np.int64]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some train rows, and these multiplied by (H + lambda I)^-1, ``(rows, K)``, for each checkpoint.

        Both are multiplied by q and by the root of the absolute weight of the checkpoint.
        """
        for table, weight, q in zip(self.train, self.weights, self.row_factors(rows), strict=True):
            features = torch.from_numpy(table.read_rows(tables.FEATURES, rows)).to(self.device)
            wide = self._transformed(features).to(wide_dtype(self.device))
            wide = wide * torch.from_numpy(q * abs(weight) ** 0.5).to(wide)[:, None]
            if self._grams is None:
                yield wide, wide
            else:
                kernels = self._kernels(table, self._grams)
                yield wide, precondition(wide, kernels, layout=self.layout).to(wide)

    def _own_products(self, table: AbstractRowTable) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the product of each train row with itself, ``(b, K) -> (b,)``."""
        if self._grams is not None:
            kernels = self._kernels(table, self._grams)
            return lambda rows: self_scores(rows, kernels, layout=self.layout)

        def own(rows: Tensor) -> Tensor:
            wide = rows.to(wide_dtype(rows.device))
            return (self._transformed(wide) * self._transformed(wide, self.method.transform_targets)).sum(1)

        return own

    def _transformed(self, rows: Tensor, transform: Callable[..., Tensor] | None = None) -> Tensor:
        """Return rows as changed by ``transform``, by default that of the method for train rows.

        A method of a user's own may write into its argument, and rows can be the memory of a store: it gets a copy.
        """
        method = self.method
        is_own = method.transforms_rows and method.name not in METHODS
        transformed = (transform or method.transform)(rows.clone() if is_own else rows, self.layout)
        if transformed.shape != rows.shape:
            name = "transform" if transform is None else "transform_targets"
            raise InvalidInputError(
                f"{method.name}.{name} returned the shape {tuple(transformed.shape)} for rows {tuple(rows.shape)}. "
                "Return the same shape."
            )
        return transformed

    def _kernels(self, table: AbstractRowTable, grams: Grams) -> list[SegmentKernel]:
        key = "" if self._held is None else f"{tables.table_path(table)} {table.content_key()}"
        if self._held is not None and key in self._held:
            return self._held[key]
        kernels = grams.kernels(table)
        self._name_rounded(table, kernels)
        if self._held is not None:
            self._held[key] = kernels
        return kernels

    def _name_rounded(self, table: AbstractRowTable, kernels: Sequence[SegmentKernel]) -> None:
        """Name modules in the log whose kernel amplifies the rounding of rows, or contributes nothing."""
        pairs = [*zip(self.layout.segments, kernels, strict=True)]
        dtype = next(column.dtype for column in table.spec.columns if column.name == tables.FEATURES)
        of_rows = self._grams is not None and self._grams.fisher is None
        lost = [segment.name for segment, kernel in pairs if not kernel.multiplier]
        rounded = [s.name for s, kernel in pairs if of_rows and _is_rounded(kernel, dtype)]
        if not self._named.issuperset(rounded):
            self._named.update(rounded)
            logger.warning(
                "The kernel of module %s has no damping, and directions no larger than the rounding of rows to %s (as "
                "that of a whole softmax layer, which is singular), which the scores %r amplify. Use damping=None (a "
                "share of the eigenvalues), fewer features, or rows in float32 (Attributor: dtype='float32').",
                some_of(map(repr, rounded)),
                dtype,
                self.name,
            )
        if not self._named.issuperset(lost):
            self._named.update(lost)
            logger.warning(
                "The kernel of module %s is zero or beneath the smallest normal number%s: it contributes nothing to "
                "the scores %r.",
                some_of(map(repr, lost)),
                "" if dtype == "float32" else f", perhaps because rows are stored in {dtype}",
                self.name,
            )

    def _rows(self, table: AbstractRowTable, targets: slice | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.targets_of(table).read(tables.FEATURES)[targets]).to(self.device)


def _are_of(targets: AbstractRowTable, train: AbstractRowTable, identity: Mapping[str, Any]) -> bool:
    """Return whether stored targets have this identity and the weights of a train table."""
    there, weights = targets.spec.fingerprint, train.spec.fingerprint.get("weights")
    described = {"weights": there.get("weights"), "targets": there.get("targets", {})}
    return digest_of(described) == digest_of({"weights": weights, "targets": identity})


def _is_rounded(kernel: SegmentKernel, dtype: str) -> bool:
    """Whether a feature is a combination of others but for the rounding of rows to ``dtype``, without damping."""
    if kernel.lambda_reg or dtype == "float32":  # whose rounding is that of a singular matrix
        return False
    rounding = 1 / STEPS[dtype] if dtype in STEPS else torch.finfo(getattr(torch, dtype)).eps
    lengths = torch.linalg.vector_norm(kernel.factor, dim=1)  # roots of the diagonal of the kernel
    return bool((kernel.factor.diagonal() < 2 * rounding * lengths).any())
