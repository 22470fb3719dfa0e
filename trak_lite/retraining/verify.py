"""Test scores against retrained models: LDS, baselines, calibration and a verdict.

To predict a subset, a linear score needs only the sum of the train features over the subset: ``(S, K)`` per checkpoint,
from one pass over the train rows. Kernels, dampings and views are then applied to S rows instead of N.

Shapes: N train rows, M targets, S subsets, K feature width, C checkpoints, V views, D dampings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, final, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from trak_lite._devices import full_float32
from trak_lite._validate import one_of
from trak_lite.data.batches import move_batch
from trak_lite.data.datasets import Rows, every_nth
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.evaluation import (
    Verdict,
    bm25,
    compare_datamodeling_scores,
    linear_datamodeling_score,
    subset_masks,
    summed_scores,
)
from trak_lite.evaluation.calibration import fit_weights
from trak_lite.evaluation.datamodeling import LinearDatamodelingScore, ScoreDifference
from trak_lite.evaluation.verdict import Baseline, Calibration, Estimate
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall, resolve_task
from trak_lite.models.borrowing import borrow_model
from trak_lite.models.checkpoints import Checkpoint, load_into, module_versions, with_versions
from trak_lite.models.sharded import refuse_sharded
from trak_lite.retraining.one_run import OneRunVerdict, verify_run
from trak_lite.retraining.subsets import Retrained, TrainFunction, retrain_into
from trak_lite.run.settings import Task, row_kind
from trak_lite.run.tables import (
    FEATURES,
    OUT_TO_LOSS,
    as_tensor,
    predictions_path,
    retrain_path,
    score_path,
)
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.stored import Array, ScoredRows, scored_rows, store_verdict, verdict_key
from trak_lite.store import AbstractFeatureStore, AbstractRowTable
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.unrolled import TrainingRun

__all__ = ["SubsetSums", "calibrated_scores", "evaluate", "verify"]

VIEWS: Final = ("outside", "inside", "off")
"""Train rows weighted by their mean q over checkpoints, by the q of each checkpoint, or not weighted."""
_DAMPINGS: Final = (0.1, 1.0, 10.0)
"""Dampings tried by calibration, in addition to the method's."""
_TILE_ROWS: Final = 1024
_MOST_PARTS: Final = 512
"""Maximum number of fitted weights. With more, all modules share theirs."""
_CALIBRATION_TARGETS: Final = 256
"""Maximum number of targets to fit weights on; limits memory."""
_KEPT_TARGETS: Final = 64
"""Number of targets whose predictions are stored for plots."""
_NUM_RESAMPLES: Final = 1000
"""Resamples of every bootstrap."""
_FEWEST_FOR_CALIBRATION: Final = 6


