"""Scores from unprojected gradients: of all train rows without storing them, or of the candidates of stored scores.

Shapes: N train rows, M targets, m targets of a block, R train rows that are scored, P gradient entries per sample.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import copied_ahead, precise
from trak_lite.core.normalization import Normalization
from trak_lite.core.progress import Stages
from trak_lite.core.ranks import Ranks
from trak_lite.core.validate import positive_int
from trak_lite.data.batches import rows_in_batches
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError, StoreError
from trak_lite.featurizing.fits import MethodFits
from trak_lite.featurizing.session import FeaturizingSession, Run
from trak_lite.featurizing.settings import AttributorSettings
from trak_lite.featurizing.solvers import Convergence
from trak_lite.featurizing.unprojected import ProductProjector, gradients_of, projected, unit
from trak_lite.linalg.topk import TopRows
from trak_lite.methods import EKFAC, AbstractMethod, Method, as_method
from trak_lite.models.checkpoints import Checkpoint
from trak_lite.models.sharded import refuse_sharded
from trak_lite.run.tables import checkpoint_tables
from trak_lite.run.workspace import Workspace
from trak_lite.scoring.matrix import AbstractScoreMatrix, HeldMatrix, PartialMatrix, top_and_bottom_of
from trak_lite.scoring.records import shown_settings
from trak_lite.scoring.scores import Scores
from trak_lite.store import AbstractRowTable, Manifest
from trak_lite.types import FeatureLayout, OutputTerms, by_name, num_entries

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 2 << 30
"""Default memory for the gradients of targets, in bytes."""
_SHOWN: Final = 10
"""Rows per target whose overlap before and after a refinement is reported."""

Visit = Callable[[str, str, float], None]
"""Called with the digest, the name and the weight of each checkpoint, while it is loaded."""


@final
@dataclass(frozen=True, kw_only=True)
class Refine:
    """Candidates of stored scores whose scores are computed again, from unprojected gradients.

    The stored rows find the most helpful and the most harmful rows of every target in one pass. The gradients of these
    rows are then computed anew, all others are not. Pass it to :meth:`~trak_lite.Attributor.score`.

    Example:
        >>> Refine(candidates=200, method="GradDot").method
        GradDot(q='inside', checkpoint_weights=None)
    """

    candidates: int = 1000
    """Number of most helpful and of most harmful rows per target that are scored again."""
    method: Method = field(default_factory=EKFAC)
    """The method of the final scores: a method without a kernel in feature space, its name, or its name and fields."""
    max_bytes: int = MAX_BYTES
    """Memory for the gradients of targets, in bytes. More targets than fit are scored in several passes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", positive_int(candidates=self.candidates))
        object.__setattr__(self, "max_bytes", positive_int(max_bytes=self.max_bytes))
        object.__setattr__(self, "method", unprojected_method(self.method))


def unprojected_method(method: Method) -> AbstractMethod:
    """Return a method that can score unprojected gradients; raise if it needs stored rows."""
    instance = as_method(method)
    transforms = instance.transforms_rows and instance.unit_scope(FeatureLayout.joint(1)) is None
    if not instance.multiplies_rows or instance.kernel is not None or transforms:
        raise InvalidInputError(
            f"{instance.name} needs stored feature rows: featurize the train data and call "
            f"score(method={instance.name!r}). Without stored rows, use EKFAC or CG for influence functions, or "
            "GradDot, GradCos or TracIn."
        )
    return instance


def unprojected_scored_by(settings: AttributorSettings, method: Method) -> AbstractMethod:
    """Return the method of scores of unprojected gradients; raise if it, or the normalisation, cannot be used."""
    kind = settings.normalization.kind
    if kind in ("adam", "adam_update"):
        raise InvalidInputError(
            f"Scores of unprojected gradients do not support normalize={kind!r}. Use featurize and score without "
            "refine, or an attributor with another normalize."
        )
    return settings.scored_by(unprojected_method(method))


