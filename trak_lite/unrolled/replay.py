"""Scores of finished runs: the replay of each, block by block, and its storage in the folder of the run."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.files import named_errors, refuse_links, remove_file
from trak_lite.core.folders import names_in
from trak_lite.core.json_text import canonical_json
from trak_lite.core.progress import KeptProgress
from trak_lite.core.validate import positive_int
from trak_lite.data.batches import rows_in_batches
from trak_lite.data.datasets import Rows, rows_of
from trak_lite.errors import (
    BusyError,
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
    StoreError,
)
from trak_lite.methods import Unrolled
from trak_lite.modelout_functions import AbstractModelOutput, resolve_task
from trak_lite.modelout_functions._base import Task, outputs_of_model
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.run.repeats import Comparison, conditions
from trak_lite.run.tables import SCORES, first_score_path, replay_path, score_table_spec
from trak_lite.run.workspace import Workspace
from trak_lite.scoring.matrix import HeldMatrix, StoredMatrix
from trak_lite.scoring.records import ScoreEntries
from trak_lite.scoring.scores import Scores
from trak_lite.store import AbstractRowTable, Column, Manifest, TableSpec
from trak_lite.store._names import check_name
from trak_lite.store.sharing import SharedRows
from trak_lite.unrolled.backward import Replay
from trak_lite.unrolled.runs import SMOOTH, TrainingRun

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 2 << 30
"""Default memory of a replay, in bytes."""
_MEAN_ROWS: Final = 1024
"""Rows of the scores of several runs that are in memory at once."""
_OUTPUTS: Final = "outputs"
"""Attribute of tables: f of the targets at the trained weights."""


def unrolled(
    runs: TrainingRun | Sequence[TrainingRun],
    targets: Any,
    task: Task,
    *,
    name: str = "targets",
    block: int | None = None,
    max_bytes: int = MAX_BYTES,
    progress: bool | None = None,
) -> Scores:
    r"""Return the exact derivative of every target's output by the weight of every train row.

    The score of row i for target j is :math:`\partial f_j(\theta_T) / \partial w_i`: to first order, leaving the row
    out of this run (same seed, same batches) changes :math:`f_j` by minus the score. The training is replayed once
    backwards for each block of targets. Where the training is chaotic the derivative is exact and still predicts
    nothing: the metasmoothness of the run is measured first, and printed with the scores.

    The scores are stored in the run's folder under ``name``: the same call again returns them, or resumes after a kill
    at the last segment (between two stored states) of the present block, with the same bits. It first repeats the first
    and the last segment of the training, and f of the targets, and compares. Processes that make the same call, and the
    ranks of a distributed run, divide the blocks of a run that is stored.

    Args:
        runs: A finished run, as :meth:`Recipe.train` returns it, or several with other seeds: the scores are their
            mean, with standard errors over runs. The mean is in memory, the scores of each run are stored.
        targets: A map-style dataset, a DataLoader that reads one in order, or :class:`~trak_lite.Rows`.
        task: Defines f, as for :class:`~trak_lite.Attributor`. f is evaluated in eval mode.
        name: Name of the target set.
        block: Targets per replay; ``None`` takes as many as ``max_bytes`` allows, divided among the ranks.
        max_bytes: Memory for the states and the vectors of a block, in bytes.
        progress: Show a bar; ``None`` shows it on a terminal only.

    Returns:
        Scores ``(N, M)``.

    Raises:
        UnsupportedModelError: If torch cannot differentiate an operation of the model twice; names it.
        NonFiniteError: If a derivative is NaN or infinite; names the targets.
        ManifestMismatchError: If other targets or another task are stored under the name, or the training has changed
            since it was stored.
    """
    run_list = list(runs) if isinstance(runs, Sequence) else [runs]
    if not all(isinstance(run, TrainingRun) for run in run_list):
        raise InvalidInputError(f"unrolled takes finished runs, recipe.train(path), got {runs!r:.100}.")
    trained_on = {canonical_json(run.fingerprint["data"]) for run in run_list}
    if len(trained_on) != 1 or len({run.digest for run in run_list}) < len(run_list):
        raise InvalidInputError("Pass one run, or different runs (with other seeds) on the same train data.")
    max_bytes, block = positive_int(max_bytes=max_bytes), None if block is None else positive_int(block=block)
    check_name(name, what="target set")
    data, resolved = rows_of(targets, what="the targets"), resolve_task(task)
    replay = partial(Replay, task=resolved, targets=data, max_bytes=max_bytes, progress=progress)
    per_run = [_scores_of_run(run, data, resolved, replay, name, block) for run in run_list]
    if len(per_run) == 1:
        return per_run[0]
    method = Unrolled(*run_list)
    settings = {**per_run[0].settings, "metasmoothness": [one.settings["metasmoothness"] for one in per_run]}
    mean, errors = (np.empty(per_run[0].shape, np.float32) for _ in range(2))
    for rows in rows_in_batches(np.arange(len(mean)), _MEAN_ROWS):
        parts = np.stack([scores.rows(rows) for scores in per_run])
        mean[rows] = parts.mean(axis=0, dtype=np.float64)
        errors[rows] = parts.std(axis=0, ddof=1, dtype=np.float64) / math.sqrt(len(per_run))
    matrix, manifest, task = HeldMatrix(mean, errors), per_run[0].manifest, per_run[0].task
    return Scores(matrix, name, method, manifest, settings, known_task=task)


def _scores_of_run(
    run: TrainingRun,
    data: Rows,
    task: AbstractModelOutput,
    replay: Callable[[TrainingRun], Replay],
    name: str,
    block: int | None,
) -> Scores:
    smoothness = run.metasmoothness()
    if smoothness < SMOOTH:
        warnings.warn(
            f"The training has metasmoothness {smoothness:.2f}. Below {SMOOTH}, scores of a replay predict retraining "
            f"poorly, although they are exact derivatives. {run.advice()}",
            RuntimeWarning,
            stacklevel=4,
        )
    method = Unrolled(run)
    fingerprint = {"targets": data.identity(), "task": describe_task(task)}
    made = Manifest({"kind": "unrolled", "run": run.fingerprint})
    settings = {"method": method.name, "steps": run.num_steps, "metasmoothness": round(smoothness, 4)}
    manifest = Manifest({**made.fingerprint, **fingerprint})
    made_of = partial(Scores, name=name, method=method, manifest=manifest, settings=settings, known_task=task)
    if run.path is None:
        return made_of(HeldMatrix(replay(run).scores(block)))
    refuse_links(str(run.path / "scores.zarr"))
    workspace = Workspace(str(run.path / "scores.zarr"))
    path = first_score_path(name)
    spec = score_table_spec(len(run.recipe.rows), len(data), fingerprint)
    outputs = outputs_of_model(run.model(), task, data, run.device)
    now = {_OUTPUTS: outputs.tolist(), "conditions": conditions()}
    with workspace.opened(made):
        lazy = workspace.lazy_table(path, spec, now)
        if not _has_outputs(workspace, path, now, run.recipe.train_id):
            raise ManifestMismatchError(
                f"{workspace.path}:{path} was made with another task: f of the targets at the trained weights has "
                "changed. Undo the change, or pass another name."
            )
        blocks = _SharedBlocks(run, workspace, path, spec, now)
        if lazy.table is None or not lazy.table.complete:
            matrix = blocks.scores(replay(run), block)
            if matrix is not None:
                with SharedRows(lazy, spec.chunk_rows, label="Storing scores", progress=False) as work:
                    for rows in (rows for batches in work.rounds() for rows in batches):
                        work.put(rows, {SCORES: matrix[rows]})
        blocks.forget()
    entries = ScoreEntries(workspace.reader(), path, workspace)
    return made_of(StoredMatrix(entries.table()), location=f"{workspace.path}:{path}", entries=entries)


def _has_outputs(workspace: Workspace, path: str, now: Mapping[str, Any], train_id: str | None) -> bool:
    """Return whether a table, if it exists, was made where f of the targets was as it is now."""
    made = {} if workspace.table(path) is None else workspace.store().attributes(path)
    if train_id is not None or _OUTPUTS not in made:
        return True
    before, after = np.asarray(made[_OUTPUTS]), np.asarray(now[_OUTPUTS])
    apart = float(np.linalg.norm(before - after)) / (float(np.linalg.norm(before)) or 1.0)
    return Comparison(apart, 0.0, made["conditions"] == now["conditions"]).is_same


@final
class _SharedBlocks:
    """Finished blocks of targets, which several processes compute together.

    A process claims a block by the lock of its chunk in a table ``(M, N)``, and skips those that others hold. The
    cotangents of a block that is not finished are in a file, with which the process that claims it next continues.
    """

    def __init__(
        self, run: TrainingRun, workspace: Workspace, scores: str, spec: TableSpec, now: Mapping[str, Any]
    ) -> None:
        """Find the blocks for a table of scores; those of another task are removed."""
        assert run.path is not None  # the scores are stored
        self._run, self._workspace, self._scores, self._spec, self._now = run, workspace, scores, spec, now
        self._path = replay_path(identity=spec.fingerprint)
        self._folder = run.path / self._path
        if not _has_outputs(workspace, self._path, now, run.recipe.train_id):
            logger.info("The replay starts again, because f of the targets has changed.")
            with contextlib.suppress(MissingStoreError):  # another process was first
                # Raises while another process replays the task of before: its blocks must not become these scores.
                workspace.store().drop_table(self._path)
            self.forget()

    def scores(self, replay: Replay, block: int | None) -> NDArray[np.float32] | None:
        """Return the scores ``(N, M)``, when all blocks are finished; ``None`` if another process has stored them.

        Blocks of another size are removed, unless a process works on them. ``block`` is as in :func:`unrolled`.
        """
        store, size = self._workspace.created(), replay.size(block)
        existing = self._workspace.table(self._path)
        if existing is not None and existing.spec.chunk_rows != size:
            try:
                store.drop_table(self._path)
            except BusyError:
                size = existing.spec.chunk_rows
                logger.info("Another process replays blocks of %d targets. So does this one.", size)
            else:
                existing = None
                logger.info(
                    "The replay starts again, because its blocks have another size now: %d targets.", size
                )
        if existing is None:
            self._forget_files()
        columns = (Column(SCORES, self._spec.num_rows, "float32"),)
        spec = TableSpec(len(self._now[_OUTPUTS]), columns, size, self._spec.fingerprint)
        table = store.create_table(self._path, spec, self._now)
        try:
            with replay.progress(table.num_chunks) as done:
                self._fill(table, replay, done)
            return np.ascontiguousarray(table.read(SCORES).T)
        except StoreError:
            with (
                self._workspace.reading() as stored
            ):  # another process may have stored the scores, without the blocks
                if self._scores in stored.table_names() and stored.open_table(self._scores).complete:
                    return None
            raise

    def _fill(self, table: AbstractRowTable, replay: Replay, done: KeptProgress) -> None:
        """Compute the blocks that no other process holds, and wait for the others."""
        counted: set[int] = set()

        def count_others() -> None:
            others = set(table.committed_chunks()) - counted
            counted.update(others)
            done.advance(len(others) * self._run.num_steps)

        count_others()
        size = table.spec.chunk_rows
        with SharedRows(table, size, label="Replaying", progress=False, unit="target") as work:
            for pending in (rows for batches in work.rounds() for rows in batches):
                chunk = int(pending[0]) // size
                targets = np.arange(*table.chunk_range(chunk))
                file = self._folder / f"block-{targets[0]:09d}.safetensors"
                scores = replay.block(targets, file, done)
                work.put(pending, {SCORES: scores[pending - targets[0]]})
                counted.add(chunk)
                file.unlink(missing_ok=True)
                count_others()
        count_others()

    def forget(self) -> None:
        """Remove the blocks of a finished replay, also those of a process that was killed."""
        self._forget_files()
        if self._workspace.table(self._path) is not None:
            # Another process looks at them at this moment, or removes them too.
            with contextlib.suppress(BusyError, MissingStoreError):
                self._workspace.store().drop_table(self._path)

    def _forget_files(self) -> None:
        if not self._folder.exists():
            return
        with named_errors("Removing", str(self._folder)):
            for name in names_in(str(self._folder)):
                with contextlib.suppress(FileNotFoundError):  # another process was first
                    remove_file(f"{self._folder}/{name}")
        with contextlib.suppress(OSError):  # another process makes the same replay
            self._folder.rmdir()
