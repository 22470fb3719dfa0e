"""Trials: retrainings without sets of train rows of many kinds, which give the effects of sets their intervals.

Shapes: N train rows, M targets, J trials, R seeds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.validate import integer_at_least
from trak_lite.data.columns import labels_of
from trak_lite.data.datasets import every_nth
from trak_lite.errors import InvalidInputError
from trak_lite.evaluation.trials import Array, Trials, fewest_trials
from trak_lite.retraining.plans import TrainFunction, seed_numbers, seed_step
from trak_lite.retraining.verify import Retrain, check_budget, measured
from trak_lite.retraining.what_if import SummedEffects
from trak_lite.scoring.records import ScoreEntries
from trak_lite.scoring.scores import Scores

__all__ = ["try_removals"]

_SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2)
_KINDS: Final = ("random", "helpful", "all harmful", "random", "harmful", "similar", "all helpful")
"""Kinds of trial sets, in turn: random rows, the most helpful or harmful rows of a random target, or of all targets in
the mean, and the rows with the scores that are most similar to those of a random row; :func:`_trial_sets` has more."""
_KEPT_TARGETS: Final = 256
"""Number of targets, evenly spaced, whose changes calibrate the intervals of all; bounds their time and memory."""


def try_removals(
    scores: Scores,
    train_fn: TrainFunction,
    targets: Any,
    *,
    budget: int = 60,
    shares: Sequence[float] = _SHARES,
    groups: ArrayLike | str | None = None,
    seeds: Sequence[int] = (5,),
    base_seeds: Sequence[int] = (0, 1, 2, 3, 4),
    seed: int = 0,
    train_id: str | None = None,
) -> Trials:
    """Retrain without sets of many kinds and sizes, and store how the outputs change, for :func:`~trak_lite.what_if`.

    In turn the sets are random rows, the most helpful or harmful rows of a random target, or of all targets in the
    mean, the rows whose scores are most similar to those of a random row, with ``groups`` rows of a random group (if it
    is too small, with those of another), and the rows with the largest stored q, whose labels may be wrong
    (:meth:`~trak_lite.Attributor.label_suspicion`). Retrainings are stored and shared as those of
    :func:`~trak_lite.verify`; the same call resumes.

    Args:
        scores: Scores of an attributor, with a stored matrix.
        train_fn: As in :func:`~trak_lite.verify`.
        targets: The targets that were scored.
        budget: Number of sets; each is trained without once per seed. At the default level an interval needs 9 trials
            that resemble the set, and 60 give them for most sets; with one target, its most helpful 20 % need 70 to 90.
            More make the intervals narrower.
        shares: Sizes of the sets, as shares of the train rows. Larger sets get no interval. No set occurs twice: where
            all sets of a size are used, another size takes its place.
        groups: ``(N,)`` group of each train row (its class, source), or the name of a stored column.
        seeds: Seeds of the models that are trained without the first set; those of the other sets follow them. They are
            not those of the models of all rows.
        base_seeds: Seeds of the models that are trained on all rows, at least 2.
        seed: Seed of the sets, at least 0.
        train_id: As in :func:`~trak_lite.verify`.

    Raises:
        InvalidInputError: If the budget is too small for an interval, or larger than the number of sets, a share is not
            between 0 and 1, or a seed or groups cannot be used.
        StateError: If the matrix of the scores is not stored, or they were opened without a model.
        ManifestMismatchError: If ``targets`` are not those that were scored.
        RetrainingError: If a training fails; names subset and seed.
    """
    num_rows, budget = len(scores), check_budget(budget, fewest=fewest_trials(0.9))
    seed_of_sets = integer_at_least(0, seed=seed)  # None would draw others at each call
    firsts, of_all = seed_numbers(seeds=seeds), seed_numbers(2, base_seeds=base_seeds)
    used = {seed + number * seed_step(firsts) for seed in firsts for number in range(budget)}
    if not used.isdisjoint(of_all):
        raise InvalidInputError(
            f"seeds must not be those of the models of all rows: the {budget} sets take the seeds {min(used)} to "
            f"{max(used)}, and base_seeds are {of_all}. Pass seeds=({max(of_all) + 1},), or other base_seeds."
        )
    sizes = [max(1, round(share * num_rows)) if 0.0 < share < 1.0 else 0 for share in shares]
    if not sizes or min(sizes) < 1 or max(sizes) >= num_rows:
        raise InvalidInputError(
            f"shares must lie between 0 and 1 and leave a row, got {tuple(shares)!r:.100}."
        )
    if budget > num_rows:  # of any one size there are at least as many sets as rows
        possible = sum(math.comb(num_rows, size) for size in range(1, max(sizes) + 1))
        if budget > possible:
            raise InvalidInputError(
                f"budget must be at most {possible}, the number of sets of at most {max(sizes)} of {num_rows} train "
                f"rows, got {budget}. Lower it, or pass a larger share."
            )
    labels = None
    if groups is not None:
        columns = scores.columns if isinstance(groups, str) else {}
        labels = labels_of(groups, columns, num_rows, "The groups of train rows").places
    some = np.arange(scores.shape[1])[every_nth(scores.shape[1], _KEPT_TARGETS)]

    def measure(retrain: Retrain, entries: ScoreEntries) -> Array:
        rng = np.random.default_rng(seed_of_sets)
        q = None if scores.row_source is None else np.abs(scores.row_source.mean_out_to_loss())
        sets = list(_trial_sets(scores.numpy(), sizes, budget, rng, labels, some, q))
        masks = np.ones((budget, num_rows), np.bool_)
        for mask, members in zip(masks, sets, strict=True):
            mask[members] = False
        with_all = retrain(np.ones((1, num_rows), np.bool_), seeds=of_all)
        # With the same seeds all sets would share the error of these models, which other seeds do not have.
        without = retrain(masks, seeds=firsts, others=True)
        effects = SummedEffects(scores)
        predicted = np.stack([-effects.sum(members) for members in sets])
        standard = np.stack([effects.standardised(*pair) for pair in zip(sets, predicted, strict=True)])
        shares = np.array([len(members) / num_rows for members in sets])
        before = with_all.outputs[0].astype(np.float64)
        outputs, noise = before.mean(axis=0), before.std(axis=0, ddof=1)
        trials = Trials(
            shares,
            predicted[:, some],
            standard[:, some],
            (without.mean - outputs)[:, some],
            outputs[some],
            noise[some],
            len(without.seeds),
        )
        entries.put_trials(trials)
        return trials.to_array()

    return Trials.from_array(measured(scores, train_fn, targets, train_id, "try_removals", measure))


def _trial_sets(
    scores: NDArray[np.float32],
    sizes: Sequence[int],
    budget: int,
    rng: np.random.Generator,
    labels: NDArray[np.int64] | None,
    targets: NDArray[np.int64],
    suspicion: NDArray[np.float64] | None,
) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each trial set; all kinds occur in one size, then in the next. No set occurs twice."""
    kinds, mean = _KINDS if labels is None else (*_KINDS, "group"), scores.mean(axis=1)
    if suspicion is not None and np.ptp(suspicion) > 0:
        kinds = (*kinds, "suspect")
    sets: defaultdict[int, set[bytes]] = defaultdict(set)
    units = scores / np.maximum(np.linalg.norm(scores, axis=1, keepdims=True), 1e-30)
    for number in range(budget):
        size, kind = sizes[number // len(kinds) % len(sizes)], kinds[number % len(kinds)]
        order = rng.permutation(len(scores))
        if kind.endswith(("helpful", "harmful")):
            column = mean if kind.startswith("all") else scores[:, rng.choice(targets)]
            order = np.argsort(-column if kind.endswith("helpful") else column, kind="stable")
        elif kind == "suspect" and suspicion is not None:
            order = np.argsort(-suspicion, kind="stable")
        elif kind == "similar":
            order = np.argsort(-(units @ units[order[0]]), kind="stable")
        elif kind == "group" and labels is not None:
            ranks = rng.permutation(labels.max() + 1)
            order = order[np.argsort(ranks[labels[order]], kind="stable")]
        while len(sets[size]) >= len(order) and len(sets[size]) == math.comb(len(order), size):
            size = size % max(sizes) + 1  # every set of this size is a trial
        ranked, wider = order, size
        while np.sort(order[:size]).tobytes() in sets[size]:  # a copy of a trial would count as another one
            wider = min(2 * wider, len(ranked))
            order = rng.permutation(ranked[:wider])
        sets[size].add(np.sort(order[:size]).tobytes())
        yield order[:size]