@overload
def verify(
    scores: Scores,
    train_fn: TrainFunction,
    targets: Any,
    *,
    protocol: Literal["expected"] = "expected",
    budget: int = 10,
    seeds: Sequence[int] = (0,),
    alpha: float = 0.5,
    strata: ArrayLike | None = None,
    subset_seed: int = 0,
    calibrate: bool = False,
    texts: tuple[Sequence[Any], Sequence[Any]] | None = None,
    confidence: float = 0.95,
    train_id: str | None = None,
) -> Verdict: ...
@overload
def verify(
    scores: Scores,
    train_fn: TrainingRun,
    targets: Any,
    *,
    protocol: Literal["one-run"],
    budget: int = 10,
    subset_seed: int = 0,
    confidence: float = 0.95,
    task: Task | None = None,
) -> OneRunVerdict: ...
def verify(
    scores: Scores,
    train_fn: TrainFunction | TrainingRun,
    targets: Any,
    *,
    protocol: Literal["expected", "one-run"] = "expected",
    budget: int = 10,
    seeds: Sequence[int] = (0,),
    alpha: float = 0.5,
    strata: ArrayLike | None = None,
    subset_seed: int = 0,
    calibrate: bool = False,
    texts: tuple[Sequence[Any], Sequence[Any]] | None = None,
    confidence: float = 0.95,
    train_id: str | None = None,
    task: Task | None = None,
) -> Verdict | OneRunVerdict:
    """Test scores against models that are retrained on random subsets of the train rows.

    The verdict reports the linear datamodeling score (LDS): the rank correlation of summed scores with the retrained
    models' outputs of a target. It also reports the LDS of cheap baselines. The verdict is stored and printed with the
    scores. Every retraining is stored. The same call therefore resumes after a kill, and verifying other scores of the
    same targets (another method, ``calibrate=True``) trains nothing. A new process first repeats one stored
    retraining, to check that the training is unchanged. Several processes share the retrainings. In a distributed run
    rank 0 trains.

    The default protocol trains with other seeds, and asks what leaving rows out changes on average. ``"one-run"`` asks
    what it changes in one run: the run of a :class:`~trak_lite.unrolled.Recipe` is repeated with the same seed and
    batches, without 1, 5, 10 and 50 % of the rows. Scores of :func:`~trak_lite.unrolled.unrolled` answer this question.

    Args:
        scores: Scores of an attributor, with a stored matrix.
        train_fn: ``train_fn(rows, seed)`` trains from scratch on these train rows, numbered as in ``scores``, and
            returns a module of the attributed architecture or its state dict. With ``protocol="one-run"`` a finished
            :class:`~trak_lite.unrolled.TrainingRun`.
        targets: The targets that were scored: a dataset, a DataLoader or :class:`~trak_lite.Rows`.
        protocol: ``"expected"`` or ``"one-run"``. The latter takes ``budget``, ``subset_seed``, ``confidence`` and
            ``task`` only.
        budget: Number of random subsets, for ``"one-run"`` of each share. Each is trained on once per seed.
        seeds: Passed to ``train_fn``. One more subset is worth more than a second seed, but the noise ceiling needs two
            seeds.
        alpha: Share of the train rows in a subset.
        strata: ``(N,)`` group of each train row. Every subset contains the same share of each group.
        subset_seed: Seed of the subsets.
        calibrate: Fit weights per checkpoint, module, damping and position of q on every other subset. They are stored
            for :func:`calibrated_scores` only if they are significantly better on the remaining subsets.
        texts: Train texts and target texts (or their tokens) for the BM25 baseline.
        confidence: Nominal coverage of the intervals.
        train_id: A name that identifies the training, instead of the source code and captured values of ``train_fn``.
        task: Defines f for ``protocol="one-run"``, if the scores were not made by an attributor.

    Returns:
        The verdict; for ``"one-run"`` an LDS per share of rows left out.

    Raises:
        InvalidInputError: If the budget is too small, texts or strata have the wrong length, or ``calibrate=True`` and
            the scores have no kernel.
        StateError: If the matrix of the scores is not stored, or they were opened without a model.
        ManifestMismatchError: If ``targets`` are not those that were scored, or ``train_id`` names another training.
        RetrainingError: If a training fails; names subset and seed.
        UnsupportedModelError: If the model is sharded.
    """
    if protocol != "expected":
        one_of(("expected", "one-run"), protocol=protocol)
        given = {
            "seeds": seeds != (0,),
            "alpha": alpha != 0.5,
            "strata": strata is not None,
            "calibrate": calibrate,
        }
        given |= {"texts": texts is not None, "train_id": train_id is not None}
        refused = [key for key, used in given.items() if used]
        if refused or not isinstance(train_fn, TrainingRun):
            raise InvalidInputError(
                f"protocol='one-run' takes a TrainingRun (recipe.train(...)) as train_fn, got {type(train_fn).__name__}"
                f"{f', and does not take {refused}' if refused else ''}."
            )
        _check_budget(budget, calibrate=False)
        return verify_run(
            scores,
            train_fn,
            targets,
            _task_of(scores) if task is None else resolve_task(task),
            budget=budget,
            subset_seed=subset_seed,
            confidence=confidence,
        )
    if isinstance(train_fn, TrainingRun):
        raise InvalidInputError(
            "A TrainingRun is verified with protocol='one-run'. Otherwise pass recipe.train_fn."
        )
    run, name = scores.run, scores.name
    refuse_sharded(run.model, "verify", "Verify with a whole model of the same store")
    _check_budget(budget, calibrate=calibrate)
    _require_stored(scores)
    rows = run.rows(targets, "the targets")

    def decide() -> Verdict:
        identity = rows.identity()
        path = score_path(name, scores.method, run.settings.method)
        with run.workspace.opened(run.settings.manifest(None)) as workspace:
            store = workspace.store()
            _refuse_other_targets(store, path, identity)
            source = scored_rows(store, scores, run.settings)
            if calibrate:
                source.require_kernel()
            retrained = retrain_into(
                workspace,
                retrain_path(name),
                train_fn,
                subset_masks(len(scores), budget, alpha=alpha, seed=subset_seed, strata=strata),
                partial(_target_outputs, run.model, run.settings.task, rows, run.settings.device),
                seeds=seeds,
                train_id=train_id,
                progress=run.progress,
                settings={"targets": identity},
            )
            verdict = evaluate(
                scores, source, retrained, calibrate=calibrate, texts=texts, confidence=confidence
            )
            store_verdict(store, path, verdict)
            _store_predictions(store, path, scores, retrained)
        return verdict

    # Rank 0 computes the verdict; the other ranks wait and receive it.
    with run.joined(f"verify {name!r}") as ranks:
        return Verdict.from_json(ranks.broadcast("the verdict", lambda: decide().to_json()))


