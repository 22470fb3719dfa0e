"""Scores: the (N, M) result, left on disk, or not made at all, until somebody looks at a part of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite._validate import one_of, positive_int, target_number
from trak_lite.errors import InvalidInputError, StateError, printable
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.verdict import Predictions
from trak_lite.featurizing.session import Run
from trak_lite.linalg.topk import TopRows
from trak_lite.methods import AbstractMethod
from trak_lite.report import Gallery, Render
from trak_lite.report.content import PairRender, Renders
from trak_lite.report.notebook import notebook_summary
from trak_lite.scoring.matrix import AbstractScoreMatrix, DampingPath, GroupSums, group_sums, top_rows
from trak_lite.scoring.source import Reliability, ScoreSource
from trak_lite.store import Manifest

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["Scores", "TopRows"]


class Scores:
    """Attribution scores of N train rows for M targets, read from disk, or computed, as they are asked for.

    Entry (i, j) says how much train row i raises the model output of target j: positive is helpful, negative
    is harmful. Rows are train rows, columns are targets.
    """

    def __init__(
        self,
        matrix: AbstractScoreMatrix,
        source: ScoreSource,
        *,
        settings: dict[str, Any],
        location: str | None,
        run: Run | None = None,
        verdict: Callable[[], Verdict | None] = lambda: None,
        predictions: Callable[[], Predictions | None] = lambda: None,
    ) -> None:
        """Hold the scores and what they are made from.

        Args:
            matrix: The scores, kept or computed when asked.
            source: Answers what is beside them: standard errors, self-influence, other dampings.
            settings: How the scores were computed, as JSON values.
            location: Path in the store, ``None`` in memory.
            run: The model, settings and store that they belong to; ``None`` where no model is at hand.
            verdict: Returns what retraining said about these very scores.
            predictions: Returns what they predicted then, beside what retrained models said.
        """
        self._matrix = matrix
        self._source = source
        self._location = location
        self.name = source.name
        self.settings = settings
        self._run = run
        self._verdict = verdict
        self._predictions = predictions

    @property
    def verdict(self) -> Verdict | None:
        """What :func:`~trak_lite.verify` found about these very scores; ``None`` if they were not tested."""
        return self._verdict()

    @property
    def predictions(self) -> Predictions | None:
        """What these scores predicted for the subsets of ``verify``, and what the retrained models said."""
        return self._predictions()

    @property
    def method(self) -> AbstractMethod:
        """How the scores were computed."""
        return self._source.method

    @property
    def run(self) -> Run:
        """The model, settings and store that these scores belong to.

        Raises:
            StateError: If they were opened without a model.
        """
        if self._run is None:
            raise StateError(
                f"The scores {self.name!r} were opened without a model. Open them with one: "
                "Attributor.open(path, model).scores(name)."
            )
        return self._run

    @property
    def source(self) -> ScoreSource:
        """What the scores are made from."""
        return self._source

    @property
    def manifest(self) -> Manifest:
        """Settings and versions that the rows behind these scores were made with."""
        return self._source.manifest

    @property
    def location(self) -> str | None:
        """Path in the store; ``None`` in memory."""
        return self._location

    @property
    def stored(self) -> bool:
        """Whether the matrix is kept, so that reading scores computes nothing."""
        return self._matrix.stored

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``: train rows, targets."""
        return self._matrix.shape

    def __len__(self) -> int:
        """Return the number of train rows."""
        return self.shape[0]

    def __repr__(self) -> str:
        """Return sizes, settings, place, and the verdict if there is one, on a few lines."""
        num_rows, num_targets = self.shape
        place = self._location or "memory"
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        verdict = self.verdict
        tested = "" if verdict is None else "\n  tested: " + str(verdict).replace("\n", "\n    ")
        return printable(
            f"Scores({self.name!r}: {num_rows} train rows x {num_targets} targets)\n"
            f"  made with {settings}\n"
            f"  {f'kept in {place}' if self._matrix.stored else f'not kept, computed from the rows in {place}'}"
            f"{tested}"
        )

    def top(
        self, k: int, *, target: int | None = None, sign: Literal["helpful", "harmful"] = "helpful"
    ) -> TopRows:
        """Return the k most helpful (or harmful) train rows.

        Args:
            k: Rows to return; all N if there are fewer.
            target: One target; ``None`` answers for all of them.
            sign: ``"helpful"`` takes the largest scores, ``"harmful"`` the smallest.

        Returns:
            Indices and scores, ``(k,)`` for one target or ``(M, k)`` for all; equal scores by lower row first.

        Raises:
            InvalidInputError: If ``k`` or ``sign`` is unknown, or there is no such target.
        """
        positive_int(k=k)
        one_of(("helpful", "harmful"), sign=sign)
        place = None if target is None else target_number(target, self.shape[1], self.name)
        found = self._matrix.kept_top(k, sign)
        if found is None and place is not None:
            tiles = ((start, tile[:, place : place + 1]) for start, tile in self._matrix.tiles())
            indices, scores = top_rows(tiles, 1, k, sign=sign)
            return TopRows(indices[0], scores[0])
        found = found or top_rows(self._matrix.tiles(), self.shape[1], k, sign=sign)
        return found if place is None else TopRows(found.indices[place], found.scores[place])

    def tiles(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield ``(first row, (b, M) scores)`` of all train rows in order: one pass in little memory."""
        return self._matrix.tiles()

    def numpy(self) -> NDArray[np.float32]:
        """Return all scores as one new float32 array ``(N, M)``."""
        return self._matrix.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Let ``np.asarray(scores)`` read all scores."""
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def rows(self, indices: list[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(len(indices), M)``."""
        return self._matrix.rows(indices)

    def self_influence(self) -> NDArray[np.float32]:
        r"""Return the score of every train row for itself, ``(N,)`` float32.

        By default the sum over modules of
        :math:`\frac1C\sum_c q_{c,i} \, \phi_{c,i}^\top (H_c + \lambda_c I)^{-1} \phi_{c,i}`: large where the model
        needed the row itself to fit it, as for a wrong label. Without a kernel the squared norm of the gradient stands
        for the product, for cosines the number of segments that are not zero.
        """
        return self._source.self_influence()

    def group(self, rows: ArrayLike | None = None, targets: ArrayLike | None = None) -> GroupSums:
        """Return the scores summed over groups of train rows, of targets, or both, in one pass.

        Args:
            rows: ``(N,)`` label of each train row (its author, class, source); ``None`` leaves rows as they are.
            targets: ``(M,)`` label of each target; ``None`` leaves targets as they are.

        Raises:
            InvalidInputError: If neither is given, or labels are not one per row or target.

        Example:
            What each class of the train set does for the targets as a whole:

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
        return group_sums(self._matrix, rows, targets)

    def damping_path(self, dampings: Sequence[float], *, targets: slice = slice(None)) -> DampingPath:
        """Return the scores at other dampings, from one eigendecomposition per checkpoint and segment.

        Args:
            dampings: Lambdas in mean eigenvalues.
            targets: Targets to take; they are numbered anew.

        Raises:
            InvalidInputError: If a damping is negative, or these scores have no kernel.
            SingularKernelError: If a kernel has no inverse at a damping.
        """
        return DampingPath(self._source, self.name, dampings, targets)

    def standard_error(
        self,
        rows: ArrayLike | None = None,
        *,
        target: int | None = None,
        runs: Sequence[Hashable] | None = None,
    ) -> NDArray[np.float32]:
        """Return the standard errors of scores over checkpoints, or over independent runs.

        Each checkpoint (or run) alone gives an estimate of the same score; the score is their mean, and this is the
        standard error of that mean (by the infinitesimal jackknife, as the mean q multiplies it). It says what other
        checkpoints (runs) of the same kind would change. It says nothing about an error that all of them share: the
        projection, the damping, the linearisation. Checkpoints of one run are not independent, so theirs is too small
        for the change that another run would bring; with ``runs`` it is over runs. Seen with digits
        (``benchmarks/score_reliability.py``): the difference of two times 3 runs was 1.00 times what these errors say
        (root mean square; within two of them in 89 % of cases), 1.19 times with each checkpoint by itself, and that of
        two single runs of 5 checkpoints 1.24 times.

        Args:
            rows: Train rows ``(n,)``, or some of each target, ``(M, k)``, as ``top(k).indices``; ``None`` for all.
            target: One target; ``None`` for all of them.
            runs: A label per checkpoint, in order: which run it is from. ``None`` takes each checkpoint by itself.

        Returns:
            In the units of the scores: ``(n, M)``, ``(n,)`` for one target, ``(M, k)`` for rows ``(M, k)``.

        Raises:
            InvalidInputError: If rows, target or runs do not fit, there are fewer than two checkpoints or runs, or
                checkpoints are subtracted and ``runs`` does not say which belong together.
        """
        wanted = None if rows is None else self._checked_rows(rows, target)
        if wanted is not None and wanted.ndim == 2:
            return self._source.pair_errors(wanted, runs)
        if target is None:
            return self._source.standard_error(wanted, slice(None), runs)
        place = target_number(target, self.shape[1], self.name)
        return self._source.standard_error(wanted, slice(place, place + 1), runs)[:, 0]

    def reliability(
        self, *, runs: Sequence[Hashable] | None = None, threshold: float = 0.5, max_rows: int = 10_000
    ) -> Reliability:
        """Return how far checkpoints (or runs) agree on the ranking of train rows, target by target.

        A target whose checkpoints rank the train rows alike has a ranking that more of them would hardly change; one
        whose checkpoints do not agree has a ranking that is mostly noise, and its top rows are not to be relied on.
        Agreement is necessary for a right ranking, not sufficient: checkpoints may agree on the same error.

        Seen with digits (``benchmarks/score_reliability.py``: 600 train rows, 120 targets, 10 % flipped labels, an MLP,
        6 runs of 5 checkpoints): over the checkpoints of one run ``expected`` was .73 in the mean over targets, and the
        ranking of another run agreed by .53: an upper bound, then. Over 3 runs it was .77, and 3 other runs agreed by
        .72. Across targets its rank correlation with how other runs agreed was .59 and .71. Whether retraining agrees
        is another question, which it does not answer.

        Args:
            runs: A label per checkpoint, in order: which run it is from. ``None`` takes each checkpoint by itself.
            threshold: ``expected`` correlation from which a target is flagged as reliable.
            max_rows: Train rows, evenly spaced, that are ranked.

        Raises:
            InvalidInputError: As :meth:`standard_error`, or if ``max_rows`` is not a positive integer.
        """
        return self._source.reliability(runs, threshold=threshold, max_rows=positive_int(max_rows=max_rows))

    def checkpoint_agreement(self, *, max_rows: int = 10_000, max_targets: int = 64) -> NDArray[np.float64]:
        """Return how alike every two checkpoints rank the train rows: Spearman correlations, ``(C, C)``.

        :meth:`reliability` says the same target by target, in the mean over pairs.

        Args:
            max_rows: Train rows, evenly spaced, that are ranked.
            max_targets: Targets, evenly spaced, that the mean is over.

        Raises:
            InvalidInputError: If there are fewer than two checkpoints, checkpoints are subtracted from each other, or
                a number is not a positive integer.
        """
        return self._source.pairwise_agreement(
            max_rows=positive_int(max_rows=max_rows), max_targets=positive_int(max_targets=max_targets)
        )

    def gallery(
        self,
        targets: Sequence[int] | None = None,
        render: Render | None = None,
        *,
        target_render: Render | None = None,
        pair_render: PairRender | None = None,
        k: int = 5,
    ) -> Gallery:
        """Return targets with their most helpful and most harmful train rows, as a notebook or a page shows them.

        Args:
            targets: Targets to show; ``None`` takes the first 100.
            render: ``render(row)`` returns what train row ``row`` looks like: an image (array, tensor, PIL), text, a
                mapping of names to values, or ``(token, weight)`` pairs; ``None`` shows row numbers.
            target_render: The same for targets.
            pair_render: ``pair_render(row, target)`` in place of ``render``, where a row looks different for every
                target, such as tokens with their own scores (:func:`~trak_lite.token_scores`).
            k: Rows at either end.

        Raises:
            InvalidInputError: If there is no such target, or what a render returned cannot be shown.
        """
        return Gallery.of(self, targets, Renders(render, target_render, pair_render), k=k)

    def _repr_html_(self) -> str:
        """Return what notebooks show: sizes, settings, verdict and top rows."""
        return notebook_summary(self)

    def _checked_rows(self, rows: ArrayLike, target: int | None) -> NDArray[np.int64]:
        """Return row numbers ``(n,)`` or ``(M, k)`` that exist."""
        wanted = np.asarray(rows)
        num_rows, num_targets = self.shape
        fits = wanted.ndim == 1 or (wanted.ndim == 2 and target is None and len(wanted) == num_targets)
        whole = wanted.dtype.kind in "iu" and wanted.size > 0
        if not fits or not whole or wanted.min() < 0 or wanted.max() >= num_rows:
            raise InvalidInputError(
                f"rows must be whole numbers from 0 to {num_rows - 1}, (n,) or for all targets ({num_targets}, k), got "
                f"{wanted.dtype} of shape {wanted.shape}."
            )
        return wanted.astype(np.int64)

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with train rows as index and targets as columns (needs pandas)."""
        import pandas as pd

        num_rows, num_targets = self.shape
        return pd.DataFrame(
            self.numpy(),
            index=pd.RangeIndex(num_rows, name="train_row"),
            columns=pd.RangeIndex(num_targets, name="target"),
        )

    def to_xarray(self) -> xr.DataArray:
        """Return a DataArray with dimensions ``train_row`` and ``target`` and the settings as attributes."""
        import xarray as xr

        num_rows, num_targets = self.shape
        return xr.DataArray(
            self.numpy(),
            dims=("train_row", "target"),
            coords={"train_row": np.arange(num_rows), "target": np.arange(num_targets)},
            name=self.name,
            attrs={key: str(value) for key, value in self.settings.items()},
        )