def scores_of_stream(
    run: Run,
    train: Rows,
    targets: Rows,
    method: AbstractMethod,
    checkpoints: Sequence[Checkpoint],
    *,
    k: int | None,
    max_bytes: int,
) -> Scores:
    """Score all train rows by their unprojected gradients; see :meth:`~trak_lite.Attributor.stream_scores`."""
    everything = np.arange(len(train))
    matrix = None if k is not None else np.empty((len(train), len(targets)), np.float32)
    tops: list[TopRows] = []
    # Only a fit belongs to the train data; without one, the store is not used.
    dataset = None if method.inverse is None else train.identity()
    if dataset is not None and run.workspace.holds_other_data(dataset):
        run = copy.copy(run)  # another question in memory: the fit to other train data stays as it is
        run.workspace = Workspace(None)
    with run.session(dataset) as session:
        if len(checkpoints) > 1:  # equal weights are one checkpoint, as in a store
            distinct = dict[str, Checkpoint]()
            for checkpoint in checkpoints:
                distinct.setdefault(session.load(checkpoint), checkpoint)
            checkpoints = list(distinct.values())
        elif checkpoints[0].load is None and session.workspace.exists:  # the present weights
            try:
                tables = checkpoint_tables(session.store)
            except StoreError:  # of a damaged table, which only a warning needs
                tables = {}
            count = sum(table.complete for table in tables.values())
            stored = session.store.manifest.fingerprint.get("dataset", {})
            # Rows of other data say nothing of these.
            if count and stored.get("num_rows") == len(train) and session.load(checkpoints[0]) not in tables:
                warnings.warn(
                    f"The scores are of the present weights of the model, of which the store has no rows: it has those "
                    f"of {count} checkpoint(s). Pass these, checkpoints=..., if the scores are to be of them, or "
                    "checkpoints=[model.state_dict()] if they are to be of the present weights.",
                    UserWarning,
                    stacklevel=3,
                )
        weights = method.weights(len(checkpoints))
        scorer = _Scorer(session, train, targets, method)
        blocks = scorer.blocks(len(train), max_bytes)
        units = [len(train) + len(block) for block in blocks]  # and those of a fit, before the first block
        with Stages.of(
            len(checkpoints), units[0] if method.inverse is None else 0, later=units[1:]
        ) as stages:

            def walk(visit: Visit) -> None:
                for checkpoint, weight in stages.each(zip(checkpoints, weights, strict=True)):
                    visit(session.load(checkpoint), checkpoint.name, weight)

            for block in blocks:
                scores = scorer.scores(everything, block, walk)
                if matrix is not None:
                    matrix[:, block] = scores
                else:
                    ends = top_and_bottom_of([(0, torch.from_numpy(scores))], len(block), k or 1, Ranks())[
                        :, 0
                    ]
                    kept = [np.unique(rows) for rows in np.concatenate(ends.astype(np.int64), 1)]
                    tops += [TopRows(rows, scores[rows, target]) for target, rows in enumerate(kept)]
    shown = {"checkpoints": len(checkpoints), **({} if k is None else {"k": k})}
    made = PartialMatrix(len(train), tops, k or 1) if matrix is None else HeldMatrix(matrix)
    return scorer.scores_of(made, "targets", None, **shown)


