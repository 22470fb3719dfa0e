"""The fits of methods to the train rows, at the loaded checkpoint of a session."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from torch.utils.data import default_collate

from trak_lite.data.batches import rows_in_batches
from trak_lite.data.datasets import Rows, spread_rows
from trak_lite.data.loading import NUM_HELD
from trak_lite.errors import InvalidInputError
from trak_lite.featurizing.fisher import DrawnRows, FisherFits, drawn_spec
from trak_lite.featurizing.gauss_newton import CurvatureProducts
from trak_lite.featurizing.inverse import InverseCurvature
from trak_lite.featurizing.kronecker.curvature import Preconditioner
from trak_lite.featurizing.kronecker.fit import KroneckerFits
from trak_lite.featurizing.passes import RowPass
from trak_lite.featurizing.session import FeaturizingSession, TrainTables
from trak_lite.methods import AbstractInverseMethod, AbstractMethod, Fisher
from trak_lite.models.sharded import refuse_sharded
from trak_lite.run.tables import model_id_of, num_train_rows, table_path
from trak_lite.store import AbstractRowTable, TableSpec


@final
@dataclass(frozen=True, slots=True, eq=False)
class MethodFits:
    """Finds the fits of methods at the loaded checkpoint in the store, or makes them."""

    session: FeaturizingSession

    def fisher_fits(self, method: AbstractMethod) -> FisherFits | None:
        """Return the fits of a method, if it needs one before scoring."""
        session, fisher = self.session, method.fisher_fit
        return None if fisher is None else FisherFits(session.store, fisher, session.settings.layout)

    def fit(self, method: AbstractMethod, train: TrainTables) -> None:
        """Fit the method's kernel for each of these checkpoints, if the method needs a fit before scoring.

        The curvature of :class:`~trak_lite.methods.EKFAC` is fitted when targets are featurized instead.
        """
        fits, session = self.fisher_fits(method), self.session
        if fits is None:
            return
        waiting = {
            digest: table
            for digest, table in train.items()
            if not session.agreed(fits.has(table_path(table)))
        }
        if waiting:
            rows = session.train_rows(f"{method.name} has to be fitted to")
            session.visit(
                waiting,
                lambda digest, label: self.fit_fisher(fits, train[digest], label, rows),
                purpose="to fit the Fisher information",
                units=session.settings.num_fit_rows(len(rows)),
            )

    def fit_fisher(
        self, fits: FisherFits, train: AbstractRowTable, label: str, rows: Rows, *, wait: bool = True
    ) -> None:
        """Fit the Fisher information of the loaded checkpoint, with this train table, if it is not stored yet."""
        session, path = self.session, table_path(train)
        settings = session.settings
        if session.agreed(fits.has(path)):
            fits.sweep(path)
            return
        if not settings.computer_is_chosen:
            numbers, batch = next(rows.moved(np.arange(min(rows.batch_size, len(rows))), settings.device))
            session.computer_for(rows.what, batch, numbers)
        passes, spec = self.fit_pass(rows, fits.method, model_id_of(train))
        table = session.workspace.lazy_table(*fits.drawn_table(path, spec))
        drawn = session.work(table, passes, f"Fitting the Fisher information of {label}")
        fits.fit(path, drawn, len(rows), wait=wait)

    def fit_pass(self, rows: Rows, method: Fisher, model_id: int) -> tuple[RowPass, TableSpec]:
        """Return the pass over the samples of a fit of the loaded checkpoint, and the spec of a table of them."""
        session, settings = self.session, self.session.settings
        computer = settings.computer(of_drawn_labels=True)
        computer.load_model_params(session.model)
        samples, spec = self._drawn(rows, method)
        return replace(session.row_pass(samples, model_id), computer_for=lambda *_: computer), spec

    def require_batches(self, rows: Rows, method: Fisher) -> None:
        """Raise if torch's collate function cannot stack the samples of a fit, whose batches have other rows."""
        if rows.collate is not default_collate:
            return
        try:
            list(rows.batches([spread_rows(len(rows), min(NUM_HELD, rows.batch_size))]))
        except InvalidInputError:  # of rows that may be in no batch together
            samples, spec = self._drawn(rows, method)
            plan = rows_in_batches(np.arange(spec.num_rows), samples.batch_size)
            deque(samples.batches(iter(plan)), maxlen=0)

    def _drawn(self, rows: Rows, method: Fisher) -> tuple[DrawnRows, TableSpec]:
        session, settings = self.session, self.session.settings
        chosen, draws = method.num_draws(len(rows), settings.layout, settings.projector.proj_dim)
        spec, at_once = drawn_spec(chosen, draws, settings.layout.width, {})
        samples = DrawnRows(
            *(rows, settings.task, session.model, chosen, draws, method.seed),
            at_once=at_once,
            draws_ahead=session.ranks.lockstep.is_alone,
        )
        return samples, spec

    def kronecker_fits(self, method: AbstractInverseMethod) -> KroneckerFits:
        """Return the fits of the EK-FAC of a method."""
        session, settings = self.session, self.session.settings
        fitted, names = method.ekfac.fitted_to(settings.task), list(settings.parameters)
        return KroneckerFits(session.store, session.model, names, fitted, settings.task, settings.device)

    def inverse(
        self, digest: str, label: str, method: AbstractInverseMethod, rows: Rows | None = None
    ) -> InverseCurvature:
        """Return the inverse curvature of a method at the loaded checkpoint; fit its EK-FAC if it is not stored yet.

        ``rows`` are the train rows; ``None`` uses those of the last ``featurize``, if they are needed.
        """
        fits, need = self.kronecker_fits(method), f"{method.name} has to be fitted to"
        session, settings = self.session, self.session.settings
        if not fits.has(digest):
            refuse_sharded(
                session.model, f"method={method.name!r}", "Use method='Fisher', or score with a whole model"
            )
            rows = session.train_rows(need) if rows is None else rows
            fits.fit(digest, rows, label=f"Fitting the curvature of {label}", progress=session.run.progress)
        else:
            train = session.run.train if rows is None else rows
            # Another process may have appended rows.
            if train is not None and len(train) == num_train_rows(session.store.manifest):
                fits.check(digest, train, label=f"The curvature of {label}")
        share, absolute = method.kronecker_share, method.absolute
        preconditioner = Preconditioner(
            fits.curvature(digest), damping=method.damping, absolute=absolute, share=share
        )
        products = None
        if method.reads_rows:
            products = CurvatureProducts(
                session.model,
                settings.task,
                session.train_rows(need) if rows is None else rows,
                settings.parameters,
                draws=method.product_draws,
                seed=method.ekfac.seed,
                device=settings.device,
            )
        return InverseCurvature(method, preconditioner, products, label, settings.parameters)
