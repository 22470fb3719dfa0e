"""The ``Scores`` class: the ``(N, M)`` result, read from disk or computed on access."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.json_text import shown
from trak_lite.core.validate import one_of, positive_int, target_number
from trak_lite.data.columns import Column, Where, labels_of, wanted_rows, weights_of
from trak_lite.errors import InvalidInputError, StateError, printable
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.trials import Trials
from trak_lite.evaluation.verdict import OneRunVerdict, Predictions
from trak_lite.featurizing.session import Run
from trak_lite.featurizing.solvers import Convergence
from trak_lite.linalg.topk import TopRows
from trak_lite.methods import AbstractMethod
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.report import Gallery, Render
from trak_lite.report.content import PairRender, Renders
from trak_lite.report.page import notebook_summary
from trak_lite.report.survey import Survey
from trak_lite.run.columns import stored_columns
from trak_lite.scoring.choices import DampingPath, GroupSums, RowChoice, chosen_top, group_sums
from trak_lite.scoring.frames import DataArray, DataFrame, data_array, frame
from trak_lite.scoring.matrix import AbstractScoreMatrix, checked_rows
from trak_lite.scoring.records import ScoreEntries
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.uncertainty import Reliability, Repeats
from trak_lite.store import Manifest


@dataclass(eq=False, repr=False)
class Scores:
    """Attribution scores of N train rows for M targets, read from disk or computed on access.

    Entry (i, j) estimates how much train row i raises the model output of target j: positive is helpful, negative
    is harmful. Rows are train rows, columns are targets.
    """

    matrix: AbstractScoreMatrix
    """Holds or computes the values."""
    name: str
    """Name of the target set."""
    method: AbstractMethod
    """The method that the scores were computed with."""
    manifest: Manifest
    """Settings and versions that the stored rows were made with."""
    settings: dict[str, Any]
    """How the scores were computed, as JSON values."""
    _: KW_ONLY
    row_source: ScoreSource | None = None
    """Computes scores from the stored rows; ``None`` if no row is stored."""
    known_run: Run | None = None
    """The model, settings and store of the scores; ``None`` without a model, or if no row is stored."""
    known_task: AbstractModelOutput | None = None
    """Defines f, of scores without a run; ``None`` if it is not known."""
    location: str | None = None
    """Path in the store; ``None`` in memory."""
    entries: ScoreEntries | None = None
    """The table of the scores and what is stored beside it; ``None`` without a table."""
    convergence: tuple[Convergence, ...] = ()
    """For each checkpoint, the iterations and final relative residuals ``(M,)`` of the solver of CG or LiSSA, if
    ``stream_scores`` or ``refine`` computed the scores."""

    @property
    def verdict(self) -> Verdict | None:
        """The result of :func:`~trak_lite.verify` for these scores; ``None`` if they were not verified."""
        return None if self.entries is None else self.entries.verdict(Verdict)

    @property
    def one_run_verdict(self) -> OneRunVerdict | None:
        """The last result of :func:`~trak_lite.verify_run` for these scores; ``None`` if there is none."""
        return None if self.entries is None else self.entries.verdict(OneRunVerdict)

    def keep(self, verdict: OneRunVerdict) -> None:
        """Store a verdict of one run with the scores, as ``verify_run`` does; scores in memory have no place for it."""
        if self.entries is not None:
            self.entries.put(verdict)

    @property
    def predictions(self) -> Predictions | None:
        """The scores' predictions for the subsets of ``verify``, and the outputs of the retrained models."""
        return None if self.entries is None else self.entries.predictions()

    @property
    def trials(self) -> Trials | None:
        """The sets that :func:`~trak_lite.try_removals` measured for these scores; ``None`` if there are none."""
        return None if self.entries is None else self.entries.trials()

    @property
    def run(self) -> Run:
        """The model, settings and store that these scores belong to.

        Raises:
            StateError: If they were opened without a model, or not computed from stored rows.
        """
        if self.known_run is not None:
            return self.known_run
        if self.row_source is None and self.settings.get("method") == "Unrolled":
            raise StateError(
                f"The scores {self.name!r} are those of a replay, made without an attributor. To test them in the same "
                "run: verify_run(scores, run, targets). To test them over seeds, make them with an attributor that has "
                "featurized the train data: attributor.score(targets, method=methods.Unrolled(run)), then verify(...)."
            )
        _ = self.source  # raises if there is none
        raise StateError(
            f"The scores {self.name!r} were opened without a model. Open them with one: "
            "Attributor.open(path, model).scores(name)."
        )

    @property
    def task(self) -> AbstractModelOutput:
        """The model output function that defines f.

        Raises:
            StateError: If the scores were opened without a model, or without the task that their targets were scored
                with, or made without an attributor and a replay.
        """
        if self.known_task is not None:
            return self.known_task
        if "task" in self.settings and not self.run.question:
            raise StateError(
                f"The targets {self.name!r} were scored with task={self.settings['task']!r}. Open the scores with it: "
                f"Attributor.scores({self.name!r}, task=...)."
            )
        return self.run.target_task

    @property
    def source(self) -> ScoreSource:
        """The object that computes these scores from the stored rows.

        Raises:
            StateError: If they were not computed from stored rows.
        """
        if self.row_source is not None and not self.method.multiplies_rows:
            raise StateError(
                f"The scores {self.name!r} are those of {self.method.name}, a method of whole matrices: it has no "
                "self-influence, and nothing else that multiplies stored rows. Use the scores of another method (for "
                "Mean: of the methods in it)."
            )
        if self.row_source is None:
            remedy = "Make scores with them: Attributor.featurize(train_data, ...), then score(targets)."
            raise StateError(
                f"The scores {self.name!r} ({self.method.name}) were not computed from stored rows, which this needs. "
                + ("Score without refine=." if "candidates" in self.settings else remedy)
            )
        return self.row_source

    @property
    def stored(self) -> bool:
        """Whether the matrix is stored, so that reading scores computes nothing."""
        return self.matrix.stored

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``: train rows, targets."""
        return self.matrix.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        num_rows, num_targets = self.shape
        address = self.location or "memory"
        values = self.settings.items()
        texts = ((key, one if isinstance(one, str) and len(one) < 100 else shown(one)) for key, one in values)
        settings = ", ".join(f"{key}={text}" for key, text in texts)
        verdicts = [one for one in (self.verdict, self.one_run_verdict) if one is not None]
        tested = "".join("\n  tested: " + str(one).replace("\n", "\n    ") for one in verdicts)
        return printable(
            f"Scores({self.name!r}: {num_rows} train rows x {num_targets} targets)\n"
            f"  made with {settings}\n"
            f"  {f'stored in {address}' if self.stored else f'not stored, computed from the rows in {address}'}"
            f"{tested}"
        )

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of the train data that ``featurize(..., columns=...)`` stored, by name; none in memory."""
        return {} if self.row_source is None else stored_columns(self.row_source.store)

    def top(
        self,
        k: int,
        *,
        target: int | None = None,
        sign: Literal["helpful", "harmful"] = "helpful",
        where: Where | None = None,
        weights: ArrayLike | str | None = None,
    ) -> TopRows:
        """Return the k most helpful (or harmful) train rows.

        Args:
            k: Number of rows; all rows are returned if there are fewer than k.
            target: Number of one target; ``None`` returns the rows of every target.
            sign: ``"helpful"`` takes the largest scores, ``"harmful"`` the smallest.
            where: Consider some rows only: a mask ``(N,)``, or stored columns with the value, or a list of values, that
                a row must have (``{"source": "web", "year": [2023, 2024]}``). Chunks without such a row are not
                read, and with ``dense=False`` tiles of 1024 rows without one are not computed.
            weights: ``(N,)`` factor of each row's scores, or the name of a stored column.

        Returns:
            Indices and scores, ``(k,)`` for one target or ``(M, k)`` for all. Of equal scores the lower row is first.

        Raises:
            InvalidInputError: If ``k``, ``sign`` or a weight is invalid, the target does not exist, no row satisfies
                ``where``, or a filter or weights were given for scores of some rows only (``k=``, ``refine=``).
            UnknownNameError: If no such column is stored.
        """
        k = positive_int(k=k)
        one_of(("helpful", "harmful"), sign=sign)
        number = None if target is None else target_number(target, self.shape[1], self.name)
        rows = self.matrix.kept_top(k, sign) if where is None and weights is None else None
        if rows is not None:
            return rows if number is None else TopRows(rows.indices[number], rows.scores[number])
        rows = chosen_top(self.matrix, k, self._choice(where, weights), target=number, sign=sign)
        return rows if number is None else TopRows(rows.indices[0], rows.scores[0])

    def tiles(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield ``(first row, (b, M) scores)`` for all train rows in order, without loading the whole matrix.

        Args:
            wanted: ``(N,)`` leaves out tiles without a wanted row; they are neither read nor computed.
        """
        return self.matrix.tiles(wanted)

    def numpy(self) -> NDArray[np.float32]:
        """Return all scores as one new float32 array ``(N, M)``."""
        return self.matrix.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Let ``np.asarray(scores)`` read all scores."""
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def rows(self, indices: list[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(len(indices), M)``."""
        return self.matrix.rows(indices)

    def require_all_rows(self) -> None:
        """Raise ``InvalidInputError`` if these are scores of some rows only (``k=``, ``refine=``)."""
        self.matrix.require_all_rows()

    def self_influence(self) -> NDArray[np.float32]:
        r"""Return the score of every train row for itself, ``(N,)`` float32.

        By default this is the mean of q over checkpoints times the sum over modules of
        :math:`\frac1C\sum_c \phi_{c,i}^\top (H_c + \lambda_c I)^{-1} \phi_{c,i}`. It is large if the model
        needed the row itself to fit it, for example a row with a wrong label; ``Attributor.label_suspicion`` finds
        those better. For methods without a kernel the product is the squared norm of the gradient; for cosines it is
        the number of nonzero segments.
        """
        return self.source.self_influence()

    def group(
        self,
        rows: ArrayLike | str | None = None,
        targets: ArrayLike | None = None,
        *,
        where: Where | None = None,
        weights: ArrayLike | str | None = None,
    ) -> GroupSums:
        """Return the scores summed over groups of train rows, of targets, or both, in one pass.

        Sums are in float64. Memory: one tile and the sums; the matrix is not loaded. ``.means`` divides the sums by the
        number of scores in them.

        Args:
            rows: ``(N,)`` label of each train row (its author, class, source), or the name of a stored column;
                ``None`` does not group rows.
            targets: ``(M,)`` label of each target; ``None`` does not group targets.
            where: Sum some rows only, as in :meth:`top`. Groups without such a row are left out.
            weights: ``(N,)`` factor of each row's scores, or the name of a stored column.

        Raises:
            InvalidInputError: If neither is given, there is not exactly one label per row or target, or the scores are
                of some rows only.
            UnknownNameError: If no such column is stored.

        Example:
            Sum the scores of each class of the train set over all targets:

            >>> import torch
            >>> from torch.utils.data import TensorDataset
            >>> from trak_lite import Attributor
            >>> _ = torch.manual_seed(0)
            >>> labels = torch.arange(12) % 3
            >>> data = TensorDataset(torch.randn(12, 4), labels)
            >>> attributor = Attributor(torch.nn.Linear(4, 3), "image_classification", None, proj_dim=8)
            >>> _ = attributor.featurize(data)
            >>> attributor.score(data).group(labels, [0] * 12).sums.shape
            (3, 1)
        """
        if rows is None and targets is None:
            raise InvalidInputError(
                "No labels were given to group by. Give a label per train row, per target, or both."
            )
        num_rows, num_targets = self.shape
        columns = self.columns if isinstance(rows, str) else {}
        train = None if rows is None else labels_of(rows, columns, num_rows, "The labels of train rows")
        labels = None if targets is None else Column.of(targets, num_targets, "The labels of targets")
        return group_sums(self.matrix, train, labels, self._choice(where, weights))

    def _choice(self, where: Where | None, weights: ArrayLike | str | None) -> RowChoice:
        columns = self.columns if isinstance(where, Mapping) or isinstance(weights, str) else {}
        return RowChoice(
            None if where is None else wanted_rows(where, columns, len(self)),
            None if weights is None else weights_of(weights, columns, len(self)),
        )

    def damping_path(self, dampings: Sequence[float | None], *, targets: slice = slice(None)) -> DampingPath:
        """Return the scores at other dampings, from one sum over the train rows per checkpoint.

        Args:
            dampings: Lambdas in units of the mean eigenvalue; ``None`` is the default damping.
            targets: Targets to select. The result numbers them from 0.

        Raises:
            InvalidInputError: If a damping is negative, or these scores have no kernel.
            SingularKernelError: If a kernel is singular at a damping.
        """
        return DampingPath(self.source, self.name, dampings, targets)

    def standard_error(
        self,
        rows: ArrayLike | None = None,
        *,
        target: int | None = None,
        runs: Sequence[Hashable] | None = None,
    ) -> NDArray[np.float32]:
        """Return the standard errors of scores over checkpoints, or over independent runs.

        Each checkpoint (or run) alone estimates the same score. The score is the mean of these estimates, with the
        weights of the checkpoints, and this method returns the standard error of that mean. (It is the jackknife that
        leaves out one checkpoint or run, in the first order because the mean q multiplies the score. It is up to 1.4
        times too large if few of them have nearly all of the weight.) The error covers the change that other
        checkpoints (runs) of the same kind would cause. It does not cover errors that all of them share: the
        projection, the damping, the linearisation. Checkpoints of one run are not independent, so their standard error
        underestimates the change that another run would cause. Pass ``runs`` to compute the error over runs.

        ``docs/pages/choosing.md`` compares predicted with observed differences between runs
        (``benchmarks/score_reliability.py``).

        Args:
            rows: Train rows ``(n,)``, or rows per target ``(M, k)``, as ``top(k).indices``; ``None`` for all.
            target: One target; ``None`` for all of them.
            runs: Label of each checkpoint's run, in order. ``None`` treats each checkpoint as a run.

        Returns:
            In the units of the scores: ``(n, M)``, ``(n,)`` for one target, ``(M, k)`` for rows ``(M, k)``.

        Raises:
            InvalidInputError: If rows, target or runs are invalid, there are fewer than two checkpoints or runs with a
                weight other than 0, or checkpoint weights have both signs and ``runs`` is ``None``.
        """
        wanted = None if rows is None else checked_rows(rows, self.shape, target)
        number = None if target is None else target_number(target, self.shape[1], self.name)
        errors = self.matrix.errors()
        if errors is None:
            return Repeats(self.source, runs).standard_error(wanted, number)
        if wanted is not None and wanted.ndim == 2:
            return np.take_along_axis(errors.T, wanted, axis=1)
        chosen = errors if wanted is None else errors[wanted]
        return chosen if number is None else chosen[:, number]

    def reliability(
        self, *, runs: Sequence[Hashable] | None = None, threshold: float = 0.5, max_rows: int = 10_000
    ) -> Reliability:
        """Return how much checkpoints (or runs) agree on the ranking of train rows, for each target.

        If the checkpoints of a target rank the train rows alike, more checkpoints would hardly change the ranking. If
        they do not, the ranking is mostly noise, and its top rows are not reliable. Agreement is necessary for a
        correct ranking but not sufficient: checkpoints may share an error. Agreement with retraining is not tested.

        With the checkpoints of one run ``expected`` is an upper bound of the correlation with another run
        (``docs/pages/choosing.md``, ``benchmarks/score_reliability.py``).

        Args:
            runs: Label of each checkpoint's run, in order. ``None`` treats each checkpoint as a run.
            threshold: Targets with an ``expected`` correlation of at least this are flagged as reliable.
            max_rows: Number of evenly spaced train rows to rank.

        Raises:
            InvalidInputError: As :meth:`standard_error`, or if ``max_rows`` is not a positive integer.
        """
        max_rows = positive_int(max_rows=max_rows)
        return Repeats(self.source, runs).reliability(threshold=threshold, max_rows=max_rows)

    def checkpoint_agreement(self, *, max_rows: int = 10_000, max_targets: int = 64) -> NDArray[np.float64]:
        """Return the Spearman correlations between the train row rankings of every two checkpoints, ``(C, C)``.

        The correlations are averaged over targets. :meth:`reliability` averages over pairs, for each target.

        Args:
            max_rows: Number of evenly spaced train rows to rank.
            max_targets: Number of evenly spaced targets to average over.

        Raises:
            InvalidInputError: If there are fewer than two checkpoints, checkpoint weights have both signs, or a number
                is not a positive integer.
        """
        max_rows, max_targets = positive_int(max_rows=max_rows), positive_int(max_targets=max_targets)
        return Repeats(self.source, None).pairwise_agreement(max_rows=max_rows, max_targets=max_targets)

    def gallery(
        self,
        targets: Sequence[int] | None = None,
        render: Render | None = None,
        *,
        target_render: Render | None = None,
        pair_render: PairRender | None = None,
        k: int = 5,
        where: Where | None = None,
    ) -> Gallery:
        """Return targets with their most helpful and most harmful train rows, for display in notebooks and pages.

        Args:
            targets: Targets to show; ``None`` takes the first 100.
            render: ``render(row)`` returns the content of train row ``row``: an image (array, tensor, PIL), text, a
                mapping of names to values, or ``(token, weight)`` pairs. If it fails, or gives something else, the
                error is shown in its place. ``None`` shows row numbers.
            target_render: The same for targets.
            pair_render: ``pair_render(row, target)``, used instead of ``render`` if the content of a row depends on the
                target, such as tokens with their scores (:func:`~trak_lite.token_scores`).
            k: Number of helpful and of harmful rows per target.
            where: Show some train rows only, as in :meth:`top`.

        Raises:
            InvalidInputError: If a target does not exist, or no row satisfies ``where``.
        """
        survey = Survey.of(self, targets, k=k, where=where)
        return Gallery(self.name, survey, Renders(render, target_render, pair_render))

    def _repr_html_(self) -> str:
        return notebook_summary(self)

    def to_pandas(self) -> DataFrame:
        """Return a DataFrame with train rows as index and targets as columns (needs pandas)."""
        return frame(self.numpy(), index="train_row", columns="target")

    def to_xarray(self) -> DataArray:
        """Return a DataArray with dimensions ``train_row`` and ``target`` and the settings as attributes."""
        attributes = {key: str(value) for key, value in self.settings.items()}
        return data_array(self.numpy(), ("train_row", "target"), name=self.name, attributes=attributes)
