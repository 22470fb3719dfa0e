r"""Exact derivatives of targets by the weights of train rows, by replaying a training backwards.

With state :math:`s_{t+1} = \mathrm{step}_t(s_t, w)`, the derivative of a target :math:`f(s_T)` by the row weights w is

.. math:: \sum_t \lambda_{t+1}^\top \frac{\partial\, \mathrm{step}_t}{\partial w},
          \qquad \lambda_T = \nabla f(s_T), \quad
          \lambda_t = \frac{\partial\, \mathrm{step}_t}{\partial s_t}^\top \lambda_{t+1}

A step takes the gradient :math:`g = \sum_i w_i \nabla L_i / B` and updates the state with it. Its products are formed
in two parts: first those of the update, which is elementwise, then those of g with the result
:math:`\mu = (\partial\,\mathrm{update} / \partial g)^\top \lambda`: a Hessian-vector product for :math:`\lambda_t`, and
:math:`\mu^\top \nabla L_i / B` for row i. All targets of a block share the states, the losses and their first gradient.

Source: Engstrom et al., "Optimizing ML Training with Metagradient Descent" (arXiv:2503.13751), section 2.

Shapes: N train rows, M targets, m targets of a block, T steps, b rows of a part of a batch.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from trak_lite._progress import KeptProgress
from trak_lite._validate import positive_int
from trak_lite.data.batches import move_batch, rows_in_batches
from trak_lite.data.datasets import Rows, rows_of
from trak_lite.errors import (
    BusyError,
    CorruptStoreError,
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
    NonFiniteError,
    StoreError,
    UnsupportedModelError,
)
from trak_lite.methods import Unrolled
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall, resolve_task
from trak_lite.modelout_functions._base import TaskFunction
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.parallel.ranks import num_ranks
from trak_lite.parallel.sharing import SharedRows
from trak_lite.run.repeats import Comparison, conditions, outputs_of_model
from trak_lite.run.tables import SCORES, score_path, score_table_spec
from trak_lite.run.workspace import Workspace
from trak_lite.scoring.matrix import HeldMatrix
from trak_lite.scoring.records import ScoreEntries, ScoreRecord
from trak_lite.scoring.scores import Scores
from trak_lite.store import AbstractRowTable, Column, Manifest, TableSpec
from trak_lite.store._names import check_name
from trak_lite.store.disk.files import named_errors, refuse_links, remove_file
from trak_lite.store.disk.folders import names_in
from trak_lite.store.manifest import canonical_json
from trak_lite.unrolled.dropout import step_key
from trak_lite.unrolled.optimizers import Named, State
from trak_lite.unrolled.program import Part, naming_failures
from trak_lite.unrolled.runs import SMOOTH, Operations, TrainingRun, repeatable
from trak_lite.unrolled.states import flat, load_tensors, save_tensors, unflat

__all__ = ["MAX_BYTES", "unrolled"]

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 2 << 30
"""Default memory of a replay, in bytes."""
_MEAN_ROWS: Final = 1024
"""Rows of the scores of several runs that are in memory at once."""
_OUTPUTS: Final = "outputs"
"""Attribute of tables: f of the targets at the trained weights."""
_TOLERANCE: Final = 0.05
"""Of the check of second derivatives; wide enough for half precision."""


def unrolled(
    runs: TrainingRun | Sequence[TrainingRun],
    targets: Any,
    task: str | AbstractModelOutput | type[AbstractModelOutput] | TaskFunction,
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
    given = list(runs) if isinstance(runs, Sequence) else [runs]
    if not all(isinstance(run, TrainingRun) for run in given):
        raise InvalidInputError(f"unrolled takes finished runs, recipe.train(path), got {runs!r:.100}.")
    data = [canonical_json(run.fingerprint["data"]) for run in given]
    if not given or len(set(data)) > 1 or len({run.digest for run in given}) < len(given):
        raise InvalidInputError("Pass one run, or different runs (with other seeds) on the same train data.")
    positive_int(max_bytes=max_bytes)
    if block is not None:
        positive_int(block=block)
    check_name(name, what="target set")
    found = [
        _scores_of_run(run, targets, task, name=name, block=block, max_bytes=max_bytes, progress=progress)
        for run in given
    ]
    if len(found) == 1:
        return found[0]
    method = Unrolled(*given)
    settings = {**found[0].settings, "metasmoothness": [one.settings["metasmoothness"] for one in found]}
    record = ScoreRecord(name, method, found[0].manifest, settings, task=found[0].task)
    return Scores(_mean_over_runs(found), record)


def _scores_of_run(
    run: TrainingRun,
    targets: Any,
    task: str | AbstractModelOutput | type[AbstractModelOutput] | TaskFunction,
    *,
    name: str,
    block: int | None,
    max_bytes: int,
    progress: bool | None,
) -> Scores:
    run.require_finished()
    data = rows_of(targets, what="the targets")
    resolved = resolve_task(task)
    smoothness = run.metasmoothness()
    if smoothness < SMOOTH:
        warnings.warn(
            f"The training has metasmoothness {smoothness:.2f}. Below {SMOOTH}, scores of a replay predict retraining "
            f"poorly, although they are exact derivatives. {run.advice()}",
            RuntimeWarning,
            stacklevel=4,
        )
    method = Unrolled(run)
    fingerprint = {"targets": data.identity(), "task": describe_task(resolved)}
    made = Manifest({"kind": "unrolled", "run": run.fingerprint})
    settings = {"method": method.name, "steps": run.num_steps, "metasmoothness": round(smoothness, 4)}
    manifest = Manifest({**made.fingerprint, **fingerprint})
    record = ScoreRecord(name, method, manifest, settings, task=resolved)

    def replay() -> _Replay:
        return _Replay(run, resolved, data, max_bytes=max_bytes, progress=progress)

    if run.path is None:
        return Scores(HeldMatrix(replay().scores(block)), record)
    refuse_links(str(run.path / "scores.zarr"))
    workspace = Workspace(str(run.path / "scores.zarr"))
    path = score_path(name, method, method)
    spec = score_table_spec(len(run.recipe.rows), len(data), fingerprint)
    outputs = outputs_of_model(run.model(), resolved, data, run.device)
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
            found = blocks.scores(replay(), block)
            if found is not None:
                with SharedRows(lazy, spec.chunk_rows, label="Storing scores", progress=False) as work:
                    for rows in (rows for batches in work.rounds() for rows in batches):
                        work.put(rows, {SCORES: found[rows]})
        if blocks.are_scores():
            blocks.forget()
    reader = workspace.reader()
    if not reader.open_table(path).complete:
        raise BusyError(f"Another process is writing the scores {name!r} of this run. Make the call again.")
    entries = ScoreEntries(reader, path, workspace)
    return Scores.from_record(replace(record, location=f"{workspace.path}:{path}", entries=entries))


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
        name = hashlib.sha256(canonical_json(spec.fingerprint).encode()).hexdigest()[:16]
        self._workspace, self._scores, self._spec, self._now = workspace, scores, spec, now
        self._path, self._folder = f"replays/{name}", run.path / "replays" / name
        if not _has_outputs(workspace, self._path, now, run.recipe.train_id):
            logger.info("The replay starts again, because f of the targets has changed.")
            with contextlib.suppress(MissingStoreError):  # another process was first
                # Raises while another process replays the task of before: its blocks must not become these scores.
                workspace.store().drop_table(self._path)
            self.forget()

    def are_scores(self) -> bool:
        """Return whether the scores are stored, by this process or another one."""
        with self._workspace.reading() as store:
            return self._scores in store.table_names() and store.open_table(self._scores).complete

    def scores(self, replay: _Replay, block: int | None) -> NDArray[np.float32] | None:
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
        spec = TableSpec(replay.shape[1], columns, size, self._spec.fingerprint)
        table = store.create_table(self._path, spec, self._now)
        try:
            with replay.progress(table.num_chunks) as done:
                self._fill(table, replay, done)
            return np.ascontiguousarray(table.read(SCORES).T)
        except StoreError:
            if self.are_scores():  # and the blocks were removed
                return None
            raise

    def _fill(self, table: AbstractRowTable, replay: _Replay, done: KeptProgress) -> None:
        """Compute the blocks that no other process holds, and wait for the others."""
        counted: set[int] = set()

        def count_others() -> None:
            others = set(table.committed_chunks()) - counted
            counted.update(others)
            done.advance(len(others) * replay.num_steps)

        count_others()
        size = table.spec.chunk_rows
        with SharedRows(table, size, label="Replaying", progress=False, unit="target") as work:
            for pending in (rows for batches in work.rounds() for rows in batches):
                chunk = int(pending[0]) // size
                targets = np.arange(*table.chunk_range(chunk))
                file = self._folder / f"block-{targets[0]:09d}.safetensors"
                found = replay.block(targets, file, done)
                work.put(pending, {SCORES: found[pending - targets[0]]})
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


def _mean_over_runs(runs: Sequence[Scores]) -> HeldMatrix:
    """Return the mean of the scores of several runs, and the standard errors of the mean over runs."""
    mean, errors = (np.empty(runs[0].shape, np.float32) for _ in range(2))
    for rows in rows_in_batches(np.arange(len(mean)), _MEAN_ROWS):
        parts = np.stack([run.rows(rows) for run in runs])
        mean[rows] = parts.mean(axis=0, dtype=np.float64)
        errors[rows] = parts.std(axis=0, ddof=1, dtype=np.float64) / math.sqrt(len(runs))
    return HeldMatrix(mean, errors)


@final
class _Replay:
    """The backward replay of a run for blocks of targets."""

    def __init__(
        self,
        run: TrainingRun,
        task: AbstractModelOutput,
        targets: Rows,
        *,
        max_bytes: int,
        progress: bool | None,
    ) -> None:
        self._run, self._task, self._targets = run, task, targets
        self._max_bytes, self._progress = max_bytes, progress
        self._compared = False
        """Whether the steps of a block were compared with the training."""
        final = run.final
        self._state_bytes = sum(t.nbytes for t in tree_leaves(final))
        self._held = max(2, int(max_bytes // 4 // self._state_bytes))
        """States of a segment that are in memory at once."""
        with repeatable(run.device), naming_failures(run.program.model, "differentiate a training step of"):
            self._check_second_derivative()
            self._one, self._more = self._measured(final)
        """Bytes of a step's Hessian products for one target, and for each further one."""
        self._target_bytes = int(4 * self._state_bytes + 3 * run.weights.nbytes)
        self._most = max(1, max_bytes // 2 // self._target_bytes)
        """Targets of a block that memory allows."""

    def _measured(self, final: State) -> tuple[int, int]:
        """Return the bytes of the first step's products for one target, and for each further one."""
        first = self._run.states.get(0)

        def measured(count: int) -> int:
            ones = State(*tree_map(lambda value: value.new_ones(count, *value.shape), tuple(final)))
            return _peak_bytes(lambda: self._adjoint(0, first, ones, None, count))

        one = measured(1)
        return one, max(1, measured(2) - one) if 4 * one <= self._max_bytes else one

    def _chunk(self, targets: int) -> int:
        """Return the targets of a block whose Hessian products are computed at once."""
        # A quarter is for states, whose number depends on the stored ones, as bits must not, and a quarter for what
        # kernels and the allocator take beside tensors.
        free = max(self._max_bytes // 4, self._max_bytes // 2 - targets * self._target_bytes)
        return max(1, 1 + (free - self._one) // self._more)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._run.recipe.rows), len(self._targets)

    @property
    def num_steps(self) -> int:
        return self._run.num_steps

    def size(self, block: int | None) -> int:
        """Return the targets of a block; ``None`` divides them equally, among the ranks of a distributed run too."""
        count = len(self._targets)
        if block is not None:
            return min(count, block)
        blocks = max(-(-count // min(count, self._most)), min(count, num_ranks()))
        return -(-count // blocks)

    def progress(self, blocks: int) -> KeptProgress:
        total = blocks * self._run.num_steps
        return KeptProgress(total, 0, label="Replaying", unit="step", progress=self._progress)

    def scores(self, block: int | None) -> NDArray[np.float32]:
        """Return the scores ``(N, M)``; nothing is stored."""
        count, size = len(self._targets), self.size(block)
        starts, found = range(0, count, size), np.empty(self.shape, np.float32)
        with self.progress(len(starts)) as done:
            for start in starts:
                places = np.arange(start, min(start + size, count))
                found[:, places] = self.block(places, None, done).T
        return found

    def block(self, places: NDArray[np.int64], file: Path | None, done: KeptProgress) -> NDArray[np.float32]:
        """Return the scores of a block of targets, ``(m, N)``; finished segments are kept in a file.

        Raises:
            NonFiniteError: If one is NaN or infinite.
        """
        failures = naming_failures(self._run.program.model, "differentiate a training step of")
        with repeatable(self._run.device), failures:
            columns = self._block(places, file, done)
        wrong = ~columns.isfinite().all(1)
        if bool(wrong.any()):
            raise NonFiniteError(
                f"The derivatives of targets {places[wrong.cpu().numpy()][:5].tolist()} are NaN or infinite. "
                f"The training is too rough to be differentiated. {self._run.advice()}"
            )
        self._compared = True
        return columns.float().cpu().numpy()

    def _block(self, places: NDArray[np.int64], file: Path | None, done: KeptProgress) -> Tensor:
        """Return the derivatives of a block of targets, ``(m, N)``."""
        run, chunk = self._run, self._chunk(len(places))
        bounds = [number for number in run.states.numbers() if number < run.num_steps]
        reached = run.num_steps
        stored = None if file is None or not file.exists() else _stored(file, run)
        if stored is not None:
            columns, reached = stored[0].pop("scores"), stored[1]
            cotangents = unflat(stored[0])
            done.advance(run.num_steps - reached)
        else:
            cotangents = self._target_gradients(places)
            wide = torch.promote_types(run.weights.dtype, torch.float32)
            columns = torch.zeros(len(places), len(run.weights), dtype=wide, device=run.device)
        for first in reversed([number for number in bounds if number < reached]):
            for number, state in self._backwards(first, run.states.get(first), reached):
                if not self._compared and number == reached - 1:  # other blocks repeat the same steps
                    run.require_repeatable(first, state, reached)
                cotangents = self._adjoint(number, state, cotangents, columns, chunk)
                done.advance(1)
            reached = first
            if file is not None:
                named = {**flat(cotangents), "scores": columns}
                save_tensors(file, named, reached, run.identity)
        return columns

    def _backwards(self, first: int, state: State, stop: int) -> Iterator[tuple[int, State]]:
        """Yield step numbers and the states before them from ``stop - 1`` down to ``first``.

        At most ``_held`` states, and one per halving of a longer segment, are in memory.
        """
        if stop - first <= self._held:
            states = [state]
            for number in range(first, stop - 1):
                states.append(self._run.step(states[-1], number))
            for number in reversed(range(first, stop)):
                yield number, states.pop()
            return
        middle = (first + stop) // 2
        later = state
        for number in range(first, middle):
            later = self._run.step(later, number)
        yield from self._backwards(middle, later, stop)
        yield from self._backwards(first, state, middle)

    def _adjoint(
        self, number: int, state: State, cotangents: State, columns: Tensor | None, chunk: int
    ) -> State:
        """Return the cotangents of the state before a step, and add the derivatives of its rows to ``columns``.

        Args:
            number: Number of the step.
            state: The state before it.
            cotangents: Those of the state after it, with the m targets as first axis.
            columns: ``(m, N)``; ``None`` adds nothing.
            chunk: Targets at once in the products with Hessians.
        """
        run, program = self._run, self._run.program
        parts = run.parts(number)
        size = sum(len(part.rows) for part in parts)

        gradient = partial(self._gradient, number, state, size)
        single = len(parts) == 1  # several are computed again below: together they would not fit in memory
        first = gradient(0, parts[0])
        total = first[0]
        for place, part in enumerate(parts[1:], 1):
            total = {name: total[name] + g for name, g in gradient(place, part)[0].items()}
        _, update_back = _vjp(lambda before, g: program.update(before, g, number), state, total)
        result, inner = vmap(update_back)(cotangents)
        targets = len(next(iter(cotangents.parameters.values())))
        fitting = chunk if chunk < targets else None  # a single chunk would be copied
        for place, part in enumerate(parts):
            back = first[1] if single else gradient(place, part)[1]
            products, by_row = vmap(back, chunk_size=fitting)(inner)
            for name, product in products.items():
                result.parameters[name].add_(product)
            if columns is not None:
                columns[:, torch.from_numpy(part.rows).to(columns.device)] += by_row
        return State(*tree_map(Tensor.contiguous, tuple(result)))

    def _gradient(
        self, number: int, state: State, size: int, place: int, part: Part
    ) -> tuple[Named, Callable[[Named], tuple[Named, Tensor]]]:
        """Return the gradient of a part of a step, and its product with the derivatives by parameters and weights."""
        run, program = self._run, self._run.program
        key = step_key(run.recipe.seed, number, place, run.device)
        weights = run.weights[torch.from_numpy(part.rows).to(run.device)]
        return _vjp(
            lambda values, some: program.gradient(values, some, run.frozen, part.batch, key, size),
            state.parameters,
            weights,
        )

    def _check_second_derivative(self) -> None:
        """Raise if a derivative is a constant for torch, as that of an autograd function with once_differentiable.

        The gradient g is linear in the row weights w, so w times the derivative of its norm's half square by w is the
        square of the norm.
        """
        run = self._run
        part = run.parts(0)[0]
        found, back = self._gradient(0, run.states.get(0), len(part.rows), 0, part)
        expected = float(sum(g.double().square().sum() for g in found.values()))
        weights = run.weights[torch.from_numpy(part.rows).to(run.device)]
        product = float((weights.double() * back(found)[1].double()).sum())
        if abs(product - expected) > _TOLERANCE * expected:
            raise UnsupportedModelError(
                f"{type(run.program.model).__name__} has an operation whose derivative torch treats as a constant, so "
                "a training step cannot be differentiated. This is so for an autograd.Function with "
                "once_differentiable: write its backward with operations of torch."
            )

    def _target_gradients(self, places: NDArray[np.int64]) -> State:
        """Return the gradients of the targets' outputs at the trained parameters as cotangents of the last state."""
        run, final = self._run, self._run.final
        model = run.model()
        self._task.prepare(model)
        found: list[Named] = []
        for _, batch in self._targets.batches([places[i : i + 1] for i in range(len(places))]):
            moved = move_batch(batch, run.device)
            with torch.enable_grad():
                leaves = {name: p.detach().requires_grad_() for name, p in final.parameters.items()}
                call = ModelCall(model, {**run.frozen.parameters, **leaves}, run.frozen.buffers)
                output = self._task.evaluate(call, moved).output.sum()
                grads = torch.autograd.grad(output, list(leaves.values()), materialize_grads=True)
            found.append(dict(zip(leaves, grads, strict=True)))
        stacked = {name: torch.stack([one[name] for one in found]) for name in final.parameters}
        count = len(places)
        slots = tree_map(lambda value: value.new_zeros(count, *value.shape), final.slots)
        return State(stacked, slots)


def _stored(file: Path, run: TrainingRun) -> tuple[Named, int] | None:
    """Return the content of the file of a block, ``None`` if it is damaged."""
    try:
        return load_tensors(file, run.device, run.identity)
    except CorruptStoreError as error:
        logger.warning("%s The block is replayed from the end of the training.", error)
        return None


def _vjp(function: Callable[..., Any], *at: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the value of a function, and the map from cotangents of the value to those of the arguments."""
    value, back = vjp(function, *at)[:2]
    return value, back


def _peak_bytes(function: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that a function makes and holds at the same time."""
    collected = gc.isenabled()
    gc.disable()  # it would free cycles at other moments in every call, and the bits of scores depend on the result
    used = Operations()
    try:
        with used:
            function()
    finally:
        if collected:
            gc.enable()
    return used.peak_bytes