def _require_stored(scores: Scores) -> None:
    """Raise if the scores have no stored matrix."""
    if not scores.stored:
        raise StateError(
            f"The scores {scores.name!r} are computed when they are read, and verify needs a stored matrix. Call "
            "score(..., dense=True)."
        )


def _refuse_other_targets(store: AbstractFeatureStore, path: str, identity: Mapping[str, Any]) -> None:
    """Raise if targets differ from those of a table of scores."""
    scored = dict(store.open_table(path).spec.fingerprint["targets"])
    scored.pop("curvature", None)  # belongs to the scores, not to the data
    compare_fingerprints(
        {"targets": scored},
        {"targets": identity},
        where=path,
        remedy="Pass the targets that were scored under this name.",
    )


def calibrated_scores(scores: Scores) -> NDArray[np.float32]:
    """Return the scores with the calibrated kernel that :func:`verify` stored, ``(N, M)``.

    Raises:
        StateError: If the scores were not verified with ``calibrate=True``, or the calibrated kernel was not better.
    """
    verdict = scores.verdict
    if verdict is None or verdict.calibration is None:
        raise StateError(
            f"The scores {scores.name!r} were not calibrated. Call verify(scores, train_fn, targets, calibrate=True)."
        )
    with scores.run.workspace.reading() as store:
        return _calibrated_scores(scored_rows(store, scores, scores.run.settings), verdict.calibration)


@final
class SubsetSums:
    """Sums of train features over subsets, for each checkpoint."""

    def __init__(self, rows: ScoredRows, masks: NDArray[np.bool_]) -> None:
        """Read the train rows of every checkpoint once.

        Args:
            rows: The stored rows.
            masks: Rows of each subset, ``(S, N)``.
        """
        members = torch.from_numpy(masks.astype(np.float64)).to(rows.device)
        mean = torch.from_numpy(rows.mean_out_to_loss()).to(rows.device)
        self.by_checkpoint: list[dict[str, Tensor]] = []
        """For each checkpoint the sums by view, ``(S, K)``; ``"unit"`` sums rows scaled to norm 1."""
        for table in rows.train.values():
            own = torch.from_numpy(table.read(OUT_TO_LOSS)).to(mean)
            weights = {"outside": members * mean, "inside": members * own, "off": members}
            self.by_checkpoint.append(_sums(table, weights, rows.layout.width, rows.device))

    def predict(self, targets: Sequence[Tensor], view: str) -> Array:
        """Return ``train row @ target``, summed over each subset and over checkpoints, ``(S, M)``.

        Args:
            targets: ``(M, K)`` for every checkpoint.
            view: One of ``VIEWS``, or ``"unit"``.
        """
        pairs = zip(self.by_checkpoint, targets, strict=True)
        products = [(sums[view] @ rows.T).cpu().numpy() for sums, rows in pairs]
        total: Array = np.sum(products, axis=0)
        return total


def _sums(
    table: AbstractRowTable, weights: Mapping[str, Tensor], width: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the weighted sums of one checkpoint's rows by view, each ``(S, K)`` float64."""
    shape = (len(weights["off"]), width)
    sums = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name in (*weights, "unit")}
    for start, chunk in table.blocks(FEATURES):
        for first in range(0, len(chunk), _TILE_ROWS):
            tile = as_tensor(chunk[first : first + _TILE_ROWS], device).double()
            here = slice(start + first, start + first + len(tile))
            for view, weight in weights.items():
                sums[view] += weight[:, here] @ tile
            sums["unit"] += weights["off"][:, here] @ _unit(tile)
    return sums


