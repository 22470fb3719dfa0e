"""One call that scores targets: the session of all ranks that finds or computes what the scores are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from trak_lite.core.progress import Stages
from trak_lite.data.datasets import Rows
from trak_lite.featurizing.session import KnownSource, Run
from trak_lite.featurizing.targets import TargetSet
from trak_lite.methods import AbstractMethod
from trak_lite.methods.base import MadeScores, MatrixParts
from trak_lite.models.checkpoints import count_checkpoints, iterate_checkpoints
from trak_lite.run import tables
from trak_lite.run.workspace import naming_dropped
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.stored import ScoreResult
from trak_lite.store import AbstractRowTable


@contextmanager
def scoring_session(
    run: Run, targets: Rows, name: str, methods: Sequence[AbstractMethod], checkpoints: KnownSource
) -> Iterator[tuple[TargetSet, dict[str, AbstractRowTable], ScoreResult]]:
    """Open a session with all ranks: the targets, the complete train tables by weights digest, and the scores.

    Checkpoints that are given are loaded, and their missing target features are computed. The first of ``methods``
    is that of the scores; all of them weigh the checkpoints.
    """
    method, held = methods[0], None if run.train is None else run.train.held
    with (
        run.joined(f"score {name!r}") as ranks,
        run.session(ranks=ranks, train=held) as session,
        naming_dropped(session.store) as train_tables,
    ):
        target_set = TargetSet(session, targets, name, method)
        used: list[str] | None = None
        if checkpoints[0] is not None:
            target_set.refuse_others()
            checkpoint_iter = iterate_checkpoints(*checkpoints)
            with Stages.of(count_checkpoints(*checkpoints), target_set.num_units) as stages:
                used = [target_set.add(one, train_tables) for one in stages.each(checkpoint_iter)]
        train = tables.complete_tables(session.store, used, train_tables)
        if used is None and any(len(set(one.weights(len(train)))) > 1 for one in methods):
            tables.require_order(train, run.last)
        source = ScoreSource(
            *(session.store, list(train.values()), name, method),
            layout=run.settings.layout,
            target_identity=target_set.identity,
            device=run.settings.device,
            ranks=ranks,
        )
        yield target_set, train, ScoreResult(source, run.settings.method, len(targets))


def matrix_scores(
    run: Run, targets: Rows, name: str, method: AbstractMethod, checkpoints: KnownSource, parts: MatrixParts
) -> Scores:
    """Return the scores of a method that gives a whole matrix: the stored ones, or those that it makes."""
    made: MadeScores | None = None
    while True:
        opened = scoring_session(run, targets, name, [method], checkpoints)
        with opened as (target_set, train, result):
            target_set.find(train)
            target_set.compare(train)
            ranks = result.source.ranks
            finished = ranks.broadcast("whether they are there", result.is_finished)
            if not finished and made is not None:
                ranks.broadcast("the scores", partial(result.put, made))
            if finished or made is not None:
                return result.scores(run, dense=True)
        made = method.matrix(parts)  # between two sessions, because the parts open their own
