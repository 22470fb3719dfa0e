"""Verdict on scores: how well they predict retrained models, compared with simple baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from textwrap import indent
from types import UnionType
from typing import Any, NamedTuple, Self, cast, final, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.notebook import notebook_table
from trak_lite.errors import printable
from trak_lite.evaluation.datamodeling import FEWEST_SUBSETS, LinearDatamodelingScore, ScoreDifference


class Predictions(NamedTuple):
    """Summed scores of subsets of the train rows, and outputs of the models trained on these subsets."""

    summed: NDArray[np.float64]
    """``(S, m)`` scores summed over each subset, for some of the targets."""
    retrained: NDArray[np.float64]
    """``(S, m)`` outputs of the retrained models, mean over seeds."""


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its bootstrap interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, score: LinearDatamodelingScore | ScoreDifference) -> Self:
        """Return the mean and the interval of a score."""
        return cls(score.mean, *score.interval)

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@final
@dataclass(frozen=True, slots=True)
class Baseline:
    """Result of a simple method on the same retrained models."""

    name: str
    lds: Estimate
    lead: Estimate
    """Score of the scores minus that of the baseline, paired over subsets and targets."""


@final
@dataclass(frozen=True, slots=True)
class Calibration:
    """Weights of checkpoint x module x damping x view: fitted to half of the subsets or targets, tested on the rest."""

    kept: bool
    """Whether the interval of ``gain`` lies above 0."""
    default: Estimate
    """Linear datamodeling score of the uncalibrated scores on the held-out half."""
    calibrated: Estimate
    """Linear datamodeling score of the calibrated scores on the held-out half."""
    gain: Estimate
    """Calibrated minus default, paired."""
    num_held_out: int
    """Subsets or targets of the held-out half."""
    views: tuple[str, ...]
    """Where q is applied: ``"outside"`` the mean over checkpoints, ``"inside"`` per checkpoint, ``"off"`` nowhere."""
    checkpoints: tuple[str, ...]
    """Digests of the checkpoints' weights."""
    segments: tuple[tuple[int, int], ...]
    """Columns of a feature row that share a weight."""
    dampings: tuple[float | None, ...]
    """Lambdas in units of the mean eigenvalue; ``None`` is the default damping."""
    weights: tuple[float, ...]
    """In the order view, checkpoint, segment, damping."""
    across: str = "subsets"
    """What is held out: ``"subsets"`` of retrained models, or ``"targets"`` of a teacher."""

    def __str__(self) -> str:
        return (
            f"calibrated kernel {'kept' if self.kept else 'not kept'}: gain {self.gain} on {self.num_held_out} "
            f"held-out {self.across} (LDS {self.calibrated} instead of {self.default})"
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a store keeps as JSON and a notebook displays."""

    def __repr__(self) -> str:
        return indent(f"{type(self).__name__}\n{self}", "  ")[2:]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the verdict of :meth:`to_json`; KeyError, TypeError, ValueError or AttributeError for other values."""
        verdict: Self = _read(cls, values)
        return verdict


@final
@dataclass(frozen=True, slots=True, repr=False)
class Verdict(_Stored):
    """Evaluation of the scores of one target set against retrained models."""

    lds: Estimate
    """Linear datamodeling score of the uncalibrated scores over all subsets."""
    baselines: tuple[Baseline, ...]
    """Simple methods on the same models."""
    num_subsets: int
    """Number of subsets that models were trained on."""
    num_seeds: int
    """Models per subset."""
    alpha: float
    """Share of the train rows in a subset."""
    num_targets: int
    """Number of targets."""
    num_constant: int
    """Targets whose output is the same for all subsets; left out."""
    confidence: float
    """Nominal coverage of every interval."""
    ceiling: float | None
    """Expected score of a perfect method, given the noise of seeds; ``None`` with one seed."""
    calibration: Calibration | None
    """The calibrated kernel, if requested."""
    compared: str = field(default="", compare=False)
    """Which stored outputs of models were used, and how they were compared with the present training."""

    @property
    def conclusion(self) -> str:
        """What follows from the intervals, in a sentence."""
        if self.num_subsets < FEWEST_SUBSETS:
            return (
                f"Nothing follows from {self.num_subsets} subsets, whose order can be right by chance: do not act on "
                f"these scores. Use at least {FEWEST_SUBSETS} subsets, better 10 (budget=)."
            )
        if self.lds.low <= 0:
            return (
                "No proven relation to retraining: do not act on these scores. Use more subsets (budget=), and more "
                "checkpoints."
            )
        ahead = [one.name for one in self.baselines if one.lead.low <= 0]
        claim = "The scores predict retraining"
        if any(one.lead.high < 0 for one in self.baselines):
            better = next(one.name for one in self.baselines if one.lead.high < 0)
            return f"{claim}, but {better} does so better: use it, or another method."
        if ahead:
            return f"{claim}, without a proven lead over {' and '.join(ahead)}: use more subsets (budget=)."
        lead = " better than every baseline" if self.baselines else ""
        return (
            f"{claim}{lead}: act on sets of rows. The LDS is about sums over many rows; scores.reliability() tells for "
            "which targets single rows can be relied on."
        )

    def __str__(self) -> str:
        ceiling = "" if self.ceiling is None else f", a perfect method about {self.ceiling:.3f}"
        lines = [
            f"LDS {self.lds} on {self.num_subsets} subsets x {self.num_seeds} seeds of {self.alpha:.0%} of the rows, "
            f"{self.num_targets - self.num_constant} targets ({self.confidence:.0%} intervals{ceiling})"
        ]
        lines += [f"{one.name}: LDS {one.lds}, the scores lead by {one.lead}" for one in self.baselines]
        if self.calibration is not None:
            lines.append(str(self.calibration))
        return printable("\n".join([*lines, self.conclusion, *([self.compared] if self.compared else [])]))

    def _repr_html_(self) -> str:
        more = [str(one) for one in (self.calibration, self.conclusion, self.compared) if one]
        return notebook_table(
            f"LDS {self.lds.mean:.3f}",
            ("baseline", "LDS", "the scores lead by"),
            [(one.name, str(one.lds), str(one.lead)) for one in self.baselines],
            notes=[str(self).partition("\n")[0], *more],
        )


@final
@dataclass(frozen=True, slots=True, repr=False)
class OneRunVerdict(_Stored):
    """Evaluation of scores against repetitions of one run with random rows left out.

    It answers: how well do the scores predict what leaving rows out of this run changes, with the same seed and order
    of batches? Other seeds are the question of :class:`Verdict`.
    """

    lds: tuple[tuple[float, Estimate], ...]
    """Share of the rows that is left out, and the linear datamodeling score over such subsets."""
    num_subsets: int
    """Subsets per share."""
    num_targets: int
    """Number of targets."""
    metasmoothness: float
    """How linearly the run follows the weights of its rows; see :meth:`TrainingRun.metasmoothness`."""
    confidence: float
    """Nominal coverage of every interval."""
    run: str
    """Digest of the run."""

    def __str__(self) -> str:
        lines = [
            f"the same run (seed and order) without random rows, {self.num_subsets} subsets each, {self.num_targets} "
            f"targets, metasmoothness {self.metasmoothness:.3f} ({self.confidence:.0%} intervals)"
        ]
        lines += [f"{_percent(share)} left out: LDS {lds}" for share, lds in self.lds]
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        return notebook_table(
            "LDS, the same run",
            ("left out", "LDS"),
            [(_percent(share), str(lds)) for share, lds in self.lds],
            notes=[str(self).partition("\n")[0]],
        )


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def _read(kind: Any, value: Any) -> Any:
    """Return a JSON value as a dataclass, a tuple, an optional value or a plain type, with everything in it."""
    parts = get_args(kind)
    if isinstance(kind, UnionType):  # X | None
        return None if value is None else _read(parts[0], value)
    if get_origin(kind) is tuple:
        parts = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_read(part, one) for part, one in zip(parts, value, strict=True))
    if not is_dataclass(kind):
        return kind(value)
    kinds, cls = get_type_hints(kind), cast("type[Any]", kind)
    return cls(**{one.name: _read(kinds[one.name], value[one.name]) for one in fields(kind)})