def refined_scores(
    session: FeaturizingSession,
    tables: Mapping[str, AbstractRowTable],
    targets: Rows,
    name: str,
    refine: Refine,
    ends: NDArray[np.float64],
) -> Scores:
    """Score the candidates of every target by their unprojected gradients.

    ``tables`` are the train tables by the digest of the checkpoint's weights, ``name`` is that of the target set, and
    ``ends`` ``(2, 2, M, c)`` are the results of :func:`~trak_lite.scoring.matrix.top_and_bottom` of the stored rows.
    """
    method = unprojected_scored_by(session.settings, refine.method)
    ends = ends[..., : refine.candidates]  # a cached result may have more
    weights = dict(zip(tables, method.weights(len(tables)), strict=True))
    train = session.train_rows("refine computes gradients of")
    candidates = [np.unique(rows) for rows in ends[:, 0].astype(np.int64).swapaxes(0, 1)]
    tops: list[TopRows] = []
    passes = 0

    def walk(visit: Visit) -> None:
        session.visit(
            tables, lambda digest, label: visit(digest, label, weights[digest]), purpose="to refine scores"
        )

    scorer = _Scorer(session, train, targets, method)
    for block in scorer.blocks(len(np.unique(np.concatenate(candidates))), refine.max_bytes):
        block_rows = [candidates[target] for target in block]
        union = np.unique(np.concatenate(block_rows))
        scores = scorer.scores(union, block, walk)
        passes += len(union)
        for column, rows in enumerate(block_rows):
            tops.append(TopRows(rows, scores[np.searchsorted(union, rows), column]))
    count = min(refine.candidates, len(train))
    matrix = PartialMatrix(len(train), tops, count)
    compared = min(_SHOWN, count)
    after = matrix.kept_top(compared, "helpful").indices
    shares = [np.isin(now, then[:compared]).mean() for now, then in zip(after, ends[0, 0], strict=True)]
    overlap, share = float(np.mean(shares)), passes / len(train)
    logger.info(
        "Refined scores %r: the %d most helpful rows before and after agree to %.0f %% on average; gradients of "
        "%.1f %% of the train rows were computed.",
        name,
        compared,
        100 * overlap,
        100 * share,
    )
    shown = {
        "checkpoints": len(tables),
        "candidates": refine.candidates,
        f"top{compared}_overlap": round(overlap, 3),
        "train_passes": round(share, 4),
    }
    return scorer.scores_of(matrix, name, tables, **shown)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Scorer:
    """Scores some train rows for blocks of targets, by unprojected gradients."""

    session: FeaturizingSession
    train: Rows
    targets: Rows
    method: AbstractMethod
    _convergence: dict[str, list[Convergence]] = field(default_factory=dict)
    """By digest of the checkpoint's weights, of each block."""

    def __post_init__(self) -> None:
        refuse_sharded(self.session.model, "scores of unprojected gradients", "Use featurize and score")

    def scores_of(
        self, matrix: AbstractScoreMatrix, name: str, digests: Iterable[str] | None, **shown: Any
    ) -> Scores:
        """Return the scores in a matrix, with ``shown`` among their settings.

        Their convergence is over all blocks of targets, in the order of ``digests``, or of visits (``None``).
        """
        run, made = self.session.run, self._convergence
        settings, task = shown_settings(self.method, **shown), run.target_task
        manifest = Manifest(run.settings.manifest(None).fingerprint)
        order = made if digests is None else [digest for digest in digests if digest in made]
        joined = tuple(Convergence.joined(made[digest]) for digest in order)
        return Scores(matrix, name, self.method, manifest, settings, known_task=task, convergence=joined)

    def blocks(self, num_rows: int, max_bytes: int) -> list[NDArray[np.int64]]:
        """Return the targets of each pass over ``num_rows`` train rows."""
        width = num_entries(self.session.settings.parameters)
        item = max(4, next(self.session.model.parameters()).element_size())
        samples = 0 if self.method.inverse is None else self.method.inverse.ekfac.samples or 0
        # The gradients before and after the inverse with the solver's vectors, and the scores.
        target = item * (self.method.gradient_copies + 2 * bool(samples)) * width + 4 * num_rows
        left = max_bytes - item * width * samples
        if samples and left < target:
            raise InvalidInputError(
                f"The {samples} sampled gradients of {self.method.name} and a target take {max_bytes - left + target} "
                f"bytes, and max_bytes={max_bytes}. Use more max_bytes, or fewer samples"
                f"{f' (at most {fitting})' if (fitting := (max_bytes - target) // (item * width)) > 0 else ''}."
            )
        fitting = max(1, left // target)
        numbers = np.arange(len(self.targets))
        blocks = rows_in_batches(numbers, fitting)
        if len(blocks) > 1:
            logger.info(
                "The gradients of %d targets take more than max_bytes=%d: the train rows are read %d times, for %d "
                "targets each.",
                len(numbers),
                max_bytes,
                len(blocks),
                fitting,
            )
        return blocks

    def scores(
        self, rows: NDArray[np.int64], block: NDArray[np.int64], walk: Callable[[Visit], None]
    ) -> NDArray[np.float32]:
        """Return the scores ``(R, m)`` of some train rows, ascending, for a block of targets.

        ``walk`` loads the checkpoints one by one.
        """
        total = np.zeros((len(rows), len(block)), np.float32)
        q = np.zeros(len(rows))
        count = 0
        session, inverse, progress = self.session, self.method.inverse, self.session.run.progress
        parameters, scope = session.settings.parameters, self.method.unit_scope(session.settings.layout)
        # Products become cosines, if the method is that of cosines. A factor of a whole gradient, and one of a module
        # in cosines of modules, cancel; factors of modules in cosines of whole gradients do not.
        configured = session.settings.normalization
        to_unit = scope == "global" and configured.kind != "none" and configured.scope == "module"
        normalization = None if scope is None or to_unit else Normalization("unit", scope=scope)

        def add(digest: str, label: str, weight: float) -> None:
            nonlocal count
            count += 1
            passes = session.row_pass(self.targets, 0, normalization=normalization)
            solved = gradients_of(passes, block, parameters, label=f"Targets, {label}", progress=progress)
            if to_unit:
                solved = unit(solved, solved.square().sum(1))
            if inverse is not None:
                session.workspace.created()  # the fit is stored
                solution = MethodFits(session).inverse(digest, label, inverse, self.train).solve(solved)
                solved = solution.gradients
                if solution.convergence is not None:
                    self._convergence.setdefault(digest, []).append(solution.convergence)
            passes = session.row_pass(self.train, 0, normalization=normalization)
            projector = ProductProjector(by_name(solved, parameters), to_unit=to_unit)
            parts = projected(passes, rows, projector, label=f"Scoring, {label}", progress=progress)
            done = 0
            for _, products, out_to_loss in copied_ahead(self._weighted(*part, weight) for part in parts):
                stop = done + len(products)
                total[done:stop] += products
                q[done:stop] += out_to_loss
                done = stop

        walk(add)
        return total * (q / count).astype(np.float32)[:, None] if self.method.q == "outside" else total

    def _weighted(self, products: Tensor, terms: OutputTerms, weight: float) -> tuple[None, Tensor, Tensor]:
        """Return the products of a batch of rows in float32, and the rows' q, behind a key for ``copied_ahead``."""
        q, products = terms.out_to_loss_grad, products * weight
        if self.method.q == "inside":
            products = products * q.to(products)[:, None]
        return None, products.float(), precise(q)