def evaluate(
    scores: Scores,
    rows: ScoredRows,
    retrained: Retrained,
    *,
    calibrate: bool,
    texts: tuple[Sequence[Any], Sequence[Any]] | None,
    confidence: float,
) -> Verdict:
    """Return the verdict: scores and baselines compared with retrained models.

    Args:
        scores: ``(N, M)``.
        rows: The stored rows that the scores were computed from.
        retrained: Models trained on subsets, and their outputs for the M targets.
        calibrate: Fit the kernel's weights on every other subset and test them on the rest.
        texts: Train texts and target texts, for BM25.
        confidence: Nominal coverage of every interval.

    Raises:
        InvalidInputError: If there are too few subsets, the outputs of all targets are constant, or there is not one
            text per row and target.
    """
    outputs = retrained.mean
    predicted = _summed(scores, retrained.masks)
    sums = SubsetSums(rows, retrained.masks)
    found = _lds(predicted, outputs, confidence)
    baselines = tuple(
        Baseline(
            name,
            _estimate(_lds(baseline, outputs, confidence)),
            _estimate(_lead(predicted, baseline, outputs, confidence)),
        )
        for name, baseline in _baselines(rows, sums, retrained.masks, scores.shape, texts)
    )
    several = len(retrained.seeds) > 1
    return Verdict(
        lds=_estimate(found),
        baselines=baselines,
        num_subsets=len(outputs),
        num_seeds=len(retrained.seeds),
        alpha=float(retrained.masks.mean()),
        num_targets=outputs.shape[1],
        num_constant=found.num_constant,
        confidence=confidence,
        ceiling=retrained.noise_ceiling().ceiling if several else None,
        calibration=_calibrate(rows, sums, predicted, outputs, confidence) if calibrate else None,
    )


def _target_outputs(
    model: nn.Module,
    task: AbstractModelOutput,
    targets: Rows,
    device: torch.device,
    trained: nn.Module | Mapping[str, Tensor],
) -> Tensor:
    """Return the model output f of every target with the weights of ``trained``, ``(M,)``.

    Args:
        model: The weights are loaded into it; it is restored afterwards.
        task: Computes f.
        targets: M rows.
        device: Device of the computation.
        trained: A module of the same architecture, which may be ``model`` itself, or its state dict.
    """
    state = trained.state_dict() if isinstance(trained, nn.Module) else trained
    if isinstance(state, Mapping):
        # Copy the values: if trained is model, borrow_model and load_into overwrite them.
        copies = {name: _copied(value) for name, value in state.items()}
        state = with_versions(copies, module_versions(state))
    grid = range(0, len(targets), targets.batch_size)
    plan = [np.arange(start, min(start + targets.batch_size, len(targets))) for start in grid]
    with borrow_model(model, device), torch.no_grad():
        load_into(model, Checkpoint("retrained", None, lambda: state))
        task.prepare(model)
        outputs = [
            task.evaluate(ModelCall(model), move_batch(batch, device)).output.cpu().double()
            for _, batch in targets.batches(plan)
        ]
    return torch.cat(outputs)


def _task_of(scores: Scores) -> AbstractModelOutput:
    """Return the task of the attributor that made the scores."""
    try:
        return scores.run.settings.task
    except StateError as error:
        raise InvalidInputError(
            f"The scores {scores.name!r} were not made by an attributor with a model, so their task is not known. Pass "
            "task=, with which they were made."
        ) from error


def _check_budget(budget: int, *, calibrate: bool) -> None:
    """Raise if the budget is too small, before the first training."""
    fewest = _FEWEST_FOR_CALIBRATION if calibrate else 2
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < fewest:
        raise InvalidInputError(
            f"budget must be an integer of at least {fewest}{' with calibrate=True' if calibrate else ''}, got "
            f"{budget!r}. Every subset costs one training per seed."
        )


def _store_predictions(store: AbstractFeatureStore, path: str, scores: Scores, retrained: Retrained) -> None:
    """Store the scores' predictions for the subsets and the retrained models' outputs, for some targets.

    Args:
        store: Store of the scores.
        path: Table of the scores, as in :func:`store_verdict`.
        scores: ``(N, M)``.
        retrained: Models trained on subsets, and their outputs for the M targets.
    """
    some = every_nth(scores.shape[1], _KEPT_TARGETS)
    pairs = np.stack([_summed(scores, retrained.masks)[:, some], retrained.mean[:, some]])
    store.put_entry(predictions_path(path), verdict_key(store, path), pairs)


