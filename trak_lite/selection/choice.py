"""``select``: k train rows by their scores.

Shapes: N train rows, M targets, T groups of targets, G labels of train rows, K feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.validate import one_of, positive_int, real_at_least, some_of
from trak_lite.data.columns import Column, Where, column_of, label_text, wanted_rows
from trak_lite.errors import InvalidInputError
from trak_lite.scoring.matrix import AbstractScoreMatrix, HeldMatrix
from trak_lite.scoring.scores import Scores
from trak_lite.selection._greedy import greedy
from trak_lite.selection._stream import Candidates, Reduction, TargetGroups, best_rows, real_matrix
from trak_lite.selection.result import Selection

Method = Literal["top", "less", "greedy", "balanced"]
REDUCTIONS: Final[dict[str, Reduction]] = {"top": "mean", "less": "max", "greedy": "mean", "balanced": "mean"}
"""The methods, and the default reduction of each."""
_LARGEST_POOL: Final = 10_000


def select(
    scores: Scores | ArrayLike,
    k: int,
    method: Method = "top",
    *,
    sign: Literal["helpful", "harmful"] = "helpful",
    reduction: Reduction | None = None,
    target_groups: ArrayLike | None = None,
    groups: ArrayLike | str | None = None,
    data: Any = None,
    quotas: Literal["equal", "proportional"] | Mapping[Any, int] | None = None,
    features: ArrayLike | None = None,
    diversity: float | None = None,
    pool: int | None = None,
    where: Where | None = None,
) -> Selection:
    r"""Choose k train rows by their scores, in one pass over the scores.

    A row has one value: the mean, sum or maximum (``reduction``) over groups of targets of its mean score for the
    targets of a group. Sums are in float64. Each method chooses by this value:

    - ``"top"``: the k rows with the largest values; by default the value is the mean.
    - ``"less"``: the same; by default the value is the maximum. With scores of :class:`~trak_lite.methods.LESS` this
      is the selection of Xia et al. (arXiv:2402.04333, section 4.2), where a row is useful if it is useful for one
      task. The paper takes the mean gradient of a task before the cosine; here the mean is that of the scores.
    - ``"greedy"``: valuable rows that are not alike. Of the ``pool`` rows with the largest values, each step takes the
      row that adds most to :math:`\sum_i v_i / s + \alpha \log\det(I + C / 0.1) / \log 11`, with the root mean square s
      of the values of the pool, the cosines C of the chosen rows' features, and :math:`\alpha` = ``diversity``. The
      first term counts values, the second is the information that noisy observations along the rows give (Krause et
      al., JMLR 9, 2008, section 3), computed by incremental Cholesky rows (Chen et al., NeurIPS 2018). The second copy
      of a row adds 27 % of the information of the first.
    - ``"balanced"``: the rows with the largest values of each label of ``groups``, as many as ``quotas`` says.

    Of values that are equal in float64 the lower row number is chosen, and comes first. The result does not depend on
    the chunks of the scores. Memory: one tile of scores, 2 k rows, the labels ``groups``, and for ``"greedy"``
    ``8 pool (C K + k)`` bytes for C checkpoints; none depends on N M.

    Args:
        scores: Scores, or an array or a tensor ``(N, M)`` (also a memory map), of which larger numbers are better.
        k: Number of rows; all rows are chosen if there are fewer than k, as by :meth:`trak_lite.Scores.top`.
        method: ``"top"``, ``"less"``, ``"greedy"`` or ``"balanced"``.
        sign: ``"harmful"`` negates all scores first, and chooses rows to remove: with the largest reduction a row is
            harmful if it harms one group.
        reduction: ``"mean"``, ``"sum"`` or ``"max"``, over groups of targets.
        target_groups: ``(M,)`` label of each target, such as its task; ``None`` makes each target a group.
        groups: ``(N,)`` label of each train row for ``"balanced"`` (its class, source), or the name of a column of
            ``data``, or of one that ``featurize`` stored.
        data: With the name of a column: a ``datasets.Dataset``, a pandas frame or a mapping of arrays, with N rows;
            ``None`` uses the columns of the store.
        quotas: ``"equal"`` (the default) shares k equally, and labels with too few rows leave the rest to the others;
            ``"proportional"`` keeps the shares of the labels in the train rows; a mapping gives the number of rows of
            each label, which it names by value or text, as ``where`` does.
        features: ``(N, K)`` features for ``"greedy"``, such as embeddings; ``None`` reads the stored rows of the scores
            (of all checkpoints, whose cosines are averaged).
        diversity: alpha of ``"greedy"``, at least 0; ``None`` is 1.
        pool: Number of candidates for ``"greedy"``, at least k; ``None`` is 4 k, at most N and 10,000 (at least k).
        where: Choose from some train rows only, as in :meth:`trak_lite.Scores.top`: a mask, or values of stored columns
            (of ``data``, if given). Shares of ``quotas`` are those of these rows.

    Returns:
        The rows, and for each row its value, the group of targets with the largest mean score, and its redundancy.

    Raises:
        InvalidInputError: If k or another argument is invalid, does not belong to the method, a label is missing, or
            no row satisfies ``where``.
        UnknownNameError: If a name or a column is unknown.
        NonFiniteError: If a score or a feature is NaN or infinite, as of scores that hold only some rows.
        StateError: If ``"greedy"`` needs stored rows, and the scores were not computed from any.

    Example:
        >>> scores = np.array([[3.0, 0.0], [0.0, 2.0], [1.0, 0.5], [-1.0, 0.0]])
        >>> select(scores, 2).indices
        array([0, 1])
        >>> select(scores, 1, sign="harmful").indices
        array([3])
        >>> chosen = select(scores, 2, "less", target_groups=["code", "text"])
        >>> chosen.best_targets
        array(['code', 'text'], dtype='<U4')
        >>> select(scores, 2, "balanced", groups=["a", "a", "b", "b"]).indices
        array([0, 2])
    """
    method = cast(Method, one_of(REDUCTIONS, method=method))
    factor = 1.0 if one_of(("helpful", "harmful"), sign=sign) == "helpful" else -1.0
    chosen_reduction = REDUCTIONS[method] if reduction is None else reduction
    one_of(("mean", "sum", "max"), reduction=chosen_reduction)
    matrix: AbstractScoreMatrix
    if isinstance(scores, Scores):
        matrix = scores.matrix
    else:
        matrix = HeldMatrix(real_matrix(scores, "scores must be a Scores object or real numbers (N, M)"))
    num_rows, num_targets = matrix.shape
    wanted = None
    if where is not None:
        columns = _columns(scores, where, data, num_rows) if isinstance(where, Mapping) else {}
        wanted = wanted_rows(where, columns, num_rows)
    most = num_rows if wanted is None else int(wanted.sum())
    k = min(positive_int(k=k), most)
    _refuse_others(
        method,
        balanced={"groups": groups, "data": None if isinstance(where, Mapping) else data, "quotas": quotas},
        greedy={"features": features, "diversity": diversity, "pool": pool},
    )
    tasks = None if target_groups is None else Column.of(target_groups, num_targets, "target_groups")
    targets = TargetGroups(tasks, chosen_reduction, factor)
    made_with: dict[str, Any] = {"method": method, "sign": sign, "reduction": chosen_reduction}
    if wanted is not None:
        made_with["chosen_from"] = most
    if isinstance(scores, Scores):
        made_with["targets"] = scores.name
    best = partial(best_rows, matrix, targets, wanted=wanted)
    if method == "balanced":
        rows, more, settings = _balanced(best, k, _labels(groups, data, scores, num_rows), quotas, wanted)
    elif method == "greedy":
        read = _feature_reader(scores, features, num_rows)
        rows, more, settings = _greedy(best, k, read, diversity, pool, most)
    else:
        rows, more, settings = best(np.array([k])), {}, {}
    labels = np.arange(num_targets) if tasks is None else tasks.labels
    return Selection(
        rows.rows,
        rows.values * factor + 0.0,  # scores in their own sign
        labels[rows.strongest],
        rows.best * factor + 0.0,
        num_rows,
        settings={**made_with, **settings},
        **more,
    )


def _balanced(
    best: Callable[..., Candidates],
    k: int,
    groups: Column,
    quotas: str | Mapping[Any, int] | None,
    wanted: NDArray[np.bool_] | None,
) -> tuple[Candidates, dict[str, Any], dict[str, Any]]:
    """Return the best rows of each label, their labels, and the quotas as JSON values."""
    quotas = "equal" if quotas is None else quotas
    counts = _quotas_of(groups if wanted is None else groups.take(np.flatnonzero(wanted)), k, quotas)
    rows = best(counts, groups.places)
    named: Any = quotas
    if not isinstance(quotas, str):
        named = {text: count for text, count in zip(groups.texts, counts.tolist(), strict=True) if count}
    return rows, {"groups": groups.labels[rows.places]}, {"quotas": named}


def _quotas_of(groups: Column, k: int, quotas: str | Mapping[Any, int]) -> NDArray[np.int64]:
    """Return the number of rows to take of each label, ``(G,)``; they add up to k, which is at most N.

    Example:
        >>> groups = Column.of(list("aaaaab"), 6, "groups")
        >>> _quotas_of(groups, 4, "equal").tolist()
        [3, 1]
    """
    if isinstance(quotas, Mapping):
        return _given(groups, k, quotas)
    if one_of(("equal", "proportional"), quotas=quotas) == "equal":
        return _equal(groups.sizes, k)
    return _proportional(groups.sizes, k)


def _equal(sizes: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Share k equally. Labels with fewer rows give all of them; the first of the others take what does not divide."""
    level, above = 0, k  # bounds of the largest number that every label can give, if it has as many rows
    while above - level > 0:
        middle = (level + above + 1) // 2
        level, above = (middle, above) if np.minimum(sizes, middle).sum() <= k else (level, middle - 1)
    taken = np.minimum(sizes, level)
    taken[np.flatnonzero(sizes > level)[: k - int(taken.sum())]] += 1
    return taken


