"""Methods of trak_lite, through its public API, and baselines. Shapes: N train rows, M targets.

A method takes a :class:`Problem` and returns scores ``(N, M)``. All methods use the same models, data and targets.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.lds.settings import Setting
from benchmarks.lds.training import Weights, train
from trak_lite import Attributor, calibrated_scores, verify
from trak_lite.methods import CG, EKFAC, TRAK, GradCos, GradDot, TracIn
from trak_lite.modelout_functions import AbstractModelOutput, CausalLanguageModelingModelOutput

BATCH = 50
CALIBRATION_SUBSETS = 10
CALIBRATION_SEED = 20_000_000


@dataclass(frozen=True, slots=True)
class Problem:
    """Input of every method."""

    setting: Setting
    runs: list[list[Weights]]
    """Checkpoints of each run on all data; a run's last is its final model."""
    output: AbstractModelOutput | None = None
    """What to attribute; ``None`` is what is measured."""

    def measured(self) -> AbstractModelOutput:
        """Return the model output function that the other packages use."""
        return self.setting.measured() if self.output is None else self.output

    @property
    def train(self) -> TensorDataset:
        """The N train rows."""
        return TensorDataset(*self.setting.data()[:2])

    @property
    def targets(self) -> TensorDataset:
        """The M targets."""
        return TensorDataset(*self.setting.data()[2:])

    def model(self, weights: Weights | None = None) -> nn.Module:
        """Return the network with the given weights, by default the final weights of the first run."""
        model = self.setting.make_model().eval()
        model.load_state_dict(self.runs[0][-1] if weights is None else weights)
        return model

    def attributor(self, folder: str | None, *, task: Any = None, **settings: Any) -> Attributor:
        """Return an attributor of the task, by default that of the setting, with its store in a folder or in memory."""
        path = None if folder is None else f"{folder}/store"
        settings = {"batch_size": BATCH, "progress": False, **settings}
        return Attributor(self.model(), task or self.setting.task, path, **settings)

    def checkpoints(self, which: str) -> list[Weights]:
        """Return ``final`` (of one run), ``run`` (all of one run), ``finals`` or ``runs`` (of all runs)."""
        chosen = self.runs if which in ("finals", "runs") else self.runs[:1]
        return [weights for run in chosen for weights in (run[-1:] if which.startswith("final") else run)]


@dataclass(frozen=True, slots=True)
class Attribution:
    """Result of a method."""

    scores: np.ndarray
    """``(N, M)``; positive is helpful."""
    num_models: int
    """Checkpoints used."""
    proj_dim: int | None = None
    """K; ``None`` where nothing is projected."""
    row_bytes: int | None = None
    """On disk per train row, over all checkpoints; ``None`` where rows are not kept."""
    note: str | None = None
    """What else there is to say."""


Method = Callable[[Problem], Attribution]


def ours(
    problem: Problem,
    *,
    checkpoints: str = "run",
    fields: dict[str, Any] | None = None,
    task: Any = None,
    target_task: Any = None,
    **settings: Any,
) -> Attribution:
    """Featurize and score.

    Args:
        problem: The problem to attribute.
        checkpoints: As in :meth:`Problem.checkpoints`.
        fields: Fields of the attributor's method to replace in ``score``.
        task: Replaces the task of the setting.
        target_task: Task of the targets alone; ``None`` is that of the train rows.
        **settings: Arguments of ``Attributor``.
    """
    states = problem.checkpoints(checkpoints)
    with tempfile.TemporaryDirectory() as folder:
        attributor = problem.attributor(folder, task=task, **settings)
        attributor.featurize(problem.train, states)
        method = replace(attributor.method, **(fields or {}))
        scores = attributor.score(problem.targets, method=method, task=target_task).numpy()
        row_bytes = attributor.row_bytes * len(states)
        return Attribution(scores, len(states), attributor.projector.proj_dim, row_bytes)


def streamed(
    problem: Problem, *, method: Any = None, target_task: Any = None, checkpoints: str = "run"
) -> Attribution:
    """Score without stored rows, by EK-FAC with one sampled gradient per train row, or by a method."""
    states = problem.checkpoints(checkpoints)
    attributor = problem.attributor(None)
    method = method or EKFAC(damping=0.1, samples=len(problem.train))
    scores = attributor.stream_scores(
        problem.train, problem.targets, method=method, checkpoints=states, task=target_task
    )
    return Attribution(scores.numpy(), len(states))


def averaged(problem: Problem, parts: tuple[Method, ...]) -> Attribution:
    """Return the mean of several methods' scores, each divided by its standard deviation."""
    found = [part(problem) for part in parts]
    scores = np.mean([one.scores / one.scores.std() for one in found], axis=0)
    return Attribution(scores, found[0].num_models, found[0].proj_dim, found[0].row_bytes)


