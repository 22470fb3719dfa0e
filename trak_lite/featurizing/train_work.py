"""The work on the train rows of all checkpoints: their tables are filled, and fitted to, beside other processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, final

from trak_lite.core.devices import one_behind
from trak_lite.core.progress import announce
from trak_lite.data.datasets import RowNumbers, Rows
from trak_lite.data.packed import Documents
from trak_lite.errors import ManifestMismatchError, StateError
from trak_lite.featurizing.fisher import require_writable
from trak_lite.featurizing.fits import MethodFits
from trak_lite.featurizing.rows import HostRows
from trak_lite.featurizing.session import FeaturizingSession, TrainTables
from trak_lite.modelout_functions import require_separate_documents
from trak_lite.models.checkpoints import Checkpoint
from trak_lite.run.tables import (
    CAPTURED,
    capture_tables,
    checkpoint_path,
    checkpoint_tables,
    model_id_for,
    table_path,
)
from trak_lite.store import AbstractRowTable
from trak_lite.store._exchange import take_missing
from trak_lite.store.sharing import Patience, has_free_rows, holder_of


@final
class TrainWork:
    """Computes the missing train rows of the checkpoints of a session, and what the method fits to them."""

    def __init__(self, session: FeaturizingSession) -> None:
        self.session = session
        self._fits = MethodFits(session)
        self._unfinished: list[tuple[Checkpoint, str]] = []
        """Checkpoints and the paths of their tables."""
        self._is_announced = False
        self.loaded: list[str] = []
        """Digests of the weights that :meth:`featurize` loaded, in order."""
        self.names: list[str] = []
        """Names of their checkpoints in the store: those of the call that first featurized each."""

    def featurize(self, checkpoint: Checkpoint, rows: Rows, *, wait: bool) -> int:
        """Load a checkpoint and featurize its missing train rows; return the number of rows this process wrote.

        Without ``wait``, or if earlier checkpoints are unfinished, chunks that other processes hold are left to
        :meth:`finish`.
        """
        session, is_first = self.session, not self.loaded
        digest = session.load(checkpoint)
        self.loaded.append(digest)
        if is_first and isinstance(rows.dataset, Documents) and rows.dataset.check:
            require_separate_documents(session.model, rows.dataset, session.settings.device)
        # Compare the first checkpoint on all ranks before writing, so that no rank writes rows of another model.
        what = f"checkpoint {checkpoint.name!r} (digest of its weights)"
        session.ranks.agree(what, digest, wait=is_first)
        train_tables = checkpoint_tables(session.store) if session.workspace.exists else {}
        known = train_tables.get(digest)
        stored = {} if known is None else session.store.attributes(table_path(known))
        self.names.append(stored.get("name", checkpoint.name))
        session.run.featurized.add(digest)
        session.refuse_replaced(
            checkpoint,
            digest,
            train_tables,
            remedy="To keep both as checkpoints of one run, pass the weights: featurize(data, model.state_dict()).",
            warns=True,
        )
        return self._featurize_train(checkpoint, digest, rows, train_tables, wait=wait)

    def _featurize_train(
        self, checkpoint: Checkpoint, digest: str, rows: Rows, train_tables: TrainTables, *, wait: bool
    ) -> int:
        session, settings, workspace = self.session, self.session.settings, self.session.workspace
        # Do not wait here while earlier checkpoints are unfinished: their rows may become free. The ranks of a
        # sharded model work in lockstep on the same rows, so they always wait.
        wait = (wait and not self._unfinished) or not session.ranks.lockstep.is_alone
        adam = session.adam_states(settings.normalization)
        known = train_tables.get(digest)
        self._announce_fit(known, rows)
        captured = _capture_of(checkpoint, known)
        stages = capture_tables(session.store, captured) if workspace.exists and captured else {}
        if captured and known is not None and not (stages or known.complete):
            path = table_path(known)
            raise StateError(
                f"{path} has lost {len(known.pending())} of {len(rows)} rows that the capture {captured!r} took, whose "
                f"weights are gone: those at its end give other rows. Restore the rows from a backup, or call "
                f"drop_checkpoint({path!r}), and capture again or featurize the saved weights."
            )
        model_id = model_id_for(digest, train_tables, session.store if workspace.exists else None)
        model_id = next(iter(stages), model_id)
        of_capture = {CAPTURED: captured} if captured else {}
        attributes = {
            "name": checkpoint.name,
            "source": checkpoint.source,
            "has_loader": checkpoint.has_loader,
        }
        written = None
        while written is None:
            fingerprint = settings.row_fingerprint(model_id, digest, adam)
            spec = settings.train_table(len(rows), {**fingerprint, **of_capture})
            try:
                table = workspace.lazy_table(checkpoint_path(model_id), spec, attributes)
                for stage in stages.values():
                    take_missing(table.created(), session.store.open_table(stage))
                work = session.work(table, session.row_pass(rows, model_id), f"Featurizing {checkpoint.name}")
                written = work.fill(wait=wait)
            except ManifestMismatchError:
                if not workspace.exists:  # a process has just made it, with other settings or data
                    raise
                # Another process may just have used this model_id for another checkpoint. Then use a new one, because
                # the projection depends on it.
                refused, store = model_id, session.store
                model_id = model_id_for(digest, checkpoint_tables(store), store)
                if model_id == refused or captured:
                    raise
        path = checkpoint_path(model_id)
        for stage in filter(session.store.has_table, stages.values()):
            if self._found(path).complete:
                session.store.drop_table(stage)
        fits = self._fits.fisher_fits(settings.method)
        if fits is not None:
            self._fits.fit_fisher(fits, self._found(path), checkpoint.name, rows, wait=wait)
        if not self._is_featurized(self._found(path)):
            self._unfinished.append((checkpoint, path))
        return written

    def _announce_fit(self, table: AbstractRowTable | None, rows: Rows) -> None:
        """Say how long the fit of a checkpoint takes, before its rows: the fit may take longer than they do."""
        settings = self.session.settings
        fits, number = None, settings.num_fit_rows(len(rows))
        if table is not None and (fits := self._fits.fisher_fits(settings.method)) is not None:
            if fits.has(table_path(table)):
                return
            require_writable(self.session.store)
        if settings.method.fisher_fit is not None and not self._is_announced:
            self._is_announced = True
            self._fits.require_batches(rows, settings.method.fisher_fit)
            announce(
                f"{len(rows):,} rows per checkpoint, and then the fit of {settings.method.name}: {number:,} "
                f"gradients, {number / len(rows):.1f} times as many as rows.",
                self.session.run.progress,
            )

    def trial(
        self, checkpoint: Checkpoint, rows: Rows, plan: Iterable[RowNumbers], *, of_fit: bool
    ) -> Iterator[None]:
        """Compute batches as :meth:`featurize` does in a run of all rows, and write them; yield after each.

        ``plan`` has the rows of each batch; with ``of_fit`` those are samples of the fit of Fisher.
        """
        session, settings = self.session, self.session.settings
        digest = session.load(checkpoint)
        adam = session.adam_states(settings.normalization)
        spec = settings.train_table(len(rows), settings.row_fingerprint(0, digest, adam))
        passes = session.row_pass(rows, 0)
        if of_fit and settings.method.fisher_fit is not None:
            passes, spec = self._fits.fit_pass(rows, settings.method.fisher_fit, 0)
        table = session.workspace.lazy_table("trial", spec)
        stream = session.work(table, passes, "trial").passes.stream(plan, lambda: spec.num_rows)
        for _, copied in one_behind((None, HostRows(computed, spec)) for computed in stream):
            copied.put(table.put)
            yield

    def finish(self, rows: Rows) -> int:
        """Wait for the rows that other processes held during :meth:`featurize`, and compute those they abandoned.

        Weights are loaded again only for rows that no process holds. Returns the number of rows written here.
        """
        written, patience = 0, Patience()

        def holders() -> str:
            path = self._unfinished[0][1]
            holder = holder_of(self._found(path))
            return holder or f"another process works on the curvature fit of {path}."

        while self._unfinished:
            unfinished, self._unfinished = self._unfinished, []
            for checkpoint, path in unfinished:
                table = self._found(path)
                if self._is_left_alone(table):
                    # No ranks.agree here: the ranks take over different checkpoints in different orders.
                    digest = self.session.load(checkpoint)
                    written += self._featurize_train(checkpoint, digest, rows, {digest: table}, wait=False)
                    patience.reset()
                elif not self._is_featurized(table):
                    self._unfinished.append((checkpoint, path))
            if self._unfinished:
                self.session.ranks.watch()
                patience.wait(f"for rows of {len(self._unfinished)} checkpoints", holders)
        return written

    def _is_featurized(self, table: AbstractRowTable) -> bool:
        fits = self._fits.fisher_fits(self.session.settings.method)
        return table.complete and (fits is None or fits.has(table_path(table)))

    def _is_left_alone(self, table: AbstractRowTable) -> bool:
        """Return whether a checkpoint has unfinished work that no process holds."""
        fits = self._fits.fisher_fits(self.session.settings.method)
        return has_free_rows(table) or (fits is not None and fits.is_left_alone(table_path(table)))

    def _found(self, path: str) -> AbstractRowTable:
        table = self.session.workspace.table(path)
        if table is None:
            raise StateError(
                f"{path} is not in the store any more: another process has dropped it while its rows were featurized. "
                "Call featurize(...) again."
            )
        return table


def _capture_of(checkpoint: Checkpoint, table: AbstractRowTable | None) -> str | None:
    """Return the name of the capture that made a checkpoint's rows (``table``, if stored); ``None`` for others."""
    captured = checkpoint.name if checkpoint.is_captured else None
    if table is None:
        return captured
    stored: str | None = table.spec.fingerprint.get(CAPTURED)
    if captured not in (None, stored):
        path = table_path(table)
        raise ManifestMismatchError(
            f"{path} has other rows of the weights at the end of the capture {captured!r}. Use another path, or "
            f"drop_checkpoint({path!r}) and end the capture again with resume=True."
        )
    return stored


def marking_last(checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[Checkpoint, bool]]:
    """Yield ``(checkpoint, whether it is the last one)``."""
    ends: Iterable[Any] = chain(checkpoints, [None])
    return ((checkpoint, later is None) for checkpoint, later in pairwise(ends))
