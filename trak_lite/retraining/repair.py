"""Sets of train rows whose removal changes one target as asked, tested by retraining.

Shapes: N train rows, M targets, R seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import target_number
from trak_lite.errors import InvalidInputError, printable
from trak_lite.retraining.plans import TrainFunction
from trak_lite.retraining.verify import Retrain, measured
from trak_lite.retraining.what_if import Effects, SummedEffects
from trak_lite.scoring.records import ScoreEntries
from trak_lite.scoring.scores import Scores

__all__ = ["Repair", "repair"]

_GROWTH: Final = 1.15
"""Ratio of one tried size to the one before."""
_SHOWN: Final = 5


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Repair:
    """A set of train rows whose removal is predicted to change a target as asked, and what else it changes."""

    target: int
    """The target."""
    goal: float
    """The change of its f that was asked for."""
    rows: NDArray[np.int64]
    """``(k,)`` the rows to remove, the strongest first."""
    reached: bool
    """Whether the nearer end of the interval of ``effects`` reaches the goal, or, where the target has no interval, the
    prediction, without a probability; if not, ``rows`` are those of the set that comes closest."""
    effects: Effects
    """Predicted changes of all targets without the rows."""
    measured: NDArray[np.float64] | None = None
    """``(R, M)`` f of a model without the rows minus f of one with all rows, for each seed; ``None`` without a test."""

    @property
    def success(self) -> bool | None:
        """Whether the mean change over seeds reaches the goal in retrained models; ``None`` without a test."""
        if self.measured is None:
            return None
        return bool(np.sign(self.goal) * (self.measured[:, self.target].mean() - self.goal) >= 0)

    def __str__(self) -> str:
        of, target, interval = self.effects, self.target, ""
        verdict = f"{'predicted' if self.reached else 'NOT predicted'} to be reached"
        if of.lower is None or of.upper is None or np.isinf(of.lower[target]):
            verdict += " by the uncalibrated sum of scores, without a probability"
        else:
            interval = f" [{of.lower[target]:+.3g}, {of.upper[target]:+.3g}] (level {of.level:.0%})"
            if not self.reached:
                chance = f"{(1 + of.level) / 2:.0%}"
                verdict += (
                    f" with a chance of {chance} by a set that has an interval; shown is the best of these"
                )
        lines = [
            f"target {target}, goal {self.goal:+.3g}, {verdict}",
            f"{of.change}: predicted change {of.predicted[target]:+.3g}{interval}",
        ]
        changes = of.predicted
        if self.measured is not None:
            changes, by_seed = self.measured.mean(axis=0), self.measured[:, target]
            span = f"from {by_seed.min():+.3g} to {by_seed.max():+.3g}"
            verdict = f"{'reaches' if self.success else 'misses'} the goal"
            lines.append(
                f"retrained with {len(by_seed)} seeds: measured change {by_seed.mean():+.3g} ({span}), which {verdict}"
            )
        others = [int(i) for i in np.argsort(-np.abs(changes), kind="stable") if i != target][:_SHOWN]
        if others:
            size = np.sqrt(np.mean(np.square(np.delete(changes, target))))
            listed = "; ".join(f"target {i}: {changes[i]:+.3g}" for i in others)
            what = "predicted" if self.measured is None else "measured"
            lines.append(
                f"{what} changes of the other targets: root mean square {size:.3g}; largest {listed}"
            )
        return printable("\n".join([*lines, of.basis]))

    def __repr__(self) -> str:
        return f"Repair({self})"

    def to_json(self) -> dict[str, Any]:
        """Return the repair as JSON values."""
        return {
            **{name: getattr(self, name) for name in ("target", "goal", "reached", "success")},
            "rows": self.rows.tolist(),
            "effects": self.effects.to_json(),
            "measured": None if self.measured is None else self.measured.tolist(),
        }


def repair(
    scores: Scores,
    target: int,
    goal: float,
    *,
    most: float = 0.2,
    chance: float = 0.8,
    train_fn: TrainFunction | None = None,
    targets: Any = None,
    budget: int = 6,
    first_seed: int = 1000,
    train_id: str | None = None,
) -> Repair:
    """Find a small set of train rows whose removal changes the output of one target as asked.

    Rows are taken in the order of their scores, for a fall the most helpful ones first. The set is the smallest of the
    tried sizes that reaches the goal with a probability of at least ``chance``, by the intervals of :func:`what_if`;
    sets without an interval are left out. If no set has one (without trials), it is the smallest whose sum of scores
    reaches the goal: this sum is not calibrated, and has no probability. With ``train_fn`` and ``targets``,
    models are trained with all rows and without the set, with the same fresh seeds.

    Args:
        scores: Scores of any method, of all train rows (without ``k=`` and ``refine=``).
        target: Number of the target.
        goal: The change of its f: negative to make it fall, positive to make it rise.
        most: Largest share of the train rows to remove.
        chance: Probability that a retraining without the set reaches the goal, above 0.5: the intervals have the level
            ``2 * chance - 1``, and their nearer end reaches it.
        train_fn: As in :func:`~trak_lite.verify`; ``None`` does not test the set.
        targets: The targets that were scored, for the test.
        budget: Number of retrainings of the test, half of them with all rows; at least 2.
        first_seed: First seed of the test. Use one that no trial, verdict or checkpoint was trained with.
        train_id: As in :func:`~trak_lite.verify`.

    Raises:
        InvalidInputError: If the target does not exist, the goal is 0 or not finite, ``most`` is not between 0 and 1,
            the budget is too small, only one of ``train_fn`` and ``targets`` is given, or the scores are of some rows
            only.
        StateError: With ``train_fn``, if the matrix is not stored or the scores were opened without a model.
        RetrainingError: If a training fails; names subset (0: all rows) and seed.
    """
    effects = SummedEffects(scores)
    number, num_rows = target_number(target, scores.shape[1], scores.name), len(scores)
    largest = min(int(most * num_rows), num_rows - 1) if 0.0 < most < 1.0 else 0
    if not np.isfinite(goal) or not goal or largest < 1:
        raise InvalidInputError(
            f"goal must be a change other than 0, and most a share of at least one of {num_rows} rows but not all, "
            f"got {goal!r} and {most!r}."
        )
    if (train_fn is None) != (targets is None) or budget < 2:
        raise InvalidInputError(
            "A test needs train_fn, targets and a budget of at least 2 retrainings: with all rows and without. Got "
            f"train_fn={train_fn!r:.60}, targets={type(targets).__name__} and budget={budget!r}."
        )
    if not 0.5 < chance < 1.0:
        raise InvalidInputError(f"chance must lie between 0.5 and 1, got {chance!r}.")
    order = scores.top(largest, target=number, sign="helpful" if goal < 0 else "harmful").indices
    proposal = _smallest(effects, order, number, float(goal), 2.0 * chance - 1.0)
    if train_fn is None:
        return proposal
    masks = np.ones((2, num_rows), np.bool_)
    masks[1, proposal.rows] = False
    seeds = range(first_seed, first_seed + budget // 2)

    def measure(retrain: Retrain, _: ScoreEntries) -> NDArray[np.float64]:
        with_all, without = retrain(masks, seeds=seeds).outputs.astype(np.float64)
        changes: NDArray[np.float64] = without - with_all
        return changes

    return replace(proposal, measured=measured(scores, train_fn, targets, train_id, "repair", measure))


def _smallest(
    effects: SummedEffects, order: NDArray[np.int64], target: int, goal: float, level: float
) -> Repair:
    """Return the smallest tried prefix of the rows that reaches the goal, or the one that comes closest."""
    direction = float(np.sign(goal))

    def sum_of(size: int) -> float:
        return -direction * float(effects.sum(order[:size])[target])

    def nearer_end(prediction: Effects) -> float:
        """Return how far the interval of the target reaches at least; no interval promises nothing."""
        if prediction.lower is None or prediction.upper is None:
            return -np.inf
        return min(direction * float(end[target]) for end in (prediction.lower, prediction.upper))

    def end_of(size: int) -> float:
        return nearer_end(effects.without(order[:size], level, target=target))

    size, reach = 0, -np.inf
    if effects.trials is not None:
        size, reach = _first(end_of, len(order), abs(goal))
    if np.isinf(reach):  # for no size an interval is known
        size, reach = _first(sum_of, len(order), abs(goal))
    prediction = effects.without(order[:size], level)
    end = nearer_end(prediction)  # a size between the tried ones may have an interval
    return Repair(target, goal, order[:size], (reach if np.isinf(end) else end) >= abs(goal), prediction)


def _first(reach: Callable[[int], float], largest: int, goal: float) -> tuple[int, float]:
    """Return the smallest tried size that reaches the goal, or the one that comes closest, and its reach."""
    count = int(np.log(largest) / np.log(_GROWTH)) + 2
    below, reached = 0, dict[int, float]()
    for size in np.unique(np.ceil(np.geomspace(1, largest, count)).astype(int)).tolist():
        reached[size] = reach(size)
        if reached[size] < goal:
            below = size
            continue
        while size - below > 1:
            middle = (below + size) // 2
            reached[middle] = reach(middle)
            below, size = (below, middle) if reached[middle] >= goal else (middle, size)
        return size, reached[size]
    return max(reached.items(), key=lambda tried: tried[1])
