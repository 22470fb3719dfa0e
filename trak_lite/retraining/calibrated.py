"""Scores with fitted weights of damping, module, checkpoint and position of q.

To predict a subset, a linear score needs only the sum of the train features over the subset: ``(S, K)`` per checkpoint,
from one pass over the train rows. Kernels, dampings and views are then applied to S rows instead of N.

Shapes: N train rows, M targets, S subsets, K feature width, C checkpoints, V views, D dampings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.validate import row_numbers
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.evaluation import subset_masks, summed_scores
from trak_lite.evaluation.calibration import fit_weights
from trak_lite.evaluation.datamodeling import compared_scores
from trak_lite.evaluation.verdict import Calibration, Estimate
from trak_lite.linalg.kernel import KernelSettings
from trak_lite.linalg.products import unit_rows
from trak_lite.modelout_functions import AbstractModelOutput, QuestionsModelOutput
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.run.tables import FEATURES, OUT_TO_LOSS, as_tensor
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.stored import source_of_stored
from trak_lite.scoring.tiles import ScoreTerm, WhereQ, score_tile, tile_ranges
from trak_lite.unrolled import TrainingRun

Array: TypeAlias = NDArray[np.float64]

VIEWS: Final[tuple[WhereQ, ...]] = ("outside", "inside", "off")
"""Train rows weighted by their mean q over checkpoints, by the q of each checkpoint, or not weighted."""
_DAMPINGS: Final = (0.1, 1.0, 10.0)
"""Dampings tried by calibration, in addition to the method's."""
_TILE_ROWS: Final = 1024
_MOST_PARTS: Final = 512
"""Maximum number of fitted weights. With more, all modules share theirs."""
_FEWEST_TEACHERS: Final = 4
_CALIBRATION_TARGETS: Final = 256
"""Maximum number of targets to fit weights on; limits memory."""


@final
class SubsetSums:
    """Sums of train features over subsets, for each checkpoint."""

    def __init__(self, rows: ScoreSource, masks: NDArray[np.bool_]) -> None:
        members = torch.from_numpy(masks.astype(np.float64)).to(rows.device)
        mean = torch.from_numpy(rows.mean_out_to_loss()).to(rows.device)
        self.by_checkpoint: list[dict[str, Tensor]] = []
        """For each checkpoint the sums by view, ``(S, K)``; ``"unit"`` sums rows scaled to norm 1."""
        for table in rows.train:
            out_to_loss = torch.from_numpy(table.read(OUT_TO_LOSS)).to(mean)
            weights = {"outside": members * mean, "inside": members * out_to_loss, "off": members}
            zeros = members.new_zeros(len(members), rows.layout.width)
            sums = {view: zeros.clone() for view in (*weights, "unit")}
            for start, chunk in table.blocks(FEATURES):
                for first in range(0, len(chunk), _TILE_ROWS):
                    tile = as_tensor(chunk[first : first + _TILE_ROWS], rows.device).double()
                    here = slice(start + first, start + first + len(tile))
                    for view, weight in weights.items():
                        sums[view] += weight[:, here] @ tile
                    sums["unit"] += members[:, here] @ unit_rows(tile)
            self.by_checkpoint.append(sums)

    def predict(self, targets: Sequence[Tensor], view: str) -> Array:
        """Return ``train row @ target`` ``(M, K)``, summed over each subset and over checkpoints, ``(S, M)``."""
        pairs = zip(self.by_checkpoint, targets, strict=True)
        products = [(sums[view] @ rows.T).cpu().numpy() for sums, rows in pairs]
        total: Array = np.sum(products, axis=0)
        return total


