"""Test scores against retrained models, or repetitions of one run: LDS, baselines, calibration and a verdict.

Shapes: N train rows, M targets, S subsets, K feature width, C checkpoints, V views, D dampings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from trak_lite.core.eval_caches import own_modes
from trak_lite.core.files import refuse_links
from trak_lite.core.json_text import digest_of
from trak_lite.core.validate import integer_at_least
from trak_lite.data.datasets import Rows, every_nth, rows_of
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.evaluation import Verdict, bm25, subset_masks, summed_scores
from trak_lite.evaluation.datamodeling import compared_scores
from trak_lite.evaluation.verdict import Baseline, Calibration, Estimate, OneRunVerdict
from trak_lite.linalg.products import unit_rows
from trak_lite.modelout_functions import AbstractModelOutput, resolve_task
from trak_lite.modelout_functions._base import Task, outputs_of_model
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.models.borrowing import borrow_model
from trak_lite.models.checkpoints import Checkpoint, module_versions, with_versions
from trak_lite.models.loading import load_into
from trak_lite.models.sharded import refuse_sharded
from trak_lite.retraining.calibrated import (
    Array,
    SubsetSums,
    calibrated_matrix,
    fitted_to_subsets,
    require_kernel,
    summed_over,
)
from trak_lite.retraining.plans import TrainFunction, retraining_plan
from trak_lite.retraining.subsets import Retrained, retrain_into, retrain_run
from trak_lite.run.tables import retrain_path, row_kind, score_path, without_fit
from trak_lite.scoring.matrix import HeldMatrix
from trak_lite.scoring.records import ScoreEntries
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.stored import source_of_stored
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.unrolled import TrainingRun

Retrain: TypeAlias = Callable[..., Retrained]
"""``retrain(masks, seeds=...)``: trains on subsets and evaluates the targets, for all scores of these targets."""

_KEPT_TARGETS: Final = 64
"""Number of targets whose predictions are stored for plots."""
_FEWEST_FOR_CALIBRATION: Final = 6
_LARGEST_BUDGET: Final = 1_000_000
_LEFT_OUT: Final = (0.01, 0.05, 0.1, 0.5)
"""Shares of the train rows that are left out of one run."""


def verify(
    scores: Scores,
    train_fn: TrainFunction,
    targets: Any,
    *,
    budget: int = 10,
    seeds: Sequence[int] = (0,),
    alpha: float = 0.5,
    strata: ArrayLike | None = None,
    subset_seed: int = 0,
    calibrate: bool = False,
    texts: tuple[Sequence[Any], Sequence[Any]] | None = None,
    confidence: float = 0.95,
    train_id: str | None = None,
) -> Verdict:
    """Test scores against models that are retrained on random subsets of the train rows.

    The verdict reports the linear datamodeling score (LDS): the rank correlation of summed scores with the retrained
    models' outputs of a target. It also reports the LDS of cheap baselines, and a sentence on what follows
    (``verdict.conclusion``). The verdict is stored and printed with the scores. Every retraining is stored. The same
    call therefore resumes after a kill, and verifying other scores of the same targets (another method,
    ``calibrate=True``) repeats one stored retraining per seed only, to check that the training is unchanged; with a
    ``train_id`` it trains nothing. A larger budget, or more seeds after the same ones, train what is new only. If the
    outputs differ, all models are trained again.
    The verdict says what was compared. Several processes share the retrainings. In a distributed run rank 0 trains.

    This asks what leaving rows out changes on average over seeds; :func:`verify_run` asks what it changes in one run.

    Args:
        scores: Scores of an attributor, with a stored matrix.
        train_fn: ``train_fn(rows, seed)`` trains from scratch on these train rows, numbered as in ``scores``, and
            returns a module of the attributed architecture or its state dict.
        targets: The targets that were scored: a dataset, a DataLoader or :class:`~trak_lite.Rows`.
        budget: Number of random subsets. Each is trained on once per seed. From fewer than 5 nothing follows, and
            ``calibrate=True`` takes at least 6, and keeps no weights with fewer than 10.
        seeds: Passed to ``train_fn``. One more subset is worth more than a second seed, but the noise ceiling needs two
            seeds.
        alpha: Share of the train rows in a subset.
        strata: ``(N,)`` group of each train row. Every subset contains the same share of each group.
        subset_seed: Seed of the subsets, at least 0.
        calibrate: Fit weights per checkpoint, module, damping and position of q on every other subset. They are stored
            for :func:`calibrated_scores` only if they are significantly better on the remaining subsets.
        texts: Train texts and target texts (or their tokens) for the BM25 baseline.
        confidence: Nominal coverage of the intervals.
        train_id: A name for this version of the training, instead of the source code of ``train_fn``. Stored
            retrainings of this name are used without repeating one: change it with all that the training depends on.

    Raises:
        InvalidInputError: If budget or subset_seed is out of range, texts or strata have the wrong length, or
            ``calibrate=True`` and the scores have no kernel.
        StateError: If the matrix of the scores is not stored, or they were opened without a model.
        ManifestMismatchError: If ``targets`` are not those that were scored.
        RetrainingError: If a training fails; names subset and seed.
        UnsupportedModelError: If the model is sharded.
    """
    if calibrate:
        check_budget(budget, fewest=_FEWEST_FOR_CALIBRATION, where=" with calibrate=True")
    budget, subset_seed = check_budget(budget), integer_at_least(0, subset_seed=subset_seed)

    def decide(retrain: Retrain, entries: ScoreEntries) -> dict[str, Any]:
        source = source_of_stored(entries.store, scores)
        if calibrate:
            require_kernel(source)
        masks = subset_masks(len(scores), budget, alpha=alpha, seed=subset_seed, strata=strata)
        retrained = retrain(masks, seeds=seeds)
        outputs, predicted = retrained.mean, summed_over(scores, masks)
        sums = SubsetSums(source, masks)
        others = dict(_baselines(source, sums, masks, scores.shape, texts))
        (score_lds, *baseline_lds), leads = compared_scores(
            [predicted, *others.values()], outputs, confidence=confidence
        )
        baselines = (
            Baseline(name, Estimate.of(lds), Estimate.of(lead))
            for name, lds, lead in zip(others, baseline_lds, leads, strict=True)
        )
        verdict = Verdict(
            lds=Estimate.of(score_lds),
            baselines=tuple(baselines),
            num_subsets=len(outputs),
            num_seeds=len(retrained.seeds),
            alpha=float(masks.mean()),
            num_targets=outputs.shape[1],
            num_constant=score_lds.num_constant,
            confidence=confidence,
            ceiling=retrained.noise_ceiling().ceiling if len(retrained.seeds) > 1 else None,
            calibration=fitted_to_subsets(source, sums, predicted, outputs, confidence)
            if calibrate
            else None,
            compared=retrained.compared,
        )
        some = every_nth(scores.shape[1], _KEPT_TARGETS)
        entries.put(verdict, np.stack([predicted[:, some], outputs[:, some]]))
        return verdict.to_json()

    return Verdict.from_json(measured(scores, train_fn, targets, train_id, "verify", decide))


def measured(
    scores: Scores,
    train_fn: TrainFunction,
    targets: Any,
    train_id: str | None,
    call: str,
    measure: Callable[[Retrain, ScoreEntries], Any],
) -> Any:
    """Return the JSON values or the array that ``measure`` makes of retrained models, and of the entries of scores.

    Rank 0 calls it, with a store that is open for writing; the other ranks wait and receive the result.
    """
    if isinstance(train_fn, TrainingRun):
        raise InvalidInputError("A TrainingRun is verified with verify_run. Otherwise pass recipe.train_fn.")
    run = scores.run
    refuse_sharded(run.model, call, f"{call.capitalize()} with a whole model of the same store")
    if not scores.stored:
        raise StateError(
            f"The scores {scores.name!r} are computed when they are read, and {call} needs a stored matrix. Call "
            "score(..., dense=True)."
        )
    rows = run.targets(targets)
    output_fn = partial(_target_outputs, run.model, run.settings.task, rows, run.settings.device)

    def measure_once() -> Any:
        identity = {"targets": run.target_identity(rows)}
        with run.workspace.opened(run.settings.manifest(None)) as workspace:
            store = workspace.store()
            path = score_path(store, scores.name, scores.method, run.settings.method)
            scored = without_fit(store.open_table(path).spec.fingerprint["targets"])
            remedy = "Pass the targets that were scored under this name."
            compare_fingerprints({"targets": scored}, identity, where=path, remedy=remedy)

            def retrain(masks: ArrayLike, *, seeds: Sequence[int], others: bool = False) -> Retrained:
                plan = retraining_plan(train_fn, masks, output_fn, seeds, train_id, run.progress, identity)
                return retrain_into(workspace, retrain_path(scores.name), plan, others=others)

            return measure(retrain, ScoreEntries(store, path))

    with run.joined(f"{call} {scores.name!r}") as ranks:
        return ranks.broadcast(f"the result of {call}", measure_once)


def calibrated_scores(scores: Scores, calibration: Calibration | None = None) -> Scores:
    """Return the scores with a calibrated kernel, ``(N, M)``, in memory.

    Args:
        scores: The scores.
        calibration: The result of :func:`calibrate`; ``None`` is the one that :func:`verify` stored.

    Raises:
        StateError: If the scores were not verified with ``calibrate=True``, or the calibrated kernel was not better.
    """
    verdict = scores.verdict
    if calibration is None and verdict is not None:
        calibration = verdict.calibration
    if calibration is None:
        raise StateError(
            f"The scores {scores.name!r} were not calibrated. Pass the result of calibrate(scores, teacher), or call "
            "verify(scores, train_fn, targets, calibrate=True)."
        )
    with scores.run.workspace.reading() as store:
        matrix = calibrated_matrix(source_of_stored(store, scores), calibration)
    held_out = f"{calibration.num_held_out} held-out {calibration.across}"
    settings = {**scores.settings, "calibrated_on": held_out}
    made_with = scores.name, scores.method, scores.manifest, settings
    return Scores(HeldMatrix(matrix), *made_with, known_task=scores.task)


def _target_outputs(
    model: nn.Module,
    task: AbstractModelOutput,
    targets: Rows,
    device: torch.device,
    trained: nn.Module | Mapping[str, Tensor],
) -> Tensor:
    """Return the model output f of every target with the weights of ``trained``, ``(M,)``.

    The weights are loaded into ``model``, which is restored afterwards and may be ``trained`` itself.
    """
    state = trained.state_dict() if isinstance(trained, nn.Module) else trained
    modes = own_modes(trained) if isinstance(trained, nn.Module) else {}
    if isinstance(state, Mapping):
        # Copy the values: if trained is model, borrow_model and load_into overwrite them.
        copies = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        state = with_versions(copies, module_versions(state))
    with borrow_model(model, device):
        load_into(model, Checkpoint("retrained", None, lambda: state), modes=modes)
        return outputs_of_model(model, task, targets, device)


def _baselines(
    rows: ScoreSource,
    sums: SubsetSums,
    masks: NDArray[np.bool_],
    shape: tuple[int, int],
    texts: tuple[Sequence[Any], Sequence[Any]] | None,
) -> Iterator[tuple[str, Array]]:
    """Yield the names and predictions ``(S, M)`` of the baselines."""
    targets = rows.plain_targets()
    if targets is not None:
        # Adam updates are already those of the loss, so q would multiply them twice.
        is_update = row_kind(rows.store.manifest) == "adam_update"
        yield "gradient dot product, no kernel", sums.predict(targets, "off" if is_update else "outside")
        yield "nearest in feature space (cosine)", sums.predict(list(map(unit_rows, targets)), "unit")
    # q decreases with f and increases with the loss. The prediction is the same for all targets.
    loss = rows.mean_out_to_loss()
    if np.ptp(loss) > 0:  # q is 1 where f is minus the loss
        yield "loss of the train row (its q)", np.tile((masks @ loss)[:, None], shape[1])
    if texts is not None:
        if (len(texts[0]), len(texts[1])) != shape:
            raise InvalidInputError(
                f"texts must be {shape[0]} train texts and {shape[1]} target texts, got {len(texts[0])} and "
                f"{len(texts[1])}."
            )
        yield "BM25 of the texts", summed_scores(bm25(*texts), masks)


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

    The run of a :class:`~trak_lite.unrolled.Recipe` is repeated without 1, 5, 10 and 50 % of the rows, rounded to whole
    rows; the verdict has the shares that these are, each once. This asks what leaving rows out changes in this run,
    which scores of :func:`~trak_lite.unrolled.unrolled` answer; :func:`~trak_lite.verify` asks what it changes on
    average over seeds. The verdict is stored with the scores, if these are stored. The repetitions are stored in the
    folder of the run: a second call trains one of each share again, to compare it.

    Args:
        scores: Scores of any method that were made with the model and the train rows of the run.
        run: A finished run.
        targets: The targets that were scored: a dataset, a DataLoader or :class:`~trak_lite.Rows`.
        budget: Number of random subsets of each share. From fewer than 5 nothing follows: the interval is [-1, 1].
        subset_seed: Seed of the subsets, at least 0.
        confidence: Nominal coverage of the intervals.
        task: Defines f; ``None`` is the task that the scores were made with.

    Returns:
        An LDS per share of rows left out.

    Raises:
        InvalidInputError: If budget or subset_seed is out of range, scores, run and targets differ in size, the scores
            were made from other train rows or with another architecture than the run, or the run has one row.
        ManifestMismatchError: If scores of a replay belong to other targets, another task, other data or another model,
            or the training has changed since.
        RetrainingError: If a training fails; names subset and seed.
    """
    if not isinstance(run, TrainingRun):
        raise InvalidInputError(
            f"verify_run takes a TrainingRun (recipe.train(...)), got {type(run).__name__}. A train_fn is for verify."
        )
    budget, subset_seed = check_budget(budget), integer_at_least(0, subset_seed=subset_seed)
    try:
        asked = scores.task if task is None else resolve_task(task)
    except StateError as error:
        raise InvalidInputError(
            f"The task of the scores {scores.name!r} is not known, because they were made without an attributor and a "
            "replay, or opened without a model. Pass task=, with which they were made."
        ) from error
    rows = rows_of(targets, what="the targets")
    num_rows = len(run.recipe.rows)
    if scores.shape != (num_rows, len(rows)):
        raise InvalidInputError(
            f"The scores have shape {scores.shape}, but the run has {num_rows} train rows and there are {len(rows)} "
            "targets."
        )
    identity = {"run": run.digest, "targets": rows.identity(), "task": describe_task(asked), "budget": budget}
    digest = digest_of(identity)
    _require_scored(scores, run, identity)
    folder = None if run.path is None else run.path / "left-out" / digest[:16]
    if folder is not None:
        refuse_links(str(folder))
    estimates = []
    for left_out in dict.fromkeys(max(1, round(share * num_rows)) for share in _LEFT_OUT):
        if left_out >= num_rows:
            raise InvalidInputError(
                f"verify_run leaves out at least one row, but not all, and the run has {num_rows}. Train on more rows."
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
        ((lds,), _) = compared_scores([predicted], retrained.mean, confidence=confidence)
        estimates.append((left_out / num_rows, Estimate.of(lds)))
    verdict = OneRunVerdict(tuple(estimates), budget, len(rows), run.metasmoothness(), confidence, run.digest)
    scores.keep(verdict)
    return verdict


def check_budget(budget: int, *, fewest: int = 2, where: str = "") -> int:
    """Return the number of subsets; raise if it is out of range, before the first training."""
    is_number = isinstance(budget, int | np.integer) and not isinstance(budget, bool)
    if not is_number or not fewest <= budget <= _LARGEST_BUDGET:
        most = f", and at most {_LARGEST_BUDGET:,}" if is_number and budget > _LARGEST_BUDGET else ""
        raise InvalidInputError(
            f"budget must be an integer of at least {fewest}{where}{most}, got {budget!r}. Every subset costs one "
            "training per seed."
        )
    return int(budget)


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