def calibrated(problem: Problem, **settings: Any) -> Attribution:
    """Retrain on a few subsets (none of the ground truth), fit the kernel's weights on half of them, and score.

    The calibrated kernel is used if it is better on the other half, as for a user.
    """
    setting, states = problem.setting, problem.checkpoints("run")

    def train_on(rows: np.ndarray, seed: int) -> Weights:
        mask = np.zeros((1, len(problem.train)), dtype=bool)
        mask[0, rows] = True
        return train(setting, mask, [CALIBRATION_SEED + int(rows[:20].sum())])[0][-1]

    with tempfile.TemporaryDirectory() as folder:
        attributor = problem.attributor(folder, **settings)
        attributor.featurize(problem.train, states)
        scores = attributor.score(problem.targets)
        verdict = verify(
            scores, train_on, problem.targets, budget=CALIBRATION_SUBSETS, calibrate=True, train_id="lds"
        )
        kept = verdict.calibration is not None and verdict.calibration.kept
        values = calibrated_scores(scores).numpy() if kept else scores.numpy()
        row_bytes = attributor.row_bytes * len(states)
        note = f"calibrated kernel {'kept' if kept else 'not kept'}"
        return Attribution(values, len(states), attributor.projector.proj_dim, row_bytes, note)


def word_overlap(problem: Problem) -> Attribution:
    """Return BM25 of the texts, which does not use the model; only for settings with texts."""
    from trak_lite.evaluation import bm25

    texts = [[bytes(row).decode("latin-1") for row in ids.tolist()] for ids in problem.setting.data()[::2]]
    return Attribution(np.asarray(bm25(*texts)), 0)


def fitted_datamodel(masks: np.ndarray, values: np.ndarray) -> Attribution:
    """Return a ridge regression of outputs on membership, fitted to the retrainings that defaults were chosen on."""
    x, y = masks - masks.mean(0), values - values.mean(0)
    gram = x @ x.T
    gram[np.diag_indices_from(gram)] += np.trace(gram) / len(gram)
    return Attribution(x.T @ np.linalg.solve(gram, y), len(masks))


TRAK_DEFAULT = {"method": TRAK(), "proj_dim": 512, "layout": "joint"}
MARGINS = CausalLanguageModelingModelOutput(output="margin")
LOG_P = CausalLanguageModelingModelOutput(output="log_prob")
"""The default; the targets' f is the margin in the ground truth."""
NOT_PROJECTED = partial(ours, method=EKFAC(damping=0.1), projector="none")
"""EK-FAC without a projection, at the usual damping."""

METHODS: dict[str, Method] = {
    "undamped TRAK, final model": partial(ours, checkpoints="final", **TRAK_DEFAULT),
    "undamped TRAK, run": partial(ours, **TRAK_DEFAULT),
    "gradient dot, final model": partial(ours, checkpoints="final", method=GradDot()),
    "gradient cosine, final model": partial(ours, checkpoints="final", method=GradCos(q="inside")),
    "TracIn, run": partial(ours, method=TracIn()),
    "default, final model": partial(ours, checkpoints="final"),
    "default, run": ours,
    "default, 5 final models": partial(ours, checkpoints="finals"),
    "default, 5 runs": partial(ours, checkpoints="runs"),
    "default with K = 512, run": partial(ours, proj_dim=512),
    "default with one kernel, run": partial(ours, layout="joint"),
    "default not weighted, run": partial(ours, method=TRAK(damping=None, layout="stored")),
    "default with q inside, run": partial(ours, fields={"q": "inside"}),
    "default in int8, run": partial(ours, dtype="int8"),
    "default in int4, run": partial(ours, dtype="int4"),
    "default calibrated on 10 retrainings, run": calibrated,
    "EK-FAC not projected, final model": partial(NOT_PROJECTED, checkpoints="final"),
    "EK-FAC not projected, run": NOT_PROJECTED,
    "EK-FAC projected, run": partial(ours, method=EKFAC()),
    "default and EK-FAC averaged, run": partial(averaged, parts=(ours, NOT_PROJECTED)),
}
TEXT_METHODS: dict[str, Method] = {
    "BM25": word_overlap,
    "default of margins, run": partial(ours, task=MARGINS),
    "default with margins as targets, run": partial(ours, target_task=MARGINS),
    "EK-FAC of margins, not projected, run": partial(NOT_PROJECTED, task=MARGINS),
    "EK-FAC with margins as targets, not projected, run": partial(NOT_PROJECTED, target_task=MARGINS),
    "EK-FAC with margins as targets, projected, run": partial(ours, method=EKFAC(), target_task=MARGINS),
    "EK-FAC with samples, final model": partial(streamed, checkpoints="final"),
    "EK-FAC with samples, run": streamed,
    "EK-FAC with samples and margins as targets, final model": partial(
        streamed, checkpoints="final", target_task=MARGINS
    ),
    "EK-FAC with samples and margins as targets, run": partial(streamed, target_task=MARGINS),
    "CG of 64 rows, 3 iterations, final model": partial(
        streamed, checkpoints="final", method=CG(damping=0.1, max_rows=64, max_iterations=3)
    ),
}
"""For the language model alone."""