def calibrate(
    scores: Scores,
    teacher: Scores,
    targets: Sequence[int] | None = None,
    *,
    num_subsets: int = 200,
    seed: int = 0,
    confidence: float = 0.95,
) -> Calibration:
    """Fit weights of damping, module, checkpoint and position of q to exact scores of a few targets.

    :func:`~trak_lite.unrolled.unrolled` gives a score for every train row, where a retraining gives one number. The
    weights are fitted to half of the teacher's targets, and tested on the other half: they are kept if they predict
    the teacher's sums over random subsets better there, with an interval above 0. They are then fitted to all of the
    teacher's targets. :func:`calibrated_scores` applies them to all targets, from the stored rows.

    The calibrated scores answer the teacher's question: what leaving rows out changes in its run. They need not predict
    models that are retrained with other seeds or on half of the rows better than the scores do.

    Args:
        scores: ``(N, M)`` scores of a method with a kernel, from stored rows.
        teacher: ``(N, m)`` scores of ``unrolled`` for some of the same targets, at least 4.
        targets: The m columns of ``scores`` that the teacher's columns are; ``None`` is the first m. Some targets in
            a data set of their own cannot be compared: name them right.
        num_subsets: Random subsets of the train rows that scores are summed over.
        seed: Seed of the subsets.
        confidence: Nominal coverage of the intervals.

    Returns:
        The weights, the LDS against the teacher before and after, and whether they are kept.

    Raises:
        InvalidInputError: If the scores have no kernel, the teacher has too few targets, sizes do not fit, or the
            teacher was made from other train rows, for other targets or with another task.
        StateError: If the scores were not computed from stored rows.
    """
    num_rows, count = teacher.shape
    chosen = (
        np.arange(count) if targets is None else row_numbers(scores.shape[1], "the scores", targets=targets)
    )
    inside = len(set(chosen.tolist())) == count <= scores.shape[1]
    if num_rows != len(scores) or not inside or count < _FEWEST_TEACHERS:
        raise InvalidInputError(
            f"The teacher must have the {len(scores)} train rows of the scores, and at least {_FEWEST_TEACHERS} of "
            f"their {scores.shape[1]} targets, one entry of targets per column; got shape {teacher.shape} and targets "
            f"{chosen.tolist()!r:.100}."
        )
    _refuse_other_teacher(scores, teacher, chosen)
    masks = subset_masks(num_rows, num_subsets, seed=seed)
    outputs = summed_over(teacher, masks)
    with scores.run.workspace.reading() as store:
        rows = source_of_stored(store, scores)
        made = _Fit(rows, SubsetSums(rows, masks), chosen)
    fitted, held_out = np.arange(0, count, 2), np.arange(1, count, 2)
    weights = fit_weights(made.parts[:, :, fitted], outputs[:, fitted], made.prior, across="targets")
    better, default = (np.tensordot(one, made.parts[:, :, held_out], 1) for one in (weights, made.prior))
    tested = made.tested(weights, better, default, outputs[:, held_out], confidence, across="targets")
    if not tested.kept:
        return tested
    weights = fit_weights(made.parts, outputs, made.prior, across="targets")
    return replace(tested, weights=tuple(map(float, weights)))


def _refuse_other_teacher(scores: Scores, teacher: Scores, chosen: NDArray[np.int64]) -> None:
    """Raise if the teacher has other train rows, targets or another task, as far as both record them."""
    # A dataset of the same rows in another dtype has another digest.
    runs = getattr(teacher.method, "runs", ())
    dtypes = {run.weights.dtype for run in runs if isinstance(run, TrainingRun)}
    same_dtype = not dtypes or dtypes <= {parameter.dtype for parameter in scores.run.model.parameters()}
    if _are_others(_train_rows(scores), _train_rows(teacher), same_dtype):
        raise InvalidInputError(
            "The teacher was made from other train rows than the scores, or from the same rows in another order. Make "
            "both from the same rows."
        )
    task, other = _task_of(scores), _task_of(teacher)
    if task is None or other is None:
        return
    if describe_task(task, scores.run.model) != describe_task(other, scores.run.model):
        raise InvalidInputError(
            f"The teacher was made with another task ({other.name or type(other).__name__}) than the scores "
            f"({task.name or type(task).__name__}). Pass unrolled the task of the scores."
        )
    of_scores, of_teacher, order = _targets(scores), _targets(teacher), np.arange(scores.shape[1])
    if np.array_equal(chosen, order):
        is_other = _are_others(of_scores, of_teacher, same_dtype)
    else:  # of which the digest of the values says nothing, unless both are rows of the same tensors
        is_other = (
            "tensors" in of_scores
            and of_scores["tensors"] == of_teacher.get("tensors")
            and of_scores["indices"] == _order(order)
            and of_teacher["indices"] != _order(chosen)
        )
    if is_other:
        raise InvalidInputError(
            f"The teacher was made for other targets than the columns {chosen.tolist()!r:.100} of the scores, or in "
            "another order. Name the columns that its targets are: targets=...."
        )