def _proportional(sizes: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Share k in proportion to the sizes, by largest remainders; of equal remainders the first label gets more."""
    total = int(sizes.sum())
    exact = [int(size) * k for size in sizes]  # Python integers, as the products may exceed 64 bits
    taken = np.array([product // total for product in exact], dtype=np.int64)
    remainders = np.array([-(product % total) for product in exact], dtype=np.int64)
    taken[np.argsort(remainders, kind="stable")[: k - int(taken.sum())]] += 1
    return taken


def _given(groups: Column, k: int, quotas: Mapping[Any, int]) -> NDArray[np.int64]:
    each = Column(groups.labels, np.arange(len(groups.labels)))
    texts = () if each.labels.dtype.kind in "iuf" else each.texts
    index_of = {label: index for index, label in enumerate((*each.labels.tolist(), *texts))}
    sizes, wrong = groups.sizes, []
    taken = np.zeros_like(sizes)
    for label, count in quotas.items():
        index = index_of.get(label, index_of.get(label_text(label)))
        indices = np.flatnonzero(each.matches(label)) if index is None else [index % len(each.labels)]
        left = int((sizes[indices] - taken[indices]).sum())
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= left:
            wrong.append(f"{label!r}: {count!r} of {left}")
        else:
            taken[indices] += count
    if wrong:
        raise InvalidInputError(
            f"quotas must be whole numbers from 0 to the number of rows with the label, got {some_of(wrong)}."
        )
    total = sum(quotas.values())
    if total != k:
        raise InvalidInputError(f"quotas add up to {total}, and k is {k}. Make them equal.")
    return taken


def _greedy(
    best: Callable[..., Candidates],
    k: int,
    read: Callable[[NDArray[np.int64]], Sequence[NDArray[Any]]],
    diversity: float | None,
    pool: int | None,
    most: int,
) -> tuple[Candidates, dict[str, Any], dict[str, Any]]:
    """Return rows of a pool that are not alike, how much of each the rows before it explain, and the settings."""
    alpha = real_at_least(0.0, diversity=1.0 if diversity is None else diversity)
    size = max(k, min(4 * k, _LARGEST_POOL)) if pool is None else positive_int(pool=pool)
    if size < k:
        raise InvalidInputError(f"pool is {size}, and k is {k}. Give a pool of at least k candidates.")
    settings = {"diversity": alpha, "pool": min(size, most)}
    rows = best(np.array([settings["pool"]]))
    rows = rows.take(np.argsort(rows.rows))  # of equal gains the lower row is chosen
    chosen = greedy(rows.values, read(rows.rows), k, diversity=alpha)
    return rows.take(chosen.order), {"redundancy": chosen.redundancy}, settings


def _refuse_others(method: str, **arguments: Mapping[str, Any]) -> None:
    """Raise if an argument of another method was given."""
    for owner, values in arguments.items():
        names = [name for name, value in values.items() if value is not None]
        if owner != method and names:
            raise InvalidInputError(
                f"{', '.join(names)} belong to method={owner!r}, and method is {method!r}. Leave them out, or change "
                "the method."
            )


def _columns(scores: Scores | ArrayLike, names: Iterable[str], data: Any, num_rows: int) -> dict[str, Column]:
    """Return the columns of ``data`` with these names, or without data those of the store."""
    if data is None:
        return scores.columns if isinstance(scores, Scores) else {}
    return {name: Column.of(column_of(data, name), num_rows, f"the column {name!r}") for name in names}


def _labels(groups: ArrayLike | str | None, data: Any, scores: Scores | ArrayLike, num_rows: int) -> Column:
    if groups is None:
        raise InvalidInputError(
            "method='balanced' needs groups: one label per train row, or the name of a column of data=..."
        )
    if not isinstance(groups, str):
        if data is not None:
            raise InvalidInputError(
                "data is given, and groups is not the name of a column. Give one of: groups='source', data=dataset, or "
                "the labels as groups."
            )
        return Column.of(groups, num_rows, "groups")
    columns = _columns(scores, [groups], data, num_rows)
    if groups not in columns:
        raise InvalidInputError(
            f"groups={groups!r} names a column. Give the data that have it: data=... The columns of the store are "
            f"{sorted(columns)}."
        )
    return columns[groups]


def _feature_reader(
    scores: Scores | ArrayLike, features: ArrayLike | None, num_rows: int
) -> Callable[[NDArray[np.int64]], Sequence[NDArray[Any]]]:
    """Return a function that reads the features of some rows, ``(rows, K)`` for each checkpoint."""
    if features is None:
        if isinstance(scores, Scores):
            return scores.source.row_features  # raises where no rows are stored, before the scores are read
        raise InvalidInputError(
            "method='greedy' needs features of the rows, and an array of scores has none. Give features (N, K), such "
            "as embeddings."
        )
    array = real_matrix(features, f"features must be real numbers ({num_rows}, K)", num_rows)
    return lambda rows: [array[rows]]