def _calibrated_scores(rows: ScoredRows, calibration: Calibration) -> NDArray[np.float32]:
    """Return the scores with the calibrated kernel, ``(N, M)``.

    Raises:
        StateError: If the calibrated kernel was not better, so that it was not stored.
    """
    if not calibration.kept:
        raise StateError(
            f"The calibrated kernel was not significantly better (gain {calibration.gain}), so it was not stored. Use "
            "the scores without calibration, or verify with a larger budget."
        )
    targets = _calibrated_targets(rows, calibration, np.array(calibration.weights))
    mean = rows.mean_out_to_loss()
    scores = np.zeros((len(mean), len(targets["off"][0])), np.float32)
    for place, table in enumerate(rows.train.values()):
        own = table.read(OUT_TO_LOSS)
        for start, chunk in table.blocks(FEATURES):
            tile = as_tensor(chunk, rows.device).float()
            here = slice(start, start + len(tile))
            factors = {"outside": mean[here, None], "inside": own[here, None], "off": 1.0}
            with full_float32(tile.device):
                for view, factor in factors.items():
                    scores[here] += (tile @ targets[view][place].float().T).cpu().numpy() * factor
    return scores


def _summed(scores: Scores, masks: NDArray[np.bool_]) -> Array:
    """Return the scores' predictions for the subsets, ``(S, M)``. Reads the scores in tiles of rows."""
    num_rows, num_targets = scores.shape
    total = np.zeros((len(masks), num_targets))
    for start in range(0, num_rows, _TILE_ROWS):
        part = np.arange(start, min(start + _TILE_ROWS, num_rows))
        total += summed_scores(scores.rows(part), masks[:, part])
    return total


def _baselines(
    rows: ScoredRows,
    sums: SubsetSums,
    masks: NDArray[np.bool_],
    shape: tuple[int, int],
    texts: tuple[Sequence[Any], Sequence[Any]] | None,
) -> Iterator[tuple[str, Array]]:
    """Yield the names and predictions ``(S, M)`` of the baselines."""
    if rows.has_targets():
        targets = [rows.targets(table) for table in rows.train.values()]
        # Adam updates are already those of the loss, so q would multiply them twice.
        is_update = row_kind(rows.store.manifest) == "adam_update"
        yield "gradient dot product, no kernel", sums.predict(targets, "off" if is_update else "outside")
        yield (
            "nearest in feature space (cosine)",
            sums.predict([_unit(target) for target in targets], "unit"),
        )
    # q decreases with f and increases with the loss. The prediction is the same for all targets.
    yield "loss of the train row (its q)", np.tile((masks @ rows.mean_out_to_loss())[:, None], shape[1])
    if texts is not None:
        if (len(texts[0]), len(texts[1])) != shape:
            raise InvalidInputError(
                f"texts must be {shape[0]} train texts and {shape[1]} target texts, got {len(texts[0])} and "
                f"{len(texts[1])}."
            )
        yield "BM25 of the texts", summed_scores(bm25(*texts), masks)


def _calibrate(
    rows: ScoredRows, sums: SubsetSums, predicted: Array, outputs: Array, confidence: float
) -> Calibration:
    """Return weights fitted on every other subset and tested on the rest."""
    own = rows.require_kernel().damping
    dampings = (None, *_DAMPINGS) if own is None else tuple(sorted({*_DAMPINGS, own}))
    segments = tuple((segment.start, segment.stop) for segment in rows.layout.segments)
    if len(VIEWS) * len(rows.train) * len(segments) * len(dampings) > _MOST_PARTS:
        segments = ((0, rows.layout.width),)
    fitted, held_out = np.arange(0, len(outputs), 2), np.arange(1, len(outputs), 2)
    num_targets = outputs.shape[1]
    chosen = np.unique(
        np.linspace(0, num_targets - 1, min(num_targets, _CALIBRATION_TARGETS)).astype(np.int64)
    )
    parts = _parts(rows, sums, segments, dampings, chosen)
    prior = np.zeros((len(VIEWS), len(rows.train), len(segments), len(dampings)))
    default = np.asarray(rows.method.weights(len(rows.train)))
    prior[VIEWS.index(rows.method.q), :, :, dampings.index(own)] = default[:, None]
    weights = fit_weights(parts[:, fitted], outputs[np.ix_(fitted, chosen)], prior.reshape(-1))
    none = Estimate(0.0, 0.0, 0.0)
    untested = Calibration(
        kept=False,
        default=none,
        calibrated=none,
        gain=none,
        num_held_out=len(held_out),
        views=VIEWS,
        checkpoints=tuple(rows.train),
        segments=segments,
        dampings=dampings,
        weights=tuple(map(float, weights)),
    )
    targets = _calibrated_targets(rows, untested, weights)
    better = sum((sums.predict(targets[view], view) for view in VIEWS), np.zeros(predicted.shape))
    return _tested(untested, better[held_out], predicted[held_out], outputs[held_out], confidence)