def _train_rows(scores: Scores) -> Mapping[str, Any]:
    """Return JSON values that identify the train rows; empty if they are not known."""
    made = scores.manifest.fingerprint
    identity: Mapping[str, Any] = made.get("dataset") or made.get("run", {}).get("data", {})
    return identity


def _targets(scores: Scores) -> Mapping[str, Any]:
    """Return JSON values that identify targets; empty if they are not known, or are samples of a question."""
    entries = scores.entries
    made = scores.manifest.fingerprint if entries is None else entries.table().spec.fingerprint
    identity: Mapping[str, Any] = made.get("targets", {})
    return {} if "task" in identity else identity


def _task_of(scores: Scores) -> AbstractModelOutput | None:
    """Return the task that defines f of the targets; ``None`` if it is not known, or is a question that they name."""
    try:
        task = scores.task
    except StateError:
        return None
    return None if isinstance(task, QuestionsModelOutput) else task


def _are_others(one: Mapping[str, Any], other: Mapping[str, Any], same_dtype: bool) -> bool:
    """Whether two identities are certainly of other rows, or of rows in another order.

    Names, and samples that may be random or hold a number where the other data hold a tensor, say nothing.
    """
    if "tensors" not in one or "tensors" not in other:
        return (
            one.get("id") is not None
            and one.get("id") == other.get("id")
            and one["indices"] != other["indices"]
        )
    # Other indices into other tensors may be the same rows.
    are_other_tensors, are_other_indices = (one[key] != other[key] for key in ("tensors", "indices"))
    return bool(are_other_tensors != are_other_indices) and (same_dtype or not are_other_tensors)


def _order(indices: NDArray[np.int64]) -> str:
    """Return the digest of row numbers, as in the identity of rows."""
    return str(Rows(range(int(indices.max()) + 1), indices=indices.tolist(), name="").identity()["indices"])


@final
class _Fit:
    """What weights are fitted to: the predictions of every part of the scores, and the default weights."""

    def __init__(self, rows: ScoreSource, sums: SubsetSums, chosen: NDArray[np.int64]) -> None:
        configured = require_kernel(rows).damping
        self._rows = rows
        self.dampings = (None, *_DAMPINGS) if configured is None else tuple(sorted({*_DAMPINGS, configured}))
        self.segments = tuple((segment.start, segment.stop) for segment in rows.layout.segments)
        if len(VIEWS) * len(rows.train) * len(self.segments) * len(self.dampings) > _MOST_PARTS:
            self.segments = ((0, rows.layout.width),)
        num_subsets, some = len(sums.by_checkpoint[0]["off"]), torch.from_numpy(chosen).to(rows.device)
        axes = (len(VIEWS), len(rows.train), len(self.segments), len(self.dampings))
        parts = np.empty((*axes, num_subsets, len(chosen)))
        for c, table in enumerate(rows.train):
            for d, solved in enumerate(rows.at_dampings(table, self.dampings)):
                targets = solved.double()[some]
                for s, (start, stop) in enumerate(self.segments):
                    for v, view in enumerate(VIEWS):
                        part = sums.by_checkpoint[c][view][:, start:stop] @ targets[:, start:stop].T
                        parts[v, c, s, d] = part.cpu().numpy()
        self.parts = parts.reshape(-1, num_subsets, len(chosen))
        """Predictions of each view, checkpoint, segment and damping alone, ``(V C s D, S, targets)``."""
        prior = np.zeros(axes)
        default = np.asarray(rows.method.weights(len(rows.train)))
        prior[VIEWS.index(rows.method.q), :, :, self.dampings.index(configured)] = default[:, None]
        self.prior = prior.reshape(-1)

    def tested(
        self,
        weights: Array,
        better: Array,
        default: Array,
        outputs: Array,
        confidence: float,
        across: Literal["subsets", "targets"] = "subsets",
    ) -> Calibration:
        """Return weights with the LDS and the gain of their predictions ``(S, M)`` on what was held out."""
        lds, (lead,) = compared_scores([better, default], outputs, confidence=confidence)
        better_lds, default_lds = map(Estimate.of, lds)
        gain = Estimate.of(lead)
        return Calibration(
            kept=gain.low > 0.0,
            default=default_lds,
            calibrated=better_lds,
            gain=gain,
            num_held_out=outputs.shape[0 if across == "subsets" else 1],
            views=VIEWS,
            checkpoints=tuple(self._rows.digests),
            segments=self.segments,
            dampings=self.dampings,
            weights=tuple(map(float, weights)),
            across=across,
        )


