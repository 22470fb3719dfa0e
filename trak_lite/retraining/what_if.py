"""What changes if a set of train rows goes, comes twice or gets other labels.

Shapes: N train rows, M targets, R seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.devices import undisturbed
from trak_lite.core.validate import row_numbers, some_of
from trak_lite.data.batches import flatten_batch, rows_in_batches
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError, printable
from trak_lite.evaluation._arrays import coverage
from trak_lite.evaluation.trials import (
    Array,
    EffectInterval,
    Trials,
    concentration_of,
    fewest_trials,
    standardised_sum,
)
from trak_lite.run.tables import model_id_of
from trak_lite.scoring.scores import Scores

__all__ = ["Effects", "SummedEffects", "what_if"]

_SHOWN: Final = 5
_MEASURE: Final = "try_removals(scores, train_fn, targets) (on the command line: trak-lite trials CONFIG)"


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Effects:
    """Predicted changes of the outputs f of all targets, with an interval each."""

    name: str
    """Of the target set."""
    change: str
    """What changes, such as ``"without 60 of 1,200 train rows (5 %)"``."""
    predicted: NDArray[np.float64]
    """``(M,)`` f afterwards minus f before; calibrated on the trials if there is an interval."""
    lower: NDArray[np.float64] | None
    """``(M,)`` lower ends of the intervals, minus infinity for a target without one; ``None`` if no target has one."""
    upper: NDArray[np.float64] | None
    """``(M,)`` upper ends."""
    level: float
    """Nominal coverage: share of the targets whose interval contains the change."""
    basis: str
    """Which retrainings the intervals come from, or why there are none."""

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.change}"]
        for word, sign in (("fall", 1.0), ("rise", -1.0)):
            signed = sign * self.predicted
            chosen = [int(i) for i in np.argsort(signed)[:_SHOWN] if signed[i] < 0]
            if chosen:
                lines.append(f"largest {word}s: " + "; ".join(map(self._shown, chosen)))
        if self.lower is not None and self.upper is not None and (count := np.isfinite(self.lower).sum()):
            sure = int(((self.lower > 0) | (self.upper < 0)).sum())
            lines.append(f"{sure} of {count} intervals exclude 0 (level {self.level:.0%})")
        return printable("\n".join([*lines, self.basis]))

    def __repr__(self) -> str:
        return f"Effects({self})"

    def _shown(self, target: int) -> str:
        text = f"target {target}: {self.predicted[target]:+.3g}"
        if self.lower is None or self.upper is None or np.isinf(self.lower[target]):
            return text if self.lower is None else f"{text} (no interval)"
        return f"{text} [{self.lower[target]:+.3g}, {self.upper[target]:+.3g}]"

    def to_json(self) -> dict[str, Any]:
        """Return the effects as JSON values; arrays become lists, missing intervals and their ends ``None``."""
        arrays = {name: getattr(self, name) for name in ("predicted", "lower", "upper")}
        lists = {
            name: None if array is None else [float(end) if np.isfinite(end) else None for end in array]
            for name, array in arrays.items()
        }
        texts = {name: getattr(self, name) for name in ("name", "change", "level", "basis")}
        return {**texts, **lists}


def what_if(
    scores: Scores,
    remove: ArrayLike | None = None,
    *,
    add: ArrayLike | None = None,
    relabel: tuple[ArrayLike, Any] | None = None,
    level: float = 0.9,
) -> Effects:
    """Predict how the output of every target changes if train rows go, come twice or get other labels.

    The prediction is the sum of the scores: minus those of removed rows, plus those of added rows, plus those of
    relabelled rows with the new label minus those with the old one.

    A removed set gets an interval from sets whose removal was measured: those of :func:`~trak_lite.try_removals`,
    otherwise the random subsets of :func:`~trak_lite.verify`, which resemble random sets only, and the less the more
    their sizes differ: 10 subsets of half of the rows answer for about half of the rows, of many targets. These are
    compared with each other and not with models of all rows, so that their intervals are widened by the change that the
    scores predict for random rows. The interval is about the mean output of R models that are trained without the rows,
    R as in these retrainings, minus the expected output of models that are trained on all rows. Sets that too few
    retrainings resemble in size and concentration, and sets that are larger or denser than all of them, get no
    interval, and ``basis`` says why; nor do added or relabelled rows, because no retraining has measured them.

    Args:
        scores: Scores of any method, of all train rows (without ``k=`` and ``refine=``).
        remove: Row numbers, or a mask ``(N,)``, of the rows that are left out.
        add: Row numbers or a mask of the rows that are trained on twice.
        relabel: The rows, and a dataset (or :class:`~trak_lite.Rows`) of the same rows with their new labels, in the
            same order. Their features are computed at all checkpoints. After ``featurize`` in this process, each sample
            must share one of its tensors with its train row, or some of the entries of one of int32 or int64 (token
            ids). Samples of one tensor, of other shapes, or drawn anew at each access are not compared.
        level: Nominal coverage of the intervals, above 0 and below 1. A higher one takes in trials that resemble the
            set less, and the prediction is fitted to these.

    Raises:
        InvalidInputError: If no row is given, a row does not exist or occurs in two of the arguments, all rows are
            removed, there is not one relabelled sample per row, a sample is not that of its row, the level is out of
            range, or the scores are of some rows only.
        StateError: With ``relabel``, if the scores were opened without a model or not made from stored rows, or the
            weights of a checkpoint cannot be found.
    """
    num_rows, level = len(scores), coverage(level=level)
    removed, added = (_numbers(rows, num_rows, what) for rows, what in ((remove, "remove"), (add, "add")))
    relabelled = _numbers(None if relabel is None else relabel[0], num_rows, "relabel")
    everything, times = np.unique(np.concatenate([removed, added, relabelled]), return_counts=True)
    several = everything[times > 1].tolist()
    if not len(everything) or several or len(removed) == num_rows:
        named = f"; in several of these: {some_of(map(str, several))}" if several else ""
        raise InvalidInputError(
            "what_if takes at least one row to remove, add or relabel, each in one of these only, and leaves at least "
            f"one row; got {len(removed)} to remove, {len(added)} to add, {len(relabelled)} to relabel of "
            f"{num_rows}{named}."
        )
    effects = SummedEffects(scores)
    if not len(added) and not len(relabelled):
        return effects.without(removed, level)
    total = effects.sum(added) - effects.sum(removed) - effects.sum(relabelled)
    if relabel is not None:
        total += _scores_of_samples(scores, relabel[1], relabelled)
    verbs = {"without": removed, "twice": added, "with other labels": relabelled}
    change = ", ".join(_counted(verb, len(rows), num_rows) for verb, rows in verbs.items() if len(rows))
    basis = (
        "No interval: the stored retrainings left rows out; none added or relabelled any. The prediction is the sum of "
        "scores."
    )
    return Effects(scores.name, change, total, None, None, level, basis)


@final
class SummedEffects:
    """Sums of scores as predictions of removals, calibrated on the trials that are stored with the scores."""

    def __init__(self, scores: Scores) -> None:
        scores.require_all_rows()
        self.scores = scores
        self.trials, predictions, verdict = scores.trials, scores.predictions, scores.verdict
        if self.trials is None and predictions is not None and verdict is not None:
            self.trials = Trials.of_subsets(*predictions, verdict.alpha, verdict.num_seeds)

    @cached_property
    def _moments(self) -> tuple[Array, Array]:
        """Mean and standard deviation over train rows of the scores of each target, ``(M,)``, in one pass."""
        total, squares = np.zeros((2, self.scores.shape[1]))
        for _, tile in self.scores.tiles():
            total += tile.sum(axis=0, dtype=np.float64)
            squares += np.square(tile, dtype=np.float64).sum(axis=0)
        mean = total / len(self.scores)
        return mean, np.sqrt(np.maximum(squares / len(self.scores) - mean**2, 0.0))

    def sum(self, rows: NDArray[np.int64]) -> Array:
        """Return the scores of some rows, summed, ``(M,)``."""
        total: Array = np.zeros(self.scores.shape[1])
        for start in range(0, len(rows), 1024):
            total += self.scores.rows(rows[start : start + 1024]).sum(axis=0, dtype=np.float64)
        return total

    def standardised(self, rows: NDArray[np.int64], predicted: Array) -> Array:
        """Return minus the sums of a set in standard deviations of random sets of its size, ``(M,)``."""
        return standardised_sum(predicted, len(rows), len(self.scores), *self._moments)

    def without(self, rows: NDArray[np.int64], level: float, *, target: int | None = None) -> Effects:
        """Return the effects of removing rows; with ``target``, only that target has an interval."""
        predicted = -self.sum(rows)
        change = _counted("without", len(rows), len(self.scores))
        if self.trials is None:
            basis = (
                "No interval: no retraining is stored with these scores. The prediction is the sum of scores"
            )
            measurable = self.scores.stored and self.scores.row_source is not None  # others are refused
            basis += f"; measure with {_MEASURE}, or verify." if measurable else "."
            return Effects(self.scores.name, change, predicted, None, None, level, basis)
        standard, share = self.standardised(rows, predicted), len(rows) / len(self.scores)
        interval = self.trials.interval(predicted, standard, share, level=level, target=target)
        width = interval.half_width
        # no model with all rows was trained: what all sets of the size share is not measured
        if self.trials.of_verdict:
            width = width + np.abs(len(rows) * self._moments[0])
        lower, upper = interval.predicted - width, interval.predicted + width
        basis = _basis(self.trials, interval, (share, float(concentration_of(standard))), level)
        if np.isinf(interval.half_width).all():
            return Effects(self.scores.name, change, predicted, None, None, level, basis)
        return Effects(self.scores.name, change, interval.predicted, lower, upper, level, basis)


def _scores_of_samples(scores: Scores, data: Any, numbers: NDArray[np.int64]) -> Array:
    """Return the scores that samples would have as train rows, summed, ``(M,)``."""
    run, method, count = scores.run, scores.method, len(numbers)
    rows = run.rows(data, "the relabelled rows")
    if len(rows) != count:
        raise InvalidInputError(
            f"relabel names {count} rows, but its data has {len(rows)} samples. Pass one per row."
        )
    terms = scores.source.terms()
    if run.train is not None and len(run.train) >= len(scores):
        _refuse_other_samples(run.train, numbers, rows)
    digests = scores.source.digests
    products, factors = np.zeros((len(terms), count, scores.shape[1])), np.zeros((len(terms), count, 1))
    with run.session() as session:

        def visit(digest: str, _: str) -> None:
            index = digests.index(digest)
            term = terms[index]
            passes = session.row_pass(rows, model_id_of(term.train))
            plan = rows_in_batches(np.arange(count), rows.batch_size)
            for computed in passes.stream(plan, lambda: 0):
                features = computed.features if term.transform is None else term.transform(computed.features)
                products[index, computed.wanted] = (features.double() @ term.targets.double().T).cpu().numpy()
                factors[index, computed.wanted, 0] = computed.terms.out_to_loss_grad.double().cpu().numpy()

        train = dict(zip(digests, scores.source.train, strict=True))
        session.visit(train, visit, purpose="to score new labels")
    if method.q != "off":
        products *= factors if method.q == "inside" else factors.mean(axis=0)
    total: Array = products.sum(axis=(0, 1))
    return total


def _refuse_other_samples(train: Rows, numbers: NDArray[np.int64], samples: Rows) -> None:
    """Raise if a sample shares nothing with its train row, where that can be told."""
    is_shared = np.zeros(len(numbers), np.bool_)
    for positions in rows_in_batches(np.arange(len(numbers)), samples.batch_size):
        # One batch per call: the workers of a loader would draw the same augmentation at both accesses.
        asked = ((train, numbers[positions]), (train, numbers[positions]), (samples, positions))
        with undisturbed():
            batches = [batch for rows, wanted in asked for _, batch in rows.batches([wanted])]
        original, again, other = ([leaf.cpu() for leaf in flatten_batch(batch)[0]] for batch in batches)
        shapes = [[leaf.shape for leaf in leaves] for leaves in (original, again, other)]
        if len(original) < 2 or shapes != shapes[:1] * 3 or not all(map(torch.equal, original, again)):
            return
        for one, two in zip(original, other, strict=True):
            equal = (one == two).reshape(len(one), -1)
            has_ids = one.dtype in (torch.int32, torch.int64)  # of token ids, some are enough
            is_shared[positions] |= (equal.any(1) if has_ids else equal.all(1)).numpy()
    if not is_shared.all():
        raise InvalidInputError(
            f"In relabel, the samples of rows {some_of(map(str, numbers[~is_shared]))} differ from the train rows in "
            "all tensors, not only in their labels. Pass the samples of these rows, in the order of the row numbers."
        )


def _numbers(rows: ArrayLike | None, num_rows: int, what: str) -> NDArray[np.int64]:
    """Return the numbers of different rows from numbers or a mask."""
    array = np.empty(0, np.int64) if rows is None else np.asarray(rows)
    if array.dtype == np.bool_ and array.size:
        if array.shape != (num_rows,):
            raise InvalidInputError(
                f"{what}: a mask needs one entry for each of the {num_rows} train rows, got the shape {array.shape}."
            )
        array = np.flatnonzero(array)
    if not array.size:
        return np.empty(0, np.int64)
    numbers = row_numbers(num_rows, "the train data", rows=array)
    if len(np.unique(numbers)) < len(numbers):
        raise InvalidInputError(f"{what} names a row twice. Name each row once.")
    return numbers


def _counted(verb: str, count: int, num_rows: int) -> str:
    return f"{verb} {count:,} of {num_rows:,} train rows ({count / num_rows:.1%})"


def _basis(trials: Trials, interval: EffectInterval, shape: tuple[float, float], level: float) -> str:
    """Return which retrainings an interval comes from, or why there is none."""
    kind = "random subsets of the verdict" if trials.of_verdict else "trial sets"
    seeds = f"{trials.num_seeds} model{'s' * (trials.num_seeds > 1)} each"
    where = f"share {shape[0]:.1%}, concentration {shape[1]:.1f}"
    refused = int(np.isinf(interval.half_width).sum())
    if refused < len(interval.half_width):
        some = f"; {refused} targets that too few resemble have no interval" if refused else ""
        typical = np.median(interval.similar[np.isfinite(interval.half_width)])
        weight = f"the weight of {typical:.1f} resembles this set ({where})"
        return f"From {len(trials)} {kind} ({seeds}), of which {weight}{some}."
    why = (
        f"of {len(trials)} {kind} the weight of {interval.similar.max():.1f} resembles it, and an interval needs "
        f"{fewest_trials(level)}"
        if interval.similar.any()
        else f"it is larger or denser than all {len(trials)} {kind}"
    )
    return (
        f"No interval for this set ({where}): {why}. The prediction is the sum of scores, which can be several times "
        f"too small or too large. {_more(trials, float(interval.similar.max()), level)}"
    )


def _more(trials: Trials, similar: float, level: float) -> str:
    """Return which retrainings would give a set an interval that trials of the weight ``similar`` resemble."""
    if trials.of_verdict:
        return f"Measure sets of many kinds with {_MEASURE}."
    budget = math.ceil(1.1 * len(trials) * fewest_trials(level) / similar) if similar else math.inf
    if budget > 10 * len(trials):
        return "try_removals(..., shares=..., groups=...) measures sets of other sizes and kinds."
    return f"Measure more sets: try_removals(..., budget={budget}) may suffice (in a config: trials.budget)."