def _tested(
    calibration: Calibration, better: Array, default: Array, outputs: Array, confidence: float
) -> Calibration:
    """Return the calibration with its LDS and gain on the held-out subsets."""
    gain = _estimate(_lead(better, default, outputs, confidence))
    return replace(
        calibration,
        kept=gain.low > 0.0,
        default=_estimate(_lds(default, outputs, confidence)),
        calibrated=_estimate(_lds(better, outputs, confidence)),
        gain=gain,
    )


def _parts(
    rows: ScoredRows,
    sums: SubsetSums,
    segments: Sequence[tuple[int, int]],
    dampings: Sequence[float | None],
    chosen: NDArray[np.int64],
) -> Array:
    """Return the prediction of each view, checkpoint, segment and damping alone, ``(V C s D, S, targets)``."""
    num_subsets = len(sums.by_checkpoint[0]["off"])
    shape = (len(VIEWS), len(rows.train), len(segments), len(dampings), num_subsets, len(chosen))
    parts = np.empty(shape)
    for c, table in enumerate(rows.train.values()):
        for d, damping in enumerate(dampings):
            targets = rows.preconditioned(table, damping)[torch.from_numpy(chosen).to(rows.device)]
            for s, (start, stop) in enumerate(segments):
                for v, view in enumerate(VIEWS):
                    part = sums.by_checkpoint[c][view][:, start:stop] @ targets[:, start:stop].T
                    parts[v, c, s, d] = part.cpu().numpy()
    return parts.reshape(-1, num_subsets, len(chosen))


def _calibrated_targets(
    rows: ScoredRows, calibration: Calibration, weights: Array
) -> dict[str, list[Tensor]]:
    """Return, per view and checkpoint, the weighted sum over dampings of (H + lambda I)^-1 targets, ``(M, K)``."""
    shape = (len(VIEWS), len(rows.train), len(calibration.segments), len(calibration.dampings))
    weight = weights.reshape(shape)
    mixed: dict[str, list[Tensor]] = {view: [] for view in VIEWS}
    for c, table in enumerate(rows.train.values()):
        totals = [torch.zeros_like(rows.targets(table)) for _ in VIEWS]
        for d, damping in enumerate(calibration.dampings):
            targets = rows.preconditioned(table, damping)
            for s, (start, stop) in enumerate(calibration.segments):
                for v, total in enumerate(totals):
                    total[:, start:stop] += float(weight[v, c, s, d]) * targets[:, start:stop]
        for view, total in zip(VIEWS, totals, strict=True):
            mixed[view].append(total)
    return mixed


def _lds(predicted: Array, outputs: Array, confidence: float) -> LinearDatamodelingScore:
    return linear_datamodeling_score(
        predicted, None, outputs, num_resamples=_NUM_RESAMPLES, confidence=confidence
    )


def _lead(first: Array, second: Array, outputs: Array, confidence: float) -> ScoreDifference:
    return compare_datamodeling_scores(
        first, second, None, outputs, num_resamples=_NUM_RESAMPLES, confidence=confidence
    )


def _estimate(found: LinearDatamodelingScore | ScoreDifference) -> Estimate:
    return Estimate(found.mean, *found.interval)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _unit(rows: Tensor) -> Tensor:
    """Return rows of norm 1; zero rows stay zero."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    unit: Tensor = rows / norms.masked_fill(norms == 0, 1.0)
    return unit