def require_kernel(rows: ScoreSource) -> KernelSettings:
    """Return the kernel settings of the method of scores; raise if it has none."""
    kernel = rows.method.kernel
    if kernel is None:
        raise InvalidInputError(
            f"Scores of {rows.method.name} have no kernel to calibrate. Verify them with calibrate=False, or "
            "calibrate those of GaussNewton, Fisher or TRAK."
        )
    return kernel


def fitted_to_subsets(
    rows: ScoreSource, sums: SubsetSums, predicted: Array, outputs: Array, confidence: float
) -> Calibration:
    """Return weights fitted on every other subset and tested on the rest."""
    fitted, held_out = np.arange(0, len(outputs), 2), np.arange(1, len(outputs), 2)
    last = outputs.shape[1] - 1
    chosen = np.unique(np.linspace(0, last, min(last + 1, _CALIBRATION_TARGETS)).astype(np.int64))
    made = _Fit(rows, sums, chosen)
    weights = fit_weights(made.parts[:, fitted], outputs[np.ix_(fitted, chosen)], made.prior)
    targets = _calibrated_targets(rows, made, weights)
    better = sum((sums.predict(targets[view], view) for view in VIEWS), np.zeros(predicted.shape))
    return made.tested(weights, better[held_out], predicted[held_out], outputs[held_out], confidence)


def _calibrated_targets(
    rows: ScoreSource, fit: _Fit | Calibration, weights: Array
) -> dict[str, list[Tensor]]:
    """Return, per view and checkpoint, the weighted sum over dampings of (H + lambda I)^-1 targets, ``(M, K)``."""
    shape = (len(VIEWS), len(rows.train), len(fit.segments), len(fit.dampings))
    widths = [stop - start for start, stop in fit.segments]
    by_column = torch.from_numpy(np.repeat(weights.reshape(shape), widths, axis=2)).to(rows.device)
    mixed: dict[str, list[Tensor]] = {view: [] for view in VIEWS}
    for c, table in enumerate(rows.train):
        totals = [by_column.new_zeros(rows.num_targets, rows.layout.width) for _ in VIEWS]
        for d, targets in enumerate(rows.at_dampings(table, fit.dampings)):
            for v, total in enumerate(totals):
                total += targets * by_column[v, c, :, d]
        for view, total in zip(VIEWS, totals, strict=True):
            mixed[view].append(total)
    return mixed


def calibrated_matrix(rows: ScoreSource, calibration: Calibration) -> NDArray[np.float32]:
    """Return the scores with the calibrated kernel, ``(N, M)``."""
    if calibration.checkpoints != tuple(rows.digests):
        raise InvalidInputError(
            "The weights were fitted to scores of other checkpoints. Calibrate these scores."
        )
    if not calibration.kept:
        raise StateError(
            f"The calibrated kernel was not significantly better (gain {calibration.gain}), so it was not stored. Use "
            "the scores without calibration, or calibrate with more subsets or targets."
        )
    targets = _calibrated_targets(rows, calibration, np.array(calibration.weights))
    scores = np.zeros((rows.num_rows, rows.num_targets), np.float32)
    dtype = rows.product_dtype(*calibration.dampings)
    for view in VIEWS:
        terms = [
            ScoreTerm(table, features.to(dtype))
            for table, features in zip(rows.train, targets[view], strict=True)
        ]
        for tile in tile_ranges(rows.num_rows, rows.num_rows):
            scores[tile.start : tile.stop] += score_tile(terms, tile, q=view).cpu().numpy()
    return scores


def summed_over(scores: Scores, masks: NDArray[np.bool_]) -> Array:
    """Return the scores' predictions for the subsets, ``(S, M)``: float64 sums of the exact sums of tiles."""
    num_rows, num_targets = scores.shape
    total = np.zeros((len(masks), num_targets))
    for start in range(0, num_rows, _TILE_ROWS):
        part = np.arange(start, min(start + _TILE_ROWS, num_rows))
        total += summed_scores(scores.rows(part), masks[:, part])
    return total
