"""Rows of the train data while a training runs: every batch gets a pass of its own, before its step.

Rows come in the order of the training. They are kept in a table of their own until the weights at the end, which name
the checkpoint, are known; :meth:`~trak_lite.Attributor.featurize` then copies them into the table of the checkpoint.

Shapes: N train rows, B samples of a batch.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import undisturbed
from trak_lite.core.files import open_folder
from trak_lite.core.folders import make_folders, whole_file
from trak_lite.core.meeting import num_ranks
from trak_lite.core.validate import row_numbers, writing
from trak_lite.data.batches import batch_size, map_tensors, move_batch, take_rows
from trak_lite.data.column_marks import ColumnMarks
from trak_lite.data.datasets import RowNumbers, Rows
from trak_lite.data.packed import BORDERS, Documents
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError, UnsupportedModelError
from trak_lite.featurizing.passes import RowPass
from trak_lite.featurizing.row_checks import LostModules
from trak_lite.featurizing.rows import HostRows
from trak_lite.featurizing.session import Run
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.gradient_computers.self_check import SelfCheckError, is_scheduled
from trak_lite.gradient_computers.streaming import AbstractStreamingComputer
from trak_lite.models.borrowing import in_eval_mode, model_device
from trak_lite.models.checkpoints import Checkpoint, weights_digest
from trak_lite.models.optimizers import adam_states, named_optimizer_state
from trak_lite.models.sharded import refuse_sharded
from trak_lite.run.tables import (
    CAPTURED,
    GRADIENT_NORM,
    capture_path,
    capture_tables,
    checkpoint_path,
    checkpoint_tables,
    model_id_for,
)
from trak_lite.store import TableSpec
from trak_lite.store._base import NEEDED_UNTIL
from trak_lite.store._names import check_name
from trak_lite.store.manifest import differing_keys
from trak_lite.types import Batch

_MOST_KEPT_BYTES: Final = 1 << 26
"""Rows that are held in memory before they are written."""
_SETTLED_AFTER: Final = 8
"""Batches after which the plan of a pass is kept: in the first steps, weights that are zero may hide a part of it."""


@final
class Capture:
    """Computes the row of each train sample once in a training; see :meth:`~trak_lite.Attributor.capture`."""

    def __init__(
        self,
        run: Run,
        rows: Rows,
        name: str,
        optimizer: torch.optim.Optimizer | None,
        folder: str | PathLike[str] | None,
        *,
        resume: bool,
    ) -> None:
        self.name = check_name(name, what="capture")
        self._run, self._rows, self._optimizer = run, rows, optimizer
        self._refuse_unsupported()
        with undisturbed():  # reads samples
            identity = rows.identity()
            if identity != rows.identity():
                raise InvalidInputError(
                    "The samples change from one access to the next (augmentation). Name them: Rows(data, name=...)."
                )
        self._manifest = run.settings.manifest(identity)
        self._rounded = spec = run.settings.train_table(len(rows), {})
        self._loss = LostModules(run.settings.modules)
        # Not quantised: rows are rounded once, when they are copied.
        columns = tuple(replace(column, dtype=column.value_dtype) for column in spec.columns)
        self._spec = TableSpec(spec.num_rows, columns, spec.chunk_rows, {CAPTURED: self.name})
        self._done = np.zeros(len(rows), dtype=bool)
        self._path, self._model_id = "", 0
        self._finished: str | None = None
        """Digest of the weights of the finished checkpoint of this name."""
        self._kept: list[tuple[RowNumbers, dict[str, NDArray[Any]]]] = []
        self._num_kept = 0
        self._marks = ColumnMarks()
        self._num_batches = 0
        self._has_ended = False
        with run.workspace.opened(self._manifest) as workspace:
            if workspace.exists:
                store = workspace.store()
                run.settings.recall_computer(store.manifest)
                for digest, table in checkpoint_tables(store).items():
                    if table.spec.fingerprint.get(CAPTURED) == name and table.complete:
                        self._done[:], self._finished = True, digest
                for model_id, path in capture_tables(store, name).items():
                    self._model_id, self._path = model_id, path
                    self._done |= store.open_table(path).done()
        if not resume and (self._finished is not None or self._path):
            raise StateError(
                f"{run.workspace.name} has {int(self._done.sum())} rows of a capture {name!r}. If this training "
                "continues that one, pass resume=True. Otherwise use another name, or remove them: "
                f"drop_checkpoint({name!r})."
            )
        self._file = None if folder is None else _file_to_write(folder, self.name)

    @property
    def num_missing(self) -> int:
        """Number of train rows that are not captured yet."""
        return int((~self._done).sum())

    def __call__(self, batch: Batch, rows: Any) -> None:
        """Compute the rows of a batch with the present weights, in eval mode; call it before the batch's step.

        The samples are those of the batch as it is given, augmented or not. A row that is captured already stays. The
        training is not changed: neither the batch, weights, gradients, buffers and modes nor any random state.

        Args:
            batch: B samples in the form of the attributor's task, as its data loader gives them.
            rows: ``(B,)`` their positions in the train data. Of a sample that occurs twice the first one is taken.

        Raises:
            InvalidInputError: If ``rows`` are not B positions of the train data.
            NonFiniteError: If f, q, w or a gradient is NaN or infinite; names the rows.
            StateError: If the block of the capture has ended.
            UnsupportedModelError: If the gradients cannot be computed, or a pass changes the model's weights.
        """
        if self._has_ended:
            raise StateError(
                f"The capture {self.name!r} has ended. Call it inside the block of attributor.capture, and begin "
                "another one, with another name, for another epoch."
            )
        positions = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows).reshape(-1)
        numbers = row_numbers(len(self._rows), self._rows.what, rows=positions)
        batch = self._marks.marked(batch)
        borders = [name for name in BORDERS if name in batch] if isinstance(batch, Mapping) else []
        if borders and len(numbers) > 1 and len(batch.get("input_ids", ())) == 1:
            raise InvalidInputError(
                f"The batch joins {len(numbers)} texts in one row of input_ids, with borders in {borders}. Capture "
                "needs a row per text: train with padding_free=False and packing=False, or featurize the saved "
                "checkpoints instead."
            )
        if len(numbers) != batch_size(batch):
            raise InvalidInputError(
                f"The rows {numbers.tolist()} were given for a batch of {batch_size(batch)} samples. Expected one "
                "position in the train data per sample."
            )
        self._num_batches += 1
        if is_scheduled(self._num_batches):
            self._refuse_other_task()
        if self._done[numbers].all():
            return
        first = np.sort(np.unique(numbers, return_index=True)[1])
        if len(first) < len(numbers):  # sampled with replacement
            numbers, batch = numbers[first], take_rows(batch, first.tolist())
        run, settings = self._run, self._run.settings
        with self._passing():
            # A copy, because models may write into their inputs.
            batch = move_batch(map_tensors(lambda tensor: tensor.detach().clone(), batch), settings.device)
            adam = None
            if settings.normalization.reads_optimizer:
                state = Checkpoint(self.name, None, self._content)
                adam = adam_states(run.model, settings.parameters, state, settings.device)
            settings.task.prepare(run.model)
            computer, to_come = self._computer_for(batch, numbers)
            self._begin()
            passes = RowPass(
                self._rows,
                lambda *_: computer,
                settings.projector,
                model_id=self._model_id,
                device=settings.device,
                normalization=settings.normalization,
                adam=adam,
                with_norms=any(column.name == GRADIENT_NORM for column in self._spec.columns),
            )
            try:
                computed = passes.compute(numbers, batch, to_come)
            except UnsupportedModelError as error:
                if isinstance(error, SelfCheckError) and error.rows:
                    raise
                computer.load_model_params(run.model)  # the plan may be that of other weights
                computed = passes.compute(numbers, batch, to_come)
            HostRows(computed, self._rounded, self._loss).put(self.put)

    def put(self, rows: RowNumbers, values: Mapping[str, NDArray[Any]]) -> None:
        """Keep the rows of a batch that are new, until they are written."""
        new = ~self._done[rows]
        self._done[rows] = True
        self._kept.append((rows[new], {name: column[new] for name, column in values.items()}))
        self._num_kept += len(rows)
        if self._num_kept * self._spec.row_bytes > _MOST_KEPT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the captured rows to the store; call it when the training saves a checkpoint to resume from."""
        computer = self._run.capturing[0]
        if self._kept:
            if computer is not None:
                with self._passing():
                    computer.confirm()
            numbers, columns = zip(*self._kept, strict=True)
            rows = np.concatenate(numbers)
            order = np.argsort(rows)
            values = {name: np.concatenate([part[name] for part in columns])[order] for name in columns[0]}
            with self._run.workspace.opened(self._manifest) as workspace:
                if not workspace.store().has_table(self._path):
                    raise StateError(
                        f"The rows of the capture {self.name!r} were removed from the store during the training. "
                        "Capture again, or featurize the saved checkpoints."
                    )
                workspace.store().open_table(self._path).put(rows[order], values)
            self._kept, self._num_kept = [], 0

    def end(self) -> None:
        """Write the rows; no batch can follow."""
        self._has_ended = True
        self.flush()
        self._loss.warn(self._rounded.columns[0], f"Capture {self.name!r}")

    def finish(self) -> Checkpoint:
        """Write the rows, save the checkpoint to the folder, if one was given, and return it."""
        self._refuse_other_task()
        model = self._run.model
        with in_eval_mode(model):  # as checkpoints are, when they are compared
            digest = weights_digest(model)
        if self._finished not in (None, digest):
            raise ManifestMismatchError(
                f"The store has a capture {self.name!r} with other weights at its end, of another training. Use "
                f"another path or name, or remove it: drop_checkpoint({self.name!r})."
            )
        self.end()
        content = self._content()
        if self._file is not None:
            with whole_file(self._file) as partial:
                torch.save(content, partial)
        source = None if self._file is None else str(self._file)
        return Checkpoint(self.name, source, lambda: content, is_captured=True)

    def _content(self) -> dict[str, Any]:
        """Return the present weights and the state of the optimizer, if there is one; the next step changes both."""
        content: dict[str, Any] = {"model": self._run.model.state_dict()}
        if self._optimizer is not None:
            named = self._run.settings.normalization.reads_optimizer
            state = named_optimizer_state(self._optimizer, self._run.model) if named else None
            content["optimizer"] = state or self._optimizer.state_dict()
        return content

    def _refuse_unsupported(self) -> None:
        settings, here, there = self._run.settings, self._run.settings.device, model_device(self._run.model)
        later = "Featurize the saved checkpoints instead: featurize(data, checkpoints=...)"
        refuse_sharded(self._run.model, "capture", later)
        reason = ""
        if num_ranks() > 1:
            reason = f"capture is for trainings of one process, and this one has several ranks. {later}."
        elif isinstance(self._rows.dataset, Documents):
            reason = f"Rows of Documents are texts, and a batch of the training has packed rows. {later}."
        elif here.type != there.type or (here.index is not None and here != there):
            reason = (
                f"The attributor runs on {here}, the model is on {there}. Pass device={str(there)!r} to it."
            )
        elif settings.normalization.reads_optimizer and self._optimizer is None:
            reason = f"normalize={settings.normalization.kind!r} reads the state of Adam. Pass optimizer=...."
        elif settings.normalization.reads_optimizer and self._optimizer is not None:
            named_optimizer_state(self._optimizer, self._run.model)  # raises if it is no Adam of the model
        elif self._optimizer is not None and not _is_optimizer(self._optimizer):
            reason = (
                f"optimizer is {self._optimizer!r:.100}, expected the torch.optim.Optimizer of the training."
            )
        if reason:
            raise InvalidInputError(reason)

    def _refuse_other_task(self) -> None:
        """Raise if the training has changed what the task reads: the end would find a store of another task."""
        then, now = (one.fingerprint["task"] for one in (self._manifest, self._run.settings.manifest(None)))
        if changed := differing_keys({"task": then}, {"task": now}):
            raise ManifestMismatchError(
                f"What the task reads has changed since the capture {self.name!r} began ({changed[0][0]}), by the "
                "training: the rows of a store are of one f. Let the model hold it, so that it belongs to the weights "
                "of each checkpoint (model.loss = loss), or let f read a copy that stays as it is (copy.deepcopy)."
            )

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Run passes in eval mode; remove all rows if some that were not compared are wrong: their weights are gone."""
        try:
            with torch.inference_mode(False), in_eval_mode(self._run.model):
                yield
        except SelfCheckError as error:
            if error.rows and self._path:
                self._kept, self._num_kept, self._done[:] = [], 0, False
                with self._run.workspace.opened(self._manifest) as workspace:
                    workspace.store().drop_table(self._path)
                self._path = ""
                error.add_note(f"All rows of the capture {self.name!r} were removed.")
            raise

    def _begin(self) -> None:
        """Create the table of the rows, whose path reserves the id of the checkpoint: the projection depends on it."""
        if not self._path:
            with self._run.workspace.opened(self._manifest) as workspace:
                store = workspace.created()
                self._model_id = model_id_for("", checkpoint_tables(store), store)
                checkpoint = checkpoint_path(self._model_id)
                path = capture_path(self.name, checkpoint)
                store.create_table(path, self._spec, {NEEDED_UNTIL: checkpoint})
                self._path = path

    def _computer_for(self, batch: Batch, numbers: RowNumbers) -> tuple[AbstractGradientComputer, float]:
        """Return the gradient computer for a batch, and how many batches may follow with its plan."""
        run = self._run
        computer, count = run.capturing
        if computer is None:
            computer = run.computer_for(batch, numbers, self._rows.what)
        count += 1
        streams = isinstance(computer, AbstractStreamingComputer)  # others may hold copies of the weights
        if not streams or (count <= _SETTLED_AFTER and is_scheduled(count)):
            computer.confirm()
            computer.load_model_params(run.model)
        run.capturing = computer, count
        return computer, self.num_missing / len(numbers) if count >= _SETTLED_AFTER else 0.0


def _is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer, or a wrapper of one such as those of training libraries."""
    has_groups = hasattr(value, "param_groups") or hasattr(value, "optimizer")
    return has_groups and callable(getattr(value, "state_dict", None))


def _file_to_write(folder: str | PathLike[str], name: str) -> Path:
    """Return the file of a checkpoint in a folder, which is made; raise InvalidInputError if it cannot be written."""
    if not isinstance(folder, str | PathLike):
        raise InvalidInputError(f"folder must be a path, got {folder!r:.100}.")
    file = Path(folder).absolute() / f"{name}.pt"
    with writing(file):
        make_folders(str(file.parent))
        os.close(open_folder(str(file.parent)))  # raises if it is a link
        with tempfile.TemporaryFile(dir=file.parent):
            pass
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return file
