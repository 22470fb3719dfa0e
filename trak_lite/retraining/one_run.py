"""Test scores against repetitions of one run: same seed and order of batches, with random rows left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trak_lite.data.datasets import rows_of
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.evaluation import linear_datamodeling_score, subset_masks
from trak_lite.evaluation.verdict import Estimate, OneRunVerdict
from trak_lite.modelout_functions import AbstractModelOutput, resolve_task
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.retraining.calibrated import summed_over
from trak_lite.retraining.subsets import retrain_run
from trak_lite.run.repeats import outputs_of_model
from trak_lite.run.settings import Task
from trak_lite.scoring.scores import Scores
from trak_lite.store.disk.files import refuse_links
from trak_lite.store.manifest import Manifest, compare_fingerprints
from trak_lite.unrolled import TrainingRun

_SHARES: Final = (0.01, 0.05, 0.1, 0.5)
"""Shares of the train rows that are left out."""


def verify_run(
    scores: Scores,
    run: TrainingRun,
    targets: Any,
    *,
    budget: int = 10,
    subset_seed: int = 0,
    confidence: float = 0.95,
    task: Task | None = None,
) -> OneRunVerdict:
    """Test scores against repetitions of one run, with the same seed and batches, without random rows.

    The run of a :class:`~trak_lite.unrolled.Recipe` is repeated without 1, 5, 10 and 50 % of the rows. This asks what
    leaving rows out changes in this run, which scores of :func:`~trak_lite.unrolled.unrolled` answer;
    :func:`~trak_lite.verify` asks what it changes on average over seeds. The verdict is stored with the scores, if
    these are stored. The repetitions are stored in the folder of the run: a second call trains one of each share again,
    to compare it.

    Args:
        scores: Scores of any method that were made with the model and the train rows of the run.
        run: A finished run.
        targets: The targets that were scored: a dataset, a DataLoader or :class:`~trak_lite.Rows`.
        budget: Number of random subsets of each share.
        subset_seed: Seed of the subsets.
        confidence: Nominal coverage of the intervals.
        task: Defines f; ``None`` is the task that the scores were made with.

    Returns:
        An LDS per share of rows left out.

    Raises:
        InvalidInputError: If the budget is too small, scores, run and targets differ in size, the scores were made from
            other train rows or with another architecture than the run, or a share leaves out no row.
        ManifestMismatchError: If scores of a replay belong to other targets, another task, other data or another model,
            or the training has changed since.
        RetrainingError: If a training fails; names subset and seed.
    """
    if not isinstance(run, TrainingRun):
        raise InvalidInputError(
            f"verify_run takes a TrainingRun (recipe.train(...)), got {type(run).__name__}. A train_fn is for verify."
        )
    check_budget(budget)
    asked = _task_of(scores) if task is None else resolve_task(task)
    rows = rows_of(targets, what="the targets")
    num_rows = len(run.recipe.rows)
    if scores.shape != (num_rows, len(rows)):
        raise InvalidInputError(
            f"The scores have shape {scores.shape}, but the run has {num_rows} train rows and there are {len(rows)} "
            "targets."
        )
    identity = {"run": run.digest, "targets": rows.identity(), "task": describe_task(asked), "budget": budget}
    digest = Manifest(identity).digest()
    _require_scored(scores, run, identity)
    folder = None if run.path is None else run.path / "left-out" / digest[:16]
    if folder is not None:
        refuse_links(str(folder))
    found = []
    for share in _SHARES:
        left_out = max(1, round(share * num_rows))
        if left_out >= num_rows:
            raise InvalidInputError(
                f"A share of {share!r} leaves out {left_out} of {num_rows} rows. Leave out at least one, but not all."
            )
        masks = ~subset_masks(num_rows, budget, alpha=left_out / num_rows, seed=subset_seed)
        retrained = retrain_run(
            run.leave_out_fn,
            masks,
            lambda model: outputs_of_model(model, asked, rows, run.device),
            path=None if folder is None else folder / f"{masks[0].sum()}-{subset_seed}.zarr",
            digest=digest,
        )
        predicted = summed_over(scores, masks)
        lds = linear_datamodeling_score(predicted, None, retrained.mean, confidence=confidence)
        found.append((share, Estimate.of(lds)))
    verdict = OneRunVerdict(tuple(found), budget, len(rows), run.metasmoothness(), confidence, run.digest)
    scores.keep(verdict)
    return verdict


def check_budget(budget: int, *, fewest: int = 2, where: str = "") -> None:
    """Raise if the number of subsets is too small, before the first training."""
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < fewest:
        raise InvalidInputError(
            f"budget must be an integer of at least {fewest}{where}, got {budget!r}. Every subset costs one training "
            "per seed."
        )


def _task_of(scores: Scores) -> AbstractModelOutput:
    try:
        return scores.task
    except StateError as error:
        raise InvalidInputError(
            f"The task of the scores {scores.name!r} is not known, because they were made without an attributor and a "
            "replay, or opened without a model. Pass task=, with which they were made."
        ) from error


def _require_scored(scores: Scores, run: TrainingRun, identity: Mapping[str, Any]) -> None:
    """Raise if the scores belong to other targets, another task, other train rows or another architecture."""
    made = scores.manifest.fingerprint
    if made.get("kind") != "unrolled":
        if "dataset" in made:
            run.require_train_rows(made["dataset"])
        run.require_parameters(made.get("parameters", {}))
        return
    compare_fingerprints(
        {key: made[key] for key in ("targets", "task")},
        {key: identity[key] for key in ("targets", "task")},
        where=f"The scores {scores.name!r}",
        remedy="Pass the targets and the task that were scored.",
    )
    # Other seeds and optimizers are allowed: do the scores of one run predict another?
    compare_fingerprints(
        {key: made["run"][key] for key in ("data", "modules", "trained")},
        {key: run.fingerprint[key] for key in ("data", "modules", "trained")},
        where=f"The run of the scores {scores.name!r}",
        remedy="Pass the run that was replayed, or one of the same model on the same train data.",
    )
