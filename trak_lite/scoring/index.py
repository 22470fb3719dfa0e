r"""An index of stored rows: a narrow table that is scanned for candidates of the strongest rows, which are then scored.

The scores of train row i are inner products of its effective row z (features of all checkpoints times q) with the
targets. The index stores R numbers per row in int4: z in the metric of the method, (H + lambda I)^-1, projected to its
principal directions and randomly rotated, so that the R numbers are of equal size. The directions come from s sampled
train rows with the effective rows Z and the gram matrix :math:`G = Z (H + \lambda I)^{-1} Z^T`. With coefficients A
(s, R) of its leading eigenvectors, divided by the roots of the eigenvalues,

- the numbers of a train row are its scores for R targets, :math:`A^T Z (H + \lambda I)^{-1}`,
- the numbers of a target are its scores of the sampled rows, multiplied by A,

so the index is computed, shared between processes and resumed like a table of scores.

The share of the strongest rows that are among the c best candidates (recall) is measured on some targets of each set,
whose exact rows are found. Its lower bound (Hoeffding, J. Am. Stat. Assoc. 58, 1963, theorem 1) sets c for this set:
of targets of another set it says nothing.

Shapes: N train rows, M targets, C checkpoints, K feature width, s sampled rows, R directions, k top rows, c candidates.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import copied_ahead, eigh_of_positive, full_float32
from trak_lite.core.json_text import digest_of
from trak_lite.data.batches import rows_in_batches
from trak_lite.errors import BusyError
from trak_lite.linalg.topk import TopRows
from trak_lite.run.tables import FEATURES, as_tensor, index_paths
from trak_lite.scoring.matrix import best_of, top_and_bottom, top_and_bottom_of
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.tiles import ScoreTerm, score_rows
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, TableSpec
from trak_lite.store._grid import chunk_rows_for
from trak_lite.store.sharing import SharedRows

logger = logging.getLogger(__name__)

_VERSION: Final = 1
"""Part of the identity of an index. Increase it when you change how its rows are computed."""
_DTYPE: Final = "int4"
_SHARE: Final = 0.95
"""Share of the squared norm of the sampled rows, in the metric of the method, that the directions keep."""
_MOST_DIRECTIONS: Final = 1024
_SAMPLED_PER_DIRECTION: Final = 4
_SAMPLED_VALUES: Final = 1 << 24
"""Entries of the sampled rows of one checkpoint; at least 1024 rows are sampled."""
_COEFFICIENTS: Final = "coefficients"

_FACTOR: Final = 64
"""Largest number of candidates, as a multiple of k."""
_LOOKS: Final = (128, 512, 2048)
"""Numbers of measured targets that bounds are computed from; no more are measured than the last one."""
_DOUBT: Final = 0.05 / (2 * len(_LOOKS))
"""Probability that one bound is wrong: of one end, at one number of targets."""
_NOWHERE: Final = 1 << 40
"""Place of a row that is not among the candidates."""

_SCANNED_TARGETS: Final = 4096
_SCANNED_VALUES: Final = 1 << 23
"""Coarse scores per tile, unless a tile has fewer rows than :data:`_LEAST_SCANNED_ROWS`."""
_LEAST_SCANNED_ROWS: Final = 4096
_DECODED_ROWS: Final = 1024
_SCORED_TARGETS: Final = 16
"""Targets whose candidates are scored together."""
_SCORED_ROWS: Final = 1024


def indexed_top(
    source: ScoreSource, identity: Mapping[str, Any], k: int, recall: float
) -> tuple[NDArray[np.float64], dict[str, float | int]]:
    """Return the strongest rows of every target by the index of its method; build and measure it if needed.

    As long as too few targets of the set were measured for a lower bound of ``recall``, all rows are scored for some of
    them, and the candidates that the index would have found are compared with the exact rows. These measurements are
    stored. All rows are scored for a set that has no more targets than a bound needs. Without a store that is open for
    writing, only a complete index is used.

    ``identity`` has the ``"method"``, the ``"checkpoints"`` and the ``"train_rows"`` (contents) of the scores. Returns
    the rows, as of :func:`~trak_lite.scoring.matrix.top_and_bottom`, and what to show with the scores; nothing if all
    rows were scored, so that the rows are exact. ``"recall"`` is the mean share of the exact k rows that are among the
    candidates, over the measured targets, of the worse end; ``"recall_at_least"`` is a lower bound of the expected
    recall of the targets of the set, which both ends reach with a probability of 95 %.
    """
    terms = source.terms()
    # A set with no more targets than a bound needs gets exact rows: an index would not be used.
    is_small = source.num_rows <= _FACTOR * k or source.num_targets <= (_needed(0, recall) or 0)
    index = None if is_small else _built(source, identity)
    if index is None:
        return top_and_bottom(source, k, terms), {}
    pool = index.pool(k)
    chosen = pool.candidates(k, recall)
    needed = _needed(len(pool.targets), recall)
    if chosen is None and needed is not None:
        sample = _scattered(source.num_targets, needed)
        part = _of_targets(terms, sample)
        exact = top_and_bottom(source, pool.k, part)
        if len(sample) == source.num_targets:
            return exact[..., :k], {}
        pool = pool.with_targets(sample, index.places(part, exact))
        index.keep(pool)
        chosen = pool.candidates(k, recall)
    if chosen is None:
        logger.info(
            "The index states no recall of %g for k=%d from %d measured targets: all rows were scored.",
            recall,
            k,
            len(pool.targets),
        )
        return top_and_bottom(source, k, terms), {}
    mean, bound = pool.stated(k, chosen)
    return index.top(terms, chosen, k), {
        "recall": round(mean, 5),
        "recall_at_least": math.floor(bound * 1e5) / 1e5,
        "recall_targets": len(pool.targets),
        "candidates": chosen,
    }


def _needed(measured: int, recall: float) -> int | None:
    """Return the next number of targets whose bound reaches a recall if nothing is lost; ``None`` if there is none."""
    return next(
        (look for look in _LOOKS if look > measured and mean_lower_bound(np.ones(look), _DOUBT) >= recall),
        None,
    )


def mean_lower_bound(values: NDArray[np.float64], doubt: float) -> float:
    """Return a lower bound of the expected value of independent numbers ``(n,)`` between 0 and 1.

    It exceeds the expected value with a probability of at most ``doubt``, for any distribution and also for drawing
    without replacement: with mean m of n numbers, it is the smallest p with n KL(m, p) <= log(1 / doubt), where KL is
    the divergence of Bernoulli distributions (Hoeffding 1963, theorem 1 and section 6).

    Example:
        >>> round(mean_lower_bound(np.ones(100), 0.05), 4), 0.05 ** (1 / 100)
        (0.9705, 0.9704869503929601)
        >>> round(mean_lower_bound(np.repeat([0.9, 1.0], 50), 0.05), 4)
        0.8785
    """
    mean = float(values.mean())
    limit = math.log(1 / doubt) / len(values)
    low, high = 0.0, mean
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(mean, middle) > limit else (low, middle)
    return low


def _divergence(mean: float, other: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions; ``other`` is at most ``mean``."""
    if other <= 0.0:
        return math.inf if mean > 0 else 0.0
    up = mean * math.log(mean / other)
    return up if mean >= 1.0 else up + (1 - mean) * math.log((1 - mean) / (1 - other))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """Measured targets: places of their exact rows among the candidates of the index."""

    k: int
    """Exact rows per end."""
    targets: NDArray[np.int64]
    """``(m,)`` numbers of the targets in their set."""
    places: NDArray[np.int64]
    """``(m, 2, k)``: number of candidates before each exact row; a larger number than any if it is not a candidate."""

    def candidates(self, k: int, recall: float) -> int | None:
        """Return the smallest number of candidates that reaches a recall; ``None`` if none is known to."""
        factor = 1
        while factor <= _FACTOR:
            if self.stated(k, factor * k)[1] >= recall:
                return factor * k
            factor = max(factor + 1, factor * 5 // 4)
        return None

    def stated(self, k: int, candidates: int) -> tuple[float, float]:
        """Return the mean and the lower bound of the recall with a number of candidates, of the worse end."""
        count = max((look for look in _LOOKS if look <= len(self.targets)), default=0)
        if not count:
            return 0.0, 0.0
        shares = (self.places[:count, :, :k] < candidates).mean(axis=2)
        return float(shares.mean(axis=0).min()), min(mean_lower_bound(end, _DOUBT) for end in shares.T)

    def with_targets(self, targets: NDArray[np.int64], places: NDArray[np.int64]) -> _Pool:
        """Return the pool with more targets, in random order; those that it has are left out."""
        new = np.random.default_rng(len(self.targets)).permutation(
            np.flatnonzero(~np.isin(targets, self.targets))
        )
        return _Pool(
            self.k, np.concatenate([self.targets, targets[new]]), np.concatenate([self.places, places[new]])
        )

    def to_array(self) -> NDArray[np.int64]:
        """Return numbers and places, ``(m, 1 + 2 k)``."""
        return np.concatenate([self.targets[:, None], self.places.reshape(len(self.places), -1)], axis=1)

    @classmethod
    def of(cls, array: NDArray[np.int64]) -> _Pool:
        """Return the pool in an array of :meth:`to_array`."""
        k = (array.shape[1] - 1) // 2
        return cls(k, array[:, 0], array[:, 1:].reshape(len(array), 2, k))


@final
class _Index:
    """A complete index, and the targets of the set that it was measured with."""

    def __init__(self, source: ScoreSource, path: str) -> None:
        self._store = store = source.store
        self._source = source
        self._pool_path = f"{path}/measured/{source.name}"
        basis = store.open_table(f"{path}/basis")
        # Another set under the same name has other targets, of which the measured ones are no sample.
        targets = [source.targets_of(table).content_key() for table in source.train]
        self._key = digest_of({"basis": basis.content_key(), "targets": targets})
        self.rows = store.open_table(f"{path}/rows")
        self._sample = _sampled_rows(source)
        self._coefficients = torch.from_numpy(_coefficients_of(basis, self._sample))

    def pool(self, k: int) -> _Pool:
        """Return the targets that were measured for at least k rows."""
        array = self._source.ranks.broadcast(
            "measured targets", lambda: self._store.entry(self._pool_path, self._key)
        )
        if array is None or array.shape[1] <= 2 * k:
            return _Pool.of(np.empty((0, 1 + 2 * k), np.int64))
        return _Pool.of(array)

    def keep(self, pool: _Pool) -> None:
        """Store the measured targets, if the store is writable."""
        if self._store.writable and self._source.ranks.rank == 0:
            self._store.put_entry(self._pool_path, self._key, pool.to_array())

    def places(self, terms: Sequence[ScoreTerm], exact: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the places of the exact rows of M targets among the candidates, ``(M, 2, k)``.

        ``exact`` are the results of :func:`~trak_lite.scoring.matrix.top_and_bottom`.
        """
        most = _FACTOR * exact.shape[-1]
        candidates = self._candidates(terms, most)
        positions = np.full((exact.shape[2], 2, exact.shape[-1]), _NOWHERE, np.int64)
        for end, target in np.ndindex(2, exact.shape[2]):
            rows = candidates[end, target]
            order = np.argsort(rows)
            wanted = exact[end, 0, target].astype(np.int64)
            at = order[np.searchsorted(rows[order], wanted).clip(max=len(rows) - 1)]
            positions[target, end] = np.where(rows[at] == wanted, at, _NOWHERE)
        return positions

    def top(self, terms: Sequence[ScoreTerm], candidates: int, k: int) -> NDArray[np.float64]:
        """Return the k strongest of the candidates of every target, with their scores, ``(2, 2, M, k)``."""
        num_targets = len(terms[0].targets)
        ends = np.full((2, 2, num_targets, k), np.nan)
        for block in rows_in_batches(np.arange(num_targets), _SCANNED_TARGETS):
            part = _of_targets(terms, block)
            rows = self._candidates(part, candidates)
            for group in rows_in_batches(np.arange(len(block)), _SCORED_TARGETS):
                if group[0] // _SCORED_TARGETS % self._source.ranks.size == self._source.ranks.rank:
                    ends[:, :, block[group]] = self._scored(_of_targets(part, group), rows[:, group], k)
        # Each rank has scored other targets.
        return self._source.ranks.merged(ends, lambda one, other: np.where(np.isnan(one), other, one))

    def _candidates(self, terms: Sequence[ScoreTerm], count: int) -> NDArray[np.int64]:
        """Return the candidates of both ends, best first, ``(2, M, count)``."""
        exact = self._source.scores_of(self._sample, terms)
        targets = exact.T @ self._coefficients.to(exact)
        num_rows, ranks = self.rows.spec.num_rows, self._source.ranks
        part = range(num_rows * ranks.rank // ranks.size, num_rows * (ranks.rank + 1) // ranks.size)
        ranges = _growing(part, max(_LEAST_SCANNED_ROWS, _SCANNED_VALUES // len(targets)))
        tiles = ((rows.start, _products(self.rows, rows, targets)) for rows in ranges)
        return top_and_bottom_of(tiles, len(targets), count, ranks)[:, 0].astype(np.int64)

    def _scored(self, terms: Sequence[ScoreTerm], numbers: NDArray[np.int64], k: int) -> NDArray[np.float64]:
        """Return the k strongest of some candidates ``(2, M, c)`` by their scores, ``(2, 2, M, k)``."""
        union = np.unique(numbers)
        scores = np.empty((len(union), numbers.shape[1]), np.float32)
        starts = range(0, len(union), _SCORED_ROWS)
        batches = zip(starts, rows_in_batches(union, _SCORED_ROWS), strict=True)
        for start, tile in copied_ahead(
            (start, self._source.scores_of(rows, terms)) for start, rows in batches
        ):
            scores[start : start + len(tile)] = tile
        ends = np.empty((2, 2, numbers.shape[1], k))
        for end, target in np.ndindex(2, numbers.shape[1]):
            rows = np.sort(numbers[end, target])
            scored = TopRows(rows, scores[np.searchsorted(union, rows), target])
            ends[end, :, target] = best_of(scored, ("helpful", "harmful")[end], k)
        return ends


def _products(table: AbstractRowTable, rows: range, targets: Tensor) -> Tensor:
    """Return the products of some rows of an int4 table with targets ``(M, R)``, ``(rows, M)`` float32.

    A byte b has the entries l - 8 and h - 8 with l = b mod 16 and h = (b - l) / 16. With even and odd columns e and o
    of the targets, the products are l (e - o / 16) + b o / 16 - 8 (e + o): nothing is unpacked.
    """
    even, odd = targets[:, ::2], targets[:, 1::2]
    if odd.shape[1] < even.shape[1]:  # the last half byte is not used
        odd = torch.nn.functional.pad(odd, (0, 1))
    of_low, of_byte = (even - odd / 16).T.contiguous(), (odd / 16).T.contiguous()
    offset = -8 * (even + odd).sum(1)
    out = torch.empty(len(rows), len(targets), dtype=torch.float32, device=targets.device)
    chunk_rows = table.spec.chunk_rows
    with full_float32(targets.device):
        for chunk in range(rows.start // chunk_rows, (rows.stop - 1) // chunk_rows + 1):
            packed, scales = table.stored_chunk(chunk, FEATURES).arrays
            first = max(rows.start, chunk * chunk_rows)
            last = min(rows.stop, (chunk + 1) * chunk_rows)
            for start in range(first, last, _DECODED_ROWS):
                stop = min(start + _DECODED_ROWS, last)
                here = slice(start - chunk * chunk_rows, stop - chunk * chunk_rows)
                numbers = as_tensor(packed[here], targets.device)
                tile = out[start - rows.start : stop - rows.start]
                torch.addmm(offset, numbers.bitwise_and(15).float(), of_low, out=tile)
                tile.addmm_(numbers.float(), of_byte)
                tile.mul_(as_tensor(scales[here], targets.device)[:, None])
    return out


def _growing(rows: range, most: int) -> Iterator[range]:
    """Yield consecutive parts, each twice as long as the one before: most later rows reach no present candidate.

    Example:
        >>> list(_growing(range(10, 40_000), 16_384))
        [range(10, 4106), range(4106, 12298), range(12298, 28682), range(28682, 40000)]
    """
    start, size = rows.start, _LEAST_SCANNED_ROWS
    while start < rows.stop:
        yield range(start, min(start + size, rows.stop))
        start, size = start + size, min(2 * size, most)


def _built(source: ScoreSource, identity: Mapping[str, Any]) -> _Index | None:
    """Return the index of some scores. Its missing rows are computed, beside other processes.

    If the store is read-only, ``None`` is returned unless the index is complete.
    """
    store, fingerprint = source.store, {**identity, "version": _VERSION}
    folder, path = index_paths(fingerprint)
    if not store.writable:
        names = set(store.table_names(path))
        ready = all(
            table in names and store.open_table(table).complete for table in (f"{path}/basis", f"{path}/rows")
        )
        return _Index(source, path) if ready else None
    source.ranks.broadcast("outdated indices", lambda: _drop_others(store, folder, path))
    sample = _sampled_rows(source)
    width = len(sample) * (len(sample) // _SAMPLED_PER_DIRECTION)
    spec = TableSpec(1, (Column(_COEFFICIENTS, width, "float32"),), 1, fingerprint)
    basis = store.create_table(f"{path}/basis", spec)
    # One row, which is stored by the first process that has computed it: other processes may round differently.
    with SharedRows(basis, 1, label="Directions of the index", progress=False, ranks=source.ranks) as work:
        for batches in work.rounds():
            for row in batches:
                work.put(row, {_COEFFICIENTS: _directions(source, sample).reshape(1, -1)})
    coefficients = _coefficients_of(basis, sample)
    column = Column(FEATURES, coefficients.shape[1], _DTYPE)
    chunk_rows = chunk_rows_for(source.num_rows, column.row_bytes)
    fingerprint = {**fingerprint, "basis": basis.content_key()}
    rows = store.create_table(f"{path}/rows", TableSpec(source.num_rows, (column,), chunk_rows, fingerprint))
    if not rows.complete:
        score_rows(
            rows,
            source.terms_of_rows(sample, torch.from_numpy(coefficients)),
            column=FEATURES,
            q=source.method.q,
            label="Index",
            ranks=source.ranks,
        )
    return _Index(source, path)


def _drop_others(store: AbstractFeatureStore, folder: str, path: str) -> None:
    """Drop the indices of the same method and checkpoints that were computed from other rows."""
    for table in store.table_names(folder):
        if not table.startswith(f"{path}/"):
            with contextlib.suppress(BusyError):  # another process is still computing it
                store.drop_table(table)
    for entry in store.entry_names(folder):
        if not entry.startswith(f"{path}/"):
            store.drop_entry(entry)


def _sampled_rows(source: ScoreSource) -> NDArray[np.int64]:
    directions = min(_MOST_DIRECTIONS, len(source.train) * source.layout.width)
    fitting = max(1024, _SAMPLED_VALUES // source.layout.width)
    return _scattered(source.num_rows, min(_SAMPLED_PER_DIRECTION * directions, fitting))


def _scattered(count: int, most: int) -> NDArray[np.int64]:
    """Return at most ``most`` of ``count`` numbers, one from each of as many equal parts, ascending.

    The place within a part varies, so that periodic data are sampled evenly. The result is the same everywhere.

    Example:
        >>> _scattered(20, 4).tolist(), _scattered(3, 4).tolist()
        ([0, 8, 11, 19], [0, 1, 2])
    """
    size = min(count, most)
    edges = np.arange(size + 1, dtype=np.int64) * count // size
    mixed = np.arange(size, dtype=np.int64) * 2654435761 % (1 << 32)
    return edges[:-1] + (mixed * np.diff(edges) >> 32)


def _directions(source: ScoreSource, sample: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the coefficients of the directions, ``(s, s / 4)``; columns that are not used are zero."""
    values, vectors = eigh_of_positive(source.gram_of_rows(sample))
    values, vectors = values.flip(0).double().cpu().clamp(min=0), vectors.flip(1).double().cpu()
    kept = torch.cumsum(values, 0) < _SHARE * values.sum()
    most = len(sample) // _SAMPLED_PER_DIRECTION
    count = min(int(kept.sum()) + 1, most, max(int((values > 1e-9 * values[0]).sum()), 1))
    coefficients = torch.zeros(len(sample), most, dtype=torch.float64, device="cpu")
    if values[0] > 0:
        # Rotated, the numbers of a row have equal variances, and one scale per row suits all of them.
        generator = torch.Generator("cpu").manual_seed(0)
        normal = torch.randn(count, count, generator=generator, dtype=torch.float64, device="cpu")
        rotation = torch.linalg.qr(normal).Q
        coefficients[:, :count] = vectors[:, :count] / values[:count].sqrt() @ rotation
    return coefficients.float().numpy()


def _coefficients_of(basis: AbstractRowTable, sample: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the coefficients ``(s, R)`` in a table, without unused columns; one column is left in any case."""
    stored = basis.read(_COEFFICIENTS).reshape(len(sample), -1)
    return np.ascontiguousarray(stored[:, : max(int(stored.any(axis=0).sum()), 1)])


def _of_targets(terms: Sequence[ScoreTerm], targets: NDArray[np.int64]) -> list[ScoreTerm]:
    return [
        replace(term, targets=term.targets[torch.from_numpy(targets).to(term.targets.device)])
        for term in terms
    ]
